"""ClawGym's stock script: we show the parts of the mean that it prints, and the mean is the same."""

import asyncio
import os
from pathlib import Path

import pytest

from clawgym_env.errors import GraderError
from clawgym_env.grading import Outcome, TaskGrader
from clawgym_env.sandbox.base import ExecResult, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks import Task, TaskFile, load_clawgym
from clawgym_env.tasks.clawgym_format import GRADING, STOCK_GRADING

pytestmark = pytest.mark.skipif(
    "CLAWGYM_BENCH" not in os.environ, reason="CLAWGYM_BENCH names no folder of ClawGym-Bench tasks"
)

PRINTED = (
    '{"a": 1.0, "b": true, "c": false, "d": "0.5"}',
    '{\n  "a": 0.25,\n  "b": 0.5\n}',
    '{"reward": 0.5, "ok": true}',
    '{"bonus": 1.5, "malus": -0.5}',
    "{}",
    "0.25",
    "true",
)
REFUSED = ('{"a": null}', '{"a": "x"}', '{"a": [1]}', "{", "")
"""The script fails on these too."""
ZERO_THERE = ("[1]", '"x"', "null")
"""The script prints 0 for these: a checker that prints neither scores nor a score is broken."""


def bench() -> Path:
    return Path(os.environ["CLAWGYM_BENCH"])


def both(task: Task) -> tuple[float | None, ExecResult]:
    """Return our score, None for a failed grading, and what the stock script comes to in the same sandbox."""

    async def main() -> tuple[float | None, ExecResult]:
        sandbox = await LocalBackend().open(SandboxSpec(workdir=task.workdir))
        try:
            for file in task.files:
                await sandbox.write_file(f"{task.workdir}/{file.path}", file.read())
            try:
                grade = await TaskGrader().grade(task, sandbox, Outcome())
                score = grade.reward
                assert grade.components or not task.files
            except GraderError:
                score = None
            return score, await sandbox.exec(GRADING.command)
        finally:
            await sandbox.close()

    return asyncio.run(main())


def checker(printed: str) -> Task:
    task = load_clawgym(bench())[0]
    script = next(file for file in task.hidden_files if file.path == "reward/reward.sh")
    check = TaskFile(path="reward/check.py", data=f"print({printed!r})".encode())
    return task.model_copy(update={"files": (), "hidden_files": (script, check)})


@pytest.mark.parametrize("printed", PRINTED)
def test_what_has_a_mean_has_the_same_here_and_there(printed: str) -> None:
    ours, stock = both(checker(printed))
    assert ours == pytest.approx(float(stock.stdout))


@pytest.mark.parametrize("printed", [*REFUSED, *ZERO_THERE])
def test_what_has_none_is_an_error_here_and_an_error_or_a_zero_there(printed: str) -> None:
    ours, stock = both(checker(printed))
    assert ours is None
    assert (stock.exit_code == 0, stock.stdout.strip()) == ((True, b"0.0") if printed in ZERO_THERE else (False, b""))


@pytest.mark.slow
def test_an_idle_agent_earns_in_real_tasks_what_the_stock_script_says() -> None:
    for task in load_clawgym(bench())[::8]:
        assert task.grading == STOCK_GRADING
        ours, stock = both(task)
        assert ours == pytest.approx(float(stock.stdout))
