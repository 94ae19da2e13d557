"""What a user gets wrong, and what a machine lacks: a line of the form "expected, got, next step" and an exit code."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_env import cli

ROOT = Path(__file__).parents[1]
FORM = re.compile(r"clawgym: Expected .+([,;] got.+|to be (built|installed)\. Run: .+)\n")
"""What is not there needs no `got`."""
NOBODY = "http://127.0.0.1:9/v1"
"""A port that nothing listens on."""

CANNOT_BE = [
    ("rollout --harness minni", "Did you mean 'mini'?"),
    ("rollout --harness mini?colour=red", "'dialect'"),
    ("rollout --harness mini?dialect=latin", "option dialect"),
    ("rollout --harness openclaw?api=latin", "responses"),
    ("rollout --harness claude-code?version=1", "2.0.76"),
    ("rollout --harness command", "command?file="),
    ("rollout --harness command?file=nowhere.toml", "nowhere.toml"),
    ("rollout --harness oracle --tasks {tasks} --engine scripted:{script}", "Take 'bundled'"),
    ("rollout --tasks nowhere/at/all", "Known formats: clawgym"),
    ("rollout --tasks bundeld", "Did you mean 'bundled'?"),
    ("rollout --tasks bundled:level=9", "level"),
    ("rollout --tasks {broken}", "data_entry.json"),
    ("rollout --policy nowhere/at/all", "tiny, smollm2 or a Hugging Face folder"),
    ("rollout --engine scribed", "tiny, smollm2 or a Hugging Face folder"),
    ("proxy --engine scribed", "scripted:FILE"),
    ("rollout --engine scripted:nowhere.json", "JSON array of replies"),
    ("rollout --engine scripted:{broken}/task/data_entry.json", "JSON array of replies"),
    ("rollout --engine openai:" + NOBODY, "URL#MODEL"),
    ("rollout --sandbox dokker", "Did you mean 'docker'?"),
    ("rollout --sandbox docker?speed=11", "'runtime'"),
    ("rollout --sandbox no_such_module:Backend", "PYTHONPATH"),
    ("rollout --sandbox json:Backend", "'Backend' in json"),
    ("rollout --judge nonsense", "URL#MODEL, such as"),
    ("rollout --temperature -1", "--help"),
    ("rollout --limit 0", "at least 1"),
    ("eval --out {strays}", "Choose another folder"),
    ("eval --out {out} --attempts 0", "at least 1"),
    ("eval --out {out} --harness mini mini", "different names"),
    ("install minni", "Did you mean 'mini'?"),
    ("image build", "clawgym image build pi"),
    ("policy build large", "tiny, smollm2"),
    ("tasks check nowhere/at/all", "Known formats: clawgym"),
    ("fidelity --harness minni", "Did you mean 'mini'?"),
    ("fidelity --policy bytes --scenario tea", "scenarios out of"),
    ("fidelity --policy nowhere/at/all", "tiny"),
    ("proxy --engine torch:nowhere/at/all", "tiny, smollm2 or a Hugging Face folder"),
    ("proxy --engine scripted:{script} --admin-token-file nowhere", "Choose another"),
    ("proxy --engine scripted:{script} --admin-token-file {empty}", "Write one into it"),
    ("serve --model nowhere/at/all", "Give --model tiny or a folder"),
    ("reap --sandbox dokker", "Did you mean 'docker'?"),
]
FAILS_HERE = [
    ("rollout", "Run: clawgym policy build tiny"),
    ("rollout --harness pi", "Run: clawgym install pi"),
    ("rollout --engine vllm:" + NOBODY, "Start it with"),
    ("rollout --engine openai:" + NOBODY + "#some-model", "127.0.0.1:9"),
    ("eval --out {out}", "Run: clawgym policy build tiny"),
    ("fidelity", "Run: clawgym policy build tiny"),
    ("serve --model tiny", "Run: clawgym policy build tiny"),
    ("serve --model {model} --python nowhere/python", "Name another with --python"),
    ("fidelity --harness pi", "Run: clawgym install pi"),
    ("image list", "scripts/docker-up"),
    ("image build pi", "scripts/docker-up"),
    ("proxy --engine scripted:{script} --port {taken}", "Choose another, or 0 for any free one"),
    ("proxy --engine scripted:{script} --port 0 --admin-port {taken}", "Choose another, or 0 for any free one"),
    ("proxy --engine scripted:{script} --host 192.0.2.1", "Choose another"),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """An empty cache, no Docker engine, and files to name in commands."""
    for variable in ("CLAWGYM_CACHE", "DOCKER_HOST"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.chdir(tmp_path)
    task = tmp_path / "tasks" / "task"
    (task / "reward").mkdir(parents=True)
    (task / "data_entry.json").write_text(json.dumps({"task_id": "task", "user_query": "Say pear", "metadata": {}}))
    (task / "reward" / "reward.sh").write_text("echo 1.0\n")
    (tmp_path / "broken" / "task").mkdir(parents=True)
    (tmp_path / "broken" / "task" / "data_entry.json").write_text("{")
    (tmp_path / "strays").mkdir()
    (tmp_path / "strays" / "thesis.tex").touch()
    (tmp_path / "script.json").write_text('["pear"]')
    (tmp_path / "empty").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    names = {name: tmp_path / name for name in ("tasks", "broken", "strays", "out", "empty", "model")}
    return {**names, "script": tmp_path / "script.json"}


def said(command: str, places: dict[str, object], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        argv = [word.format(**places, taken=taken.getsockname()[1]) for word in command.split()]
        code = cli.main(argv)
    return code, capsys.readouterr().err


@pytest.mark.parametrize(("command", "hint"), CANNOT_BE)
def test_what_cannot_be_on_any_machine_ends_with_2(
    command: str, hint: str, places: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(command, places, capsys)
    assert FORM.fullmatch(text), text
    assert hint in text
    assert code == 2


@pytest.mark.parametrize(("command", "hint"), FAILS_HERE)
def test_what_this_machine_lacks_ends_with_1(
    command: str, hint: str, places: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = said(command, places, capsys)
    assert FORM.fullmatch(text), text
    assert hint in text
    assert code == 1


def test_every_command_is_tried() -> None:
    tried = {command.split()[0] for command, _ in (*CANNOT_BE, *FAILS_HERE)}
    assert set(cli.COMMANDS) - tried == {"doctor"}, "which never refuses: see test_doctor"


def test_a_rollout_without_a_grade_ends_with_1(places: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    command = "rollout --sandbox docker --tasks {tasks} --engine scripted:{script}"
    code = cli.main([word.format(**places) for word in command.split()])
    printed = capsys.readouterr().out
    assert "scripts/docker-up" in printed
    assert "1 rollouts, 0 graded, no grade" in printed
    assert code == 1


def test_the_traceback_is_shown_to_whoever_asks_for_it(
    places: dict[str, object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CLAWGYM_DEBUG", "1")
    code, text = said("rollout --harness minni", places, capsys)
    assert code == 2
    assert text.startswith("Traceback")
    assert text.splitlines()[-1].startswith("clawgym: Expected a harness")


@pytest.mark.parametrize("error", ["KeyError", "ValueError"])
def test_a_bug_keeps_its_traceback(error: str) -> None:
    code = "import sys; from clawgym_env import cli; sys.exit(cli.main(sys.argv[1:]))"
    bug = f"def Broken():\n    raise {error}('a bug')\n"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, types\nm = types.ModuleType('buggy'); exec({bug!r}, m.__dict__)\n"
         f"sys.modules['buggy'] = m\n{code}", "rollout", "--harness", "buggy:Broken"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "a bug" in done.stderr
