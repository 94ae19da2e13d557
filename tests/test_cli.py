from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from clawgym_env import cli, registry
from clawgym_env.errors import HarnessError
from clawgym_env.testing import is_running
from clawgym_env.trace.store import RolloutStore
from harness_adapters.noop import NoopHarness

ROOT = Path(__file__).parents[1]
FAKES = ["--sandbox", "clawgym_env.testing:FakeBackend", "--harness", "clawgym_env.testing:InProcessHarness"]
REWARD = """\
grep -q "$(cat reward/word.txt)" answer.txt && score=1.0 || score=0.25
echo looked at answer.txt
echo "{\\"right\\": $score}"
echo $score
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three tasks in the ClawGym format; the script below answers two of them."""
    for index, word in enumerate(("apple", "pear", "plum")):
        task = tmp_path / "tasks" / f"task_{index:04d}"
        (task / "reward").mkdir(parents=True)
        entry = {"task_id": task.name, "user_query": f"Say {word}", "metadata": {}}
        (task / "data_entry.json").write_text(json.dumps(entry))
        (task / "reward" / "reward.sh").write_text(REWARD)
        (task / "reward" / "word.txt").write_text(word)
    (tmp_path / "script.json").write_text(json.dumps(["apple or plum"]))
    return tmp_path


def flags(folder: Path) -> list[str]:
    return [*FAKES, "--tasks", str(folder / "tasks"), "--engine", f"scripted:{folder / 'script.json'}"]


def test_rollout_prints_what_each_came_to(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rollout", *flags(folder), "--limit", "3", "--run-dir", str(folder / "run")]) == 0
    printed = capsys.readouterr().out
    assert "task_0000  in-process  completed, reward 1.000 (right 1)" in printed
    assert "task_0001  in-process  completed, reward 0.250 (right 0.25)" in printed
    assert printed.count("calls 1  kept trajectories 1") == 3
    assert "3 rollouts, 3 graded, mean reward 0.750" in printed
    assert "looked at answer.txt" not in printed
    with RolloutStore(folder / "run", read_only=True) as store:
        assert [rollout.task_id for rollout in store.rollouts()] == ["task_0000", "task_0001", "task_0002"]


def test_verbose_shows_the_tree_and_what_harness_and_grader_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["rollout", *flags(folder), "-v"]) == 0
    printed = capsys.readouterr().out
    for section in ("-- tree", "-- answer", "-- harness (exit code 0)", "-- grader"):
        assert section in printed
    assert "looked at answer.txt" in printed
    assert "1 rollouts, 1 graded" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rollout", "--harness", "minni"], "Did you mean 'mini'"),
        (["rollout", "--tasks", "/nowhere/at/all"], "/nowhere/at/all"),
        (["rollout", "--engine", "scripted:/nowhere.json"], "/nowhere.json"),
        (["rollout", "--temperature", "-1"], "temperature"),
        (["proxy", "--engine", "torch:/nowhere/at/all"], "/nowhere/at/all"),
        (["proxy", "--engine", "scribed"], "scripted:FILE"),
        (["rollout", "--sandbox", "no_such_module:Backend"], "no_such_module"),
        (["install", "minni"], "pi"),
        (["policy", "build", "large"], "tiny"),
        (["tasks", "check", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.startswith("clawgym: ")
    assert printed.count("\n") == 1


def test_what_is_not_installed_or_built_names_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path))
    assert cli.main(["rollout"]) == 1
    assert "Run: clawgym policy build tiny" in capsys.readouterr().err
    assert cli.main(["rollout", "--harness", "pi"]) == 1
    assert "Run: clawgym install pi" in capsys.readouterr().err


class _Installs(NoopHarness):
    """Installs itself, unless it is the broken one."""

    def __init__(self, *, broken: bool = False) -> None:
        self._broken = broken

    def install(self, cache: Path) -> None:
        if self._broken:
            raise HarnessError("Expected a build for this processor, got none.")
        logging.getLogger("harness_adapters.test").info("toy 1.0: 3 MB in 1 s.")


def _broken() -> _Installs:
    return _Installs(broken=True)


def test_install_all_says_what_it_does_and_goes_on_after_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registry, "HARNESSES", {"bad": f"{__name__}:_broken", "toy": f"{__name__}:_Installs"})
    monkeypatch.setattr(registry, "MCP_SERVERS", {})
    assert cli.main(["install", "toy"]) == 0
    assert cli.main(["install", "all"]) == 1
    printed = capsys.readouterr()
    assert printed.out == 2 * "toy 1.0: 3 MB in 1 s.\n"
    assert printed.err == (
        "bad: Expected a build for this processor, got none.\n"
        "clawgym: Expected to install every harness, got no bad; the reasons are above.\n"
    )


def test_tasks_check_counts_sound_tasks_and_names_every_broken_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tasks", "check", str(folder / "tasks")]) == 0
    assert "3 tasks with 6 files" in capsys.readouterr().out
    (folder / "tasks" / "task_0001" / "data_entry.json").write_text("{")
    (folder / "tasks" / "task_0002" / "stray").touch()
    assert cli.main(["tasks", "check", str(folder / "tasks")]) == 1
    printed = capsys.readouterr().out
    assert "1 tasks with 2 files" in printed
    assert "task_0001/data_entry.json" in printed
    assert "task_0002/stray" in printed


def test_a_mistyped_command_line_exits_with_2() -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["rollout", "--no-such-flag"])


SLEEPER = """
import asyncio
from clawgym_env.testing import InProcessHarness

async def act(ask, sandbox, context):
    await sandbox.exec(["sh", "-c", "sleep 997 & echo $! > pid; cp pid $PIDFILE; wait"], env={"PIDFILE": %r})
    return ""

def sleeper():
    return InProcessHarness(act)
"""


def test_ctrl_c_ends_every_sandbox_and_exits_with_130(folder: Path) -> None:
    pid_file = folder / "pid"
    (folder / "sleeping_harness.py").write_text(SLEEPER % str(pid_file))
    argv = [sys.executable, "-m", "clawgym_env.cli", "rollout", *flags(folder)]
    argv[argv.index("clawgym_env.testing:InProcessHarness")] = "sleeping_harness:sleeper"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "TMPDIR": str(folder)}
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while not (pid_file.is_file() and pid_file.read_text().strip()):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, printed = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in printed
    assert "Traceback" not in printed
    assert not is_running(int(pid_file.read_text()))
    assert not list(folder.glob("clawgym-*")), "temporary folders are removed"


def test_proxy_serves_an_outside_harness_until_ctrl_c(folder: Path) -> None:
    (folder / "token").write_text("secret\n")
    argv = [sys.executable, "-m", "clawgym_env.cli", "proxy", "--engine", f"scripted:{folder / 'script.json'}"]
    argv += ["--port", "0", "--admin-token-file", str(folder / "token"), "--run-dir", str(folder / "run")]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("models  http://127.0.0.1:"), process.communicate()
        admin = process.stdout.readline().split()[1]
        ticket = httpx.post(f"{admin}/rollouts", headers={"authorization": "Bearer secret"}).json()
        body = {"model": "any", "messages": [{"role": "user", "content": "fruit?"}]}
        answer = httpx.post(f"{ticket['base_url']}/v1/chat/completions", json=body, timeout=30)
        assert answer.json()["choices"][0]["message"]["content"] == "apple or plum"
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed, errors) == (0, "", ""), "the token of a file is not printed"
    with RolloutStore(folder / "run", read_only=True) as store:
        assert len(store.calls(ticket["id"])) == 1
