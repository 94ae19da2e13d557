"""The command grader in the real local sandbox: a bundled task and a ClawGym folder as its authors write it."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from clawgym_env.grading import Grade, GraderLike, Outcome, as_grader
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import WORKDIR, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks import Task, TaskFile, load_clawgym
from clawgym_env.tasks.bundled import families

CLAWGYM_REWARD = f"""#!/usr/bin/env bash
set -euo pipefail
python3 {WORKDIR}/reward/check.py {WORKDIR} | python3 -c 'import json, sys; d = json.load(sys.stdin); print(sum(map(float, d.values())) / len(d))'
"""  # noqa: E501 (the one-liner of the real ones)

CLAWGYM_CHECK = """import json, pathlib, sys
root = pathlib.Path(sys.argv[1])
print(json.dumps({"listed": (root / "out" / "list.txt").exists(), "kept": (root / "in" / "a.txt").read_text() == "a"}))
"""


def grade(task: Task, left_by_agent: Mapping[str, str], grader: GraderLike | None = None) -> Grade:
    async def run() -> Grade:
        sandbox = await LocalBackend().open(SandboxSpec(workdir=task.workdir))
        try:
            for file in task.files:
                await sandbox.write_file(f"{task.workdir}/{file.path}", file.read())
            for path, text in left_by_agent.items():
                await sandbox.write_file(f"{task.workdir}/{path}", text.encode())
            return await as_grader(grader).grade(task, sandbox, Outcome())
        finally:
            await sandbox.close()

    return asyncio.run(run())


@pytest.fixture
def clawgym_task(tmp_path: Path) -> Task:
    files = {
        "data_entry.json": json.dumps(
            {"task_id": "t", "user_query": "List in/.", "input_mount_dir": WORKDIR, "metadata": {}}
        ),
        "input_files/in/a.txt": "a",
        "reward/reward.sh": CLAWGYM_REWARD,
        "reward/check.py": CLAWGYM_CHECK,
    }
    for name, text in files.items():
        (tmp_path / "t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "t" / name).write_text(text)
    return load_clawgym(tmp_path)[0]


def test_a_clawgym_folder_is_graded_in_a_sandbox(clawgym_task: Task) -> None:
    assert grade(clawgym_task, {}).reward == 0.5
    assert grade(clawgym_task, {"out/list.txt": "a.txt"}).reward == 1.0


def test_plants_do_not_reach_the_grader_in_a_sandbox(clawgym_task: Task) -> None:
    cheat = "import os\nos.write(1, b'1.0\\n')\nos._exit(0)\n"
    plants = dict.fromkeys(("json.py", "sitecustomize.py", "reward/pathlib.py", "python3"), cheat)
    assert grade(clawgym_task, plants).reward == 0.5


COMPARE = b"print(float(open('answer.txt').read() == open('data/expected.txt').read()))\n"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "script",
    [
        "mkdir -p data; ln -s ../answer.txt data/expected.txt",
        "rm -rf data; mkdir deep; ln -s deep data; ln -s ../answer.txt deep/expected.txt",
        "rm -rf data; echo x > data",
        "rm -rf data; ln -s nowhere data",
        "mkdir -p data/expected.txt/full",
        "mkdir -p data; mkfifo data/expected.txt",
        "mkdir -p data; ln -s ../top.txt data/expected.txt; ln -s answer.txt top.txt",
        "ln -s answer.txt top.txt",
        "mkdir -p top.txt/full",
    ],
)
def test_nothing_in_the_place_of_a_hidden_file_fools_the_grader(script: str, shared: bool) -> None:
    task = Task(
        id="t",
        instruction="",
        files=(TaskFile(path="data/in.txt", data=b"1"),) if shared else (),
        hidden_files=(
            TaskFile(path="data/expected.txt", data=b"secret"),
            TaskFile(path="top.txt", data=b"secret"),
            TaskFile(path="reward/check.py", data=COMPARE),
        ),
        grading=CommandGrading(command=("python3", "reward/check.py")),
    )

    async def run() -> Grade:
        async with await LocalBackend().open(SandboxSpec(workdir=task.workdir)) as sandbox:
            for file in task.files:
                await sandbox.write_file(file.path, file.read())
            assert (await sandbox.exec(["sh", "-c", f"touch answer.txt; {script}"])).exit_code == 0
            grade = await as_grader(None).grade(task, sandbox, Outcome())
            assert await sandbox.read_file("top.txt") == await sandbox.read_file("data/expected.txt") == b"secret"
            return grade

    assert asyncio.run(run()).reward == 0.0


def test_a_bundled_task_is_graded_in_a_sandbox() -> None:
    instance = families()[0].instance(0)
    (step,) = instance.oracle
    assert grade(instance.task, {step.arguments["path"]: step.arguments["content"]}).reward == 1.0
    assert grade(instance.task, {step.arguments["path"]: "nonsense"}).components == {
        "file_exists": 1.0,
        "file_content": 0.0,
    }
    assert grade(instance.task, {}).reward == 0.0


def test_a_function_grades_a_copy_out_of_the_sandbox(clawgym_task: Task) -> None:
    def count(task: Task, workspace: Path) -> float:
        return len(list(workspace.rglob("*.txt"))) / 4

    assert grade(clawgym_task, {"b.txt": ""}, count).reward == 0.5
