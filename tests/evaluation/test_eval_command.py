from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawgym_env import cli

ROOT = Path(__file__).parents[2]
REWARD = """\
grep -q "$(cat reward/word.txt)" answer.txt && score=1.0 || score=0.25
echo "{\\"right\\": $score}"
echo $score
"""
HARNESSES = """
import asyncio
from pathlib import Path
from clawgym_env.errors import SandboxError
from clawgym_env.testing import InProcessHarness, answer_once

async def act(ask, sandbox, context):
    with Path("asked").open("a") as asked:
        print(context.instruction, file=asked)
    while "plum" in context.instruction and not Path("gate").exists():
        await asyncio.sleep(0.05)
    return await answer_once(ask, sandbox, context)

async def broken(ask, sandbox, context):
    raise SandboxError("no room left")

def gated():
    return InProcessHarness(act)

def failing():
    return InProcessHarness(broken)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three tasks in the ClawGym format, in the working directory; the script answers two of them."""
    for index, (word, category) in enumerate((("apple", "red"), ("pear", "green"), ("plum", "red"))):
        task = tmp_path / "tasks" / f"task_{index:04d}"
        (task / "reward").mkdir(parents=True)
        entry = {"task_id": task.name, "user_query": f"Say {word}", "metadata": {"category": category}}
        (task / "data_entry.json").write_text(json.dumps(entry))
        (task / "reward" / "reward.sh").write_text(REWARD)
        (task / "reward" / "word.txt").write_text(word)
    (tmp_path / "script.json").write_text(json.dumps(["apple or plum"]))
    (tmp_path / "eval_harnesses.py").write_text(HARNESSES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def argv(*more: str, harness: str = "clawgym_env.testing:InProcessHarness") -> list[str]:
    fakes = ["--sandbox", "clawgym_env.testing:FakeBackend", "--engine", "scripted:script.json"]
    return ["eval", "--tasks", str(Path("tasks").absolute()), "--harness", harness, *fakes, "--out", "out", *more]


def test_eval_prints_a_line_per_rollout_and_the_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv()) == 0
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("1/3  task_0000  in-process  completed  1.000  ")
    assert lines[2].endswith("mean 0.7500")
    assert "**Pass@1 0.7500**" in printed.out
    assert "| green | 0.2500 |" in printed.out
    assert "Results: out" in printed.out
    assert {path.name for path in (folder / "out").iterdir()} >= {"results.json", "results.csv", "report.md"}
    assert cli.main(argv()) == 0
    assert capsys.readouterr().err == "3 of 3 are there already\n"


@pytest.mark.usefixtures("folder")
def test_a_task_without_a_grade_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, mean in (([], None), (["--ungraded-as-zero"], 0.0)):
        assert cli.main(argv(*flags, harness="eval_harnesses:failing")) == 1
        printed = capsys.readouterr()
        assert "NO GRADE: SandboxError: no room left" in printed.err
        assert "3 UNGRADED" in printed.err
        assert "**3 ROLLOUTS HAVE NO GRADE**" in printed.out
        assert json.loads(Path("out/results.json").read_text())["pass_at_1"] == mean


@pytest.mark.usefixtures("folder")
def test_other_settings_are_exit_code_2_until_told_to_discard(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv("--seed", "3")) == 0
    assert cli.main(argv()) == 2
    assert "Expected seed to be 3" in capsys.readouterr().err
    assert cli.main(argv("--fresh")) == 0
    assert json.loads(Path("out/results.json").read_text())["settings"]["seed"] == 0


def test_after_kill_9_in_mid_run_the_same_command_does_only_what_is_left(folder: Path) -> None:
    command = [sys.executable, "-m", "clawgym_env.cli", *argv(harness="eval_harnesses:gated")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "TMPDIR": str(folder)}
    asked = folder / "asked"
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not (asked.is_file() and "plum" in asked.read_text()):
                assert process.poll() is None, process.communicate()[1]
                time.sleep(0.05)
            second = subprocess.run(command, env=environment, capture_output=True, text=True)
            assert (second.returncode, "by one run" in second.stderr) == (1, True), "two at once are refused"
        finally:
            process.send_signal(signal.SIGKILL)
    assert not (folder / "out" / "results.json").exists()
    (folder / "gate").touch()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr.splitlines()[0]) == (0, "2 of 3 are there already"), done.stderr
    assert asked.read_text().split("\n") == ["Say apple", "Say pear", "Say plum", "Say plum", ""]
    results = json.loads((folder / "out" / "results.json").read_text())
    assert [task["scores"] for task in results["tasks"]] == [[1.0], [0.25], [1.0]]
    assert results["ungraded"]["rollouts"] == 0
