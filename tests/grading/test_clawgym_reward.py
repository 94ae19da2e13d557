"""ClawGym's stock script: the mean that it prints, with the parts that it hides."""

import asyncio
import os
from pathlib import Path

import pytest

from clawgym_env.grading.base import Outcome
from clawgym_env.grading.clawgym_reward import stock_checker, with_mean
from clawgym_env.grading.command import CommandGrader
from clawgym_env.sandbox.base import ExecResult, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks import Task, TaskFile, load_clawgym


@pytest.mark.parametrize(
    ("printed", "mean"),
    [
        ('{\n  "a": 1.0,\n  "b": true,\n  "c": false, "d": "0.5"\n}', "0.625"),
        ("{}", "0.0"),
        ("0.25", "0.25"),
        ("true", "1.0"),
    ],
)
def test_the_mean_of_the_checkers_values_is_the_last_line(printed: str, mean: str) -> None:
    assert with_mean(ExecResult(0, printed.encode(), b"")).stdout.decode().splitlines()[-1] == mean


@pytest.mark.parametrize("printed", ["", "{", '{"a": "x"}', '{"a": null}', "[1]", "null", "[" * 100_000])
def test_what_has_no_mean_is_left_for_the_reader_to_refuse(printed: str) -> None:
    result = ExecResult(0, printed.encode(), b"")
    assert with_mean(result) is result


def test_a_script_of_ones_own_is_not_replaced() -> None:
    files = (TaskFile(path="reward/reward.sh", data=b"echo 1"), TaskFile(path="reward/check.py", data=b""))
    assert stock_checker(Task(id="t", instruction="", hidden_files=files)) is None


@pytest.mark.slow
@pytest.mark.skipif("CLAWGYM_BENCH" not in os.environ, reason="CLAWGYM_BENCH names no folder of ClawGym-Bench tasks")
def test_real_tasks_show_their_parts_and_an_idle_agent_earns_what_the_stock_script_says() -> None:
    async def both(task: Task) -> None:
        sandbox = await LocalBackend().open(SandboxSpec(workdir=task.workdir))
        try:
            for file in task.files:
                await sandbox.write_file(f"{task.workdir}/{file.path}", file.read())
            grade = await CommandGrader().grade(task, sandbox, Outcome())
            stock = await sandbox.exec(task.grading.command)
        finally:
            await sandbox.close()
        assert grade.components
        assert grade.reward == pytest.approx(float(stock.stdout))

    for task in load_clawgym(Path(os.environ["CLAWGYM_BENCH"]))[::8]:
        asyncio.run(both(task))
