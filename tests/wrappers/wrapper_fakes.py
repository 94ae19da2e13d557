"""Two policies, two harnesses and two kinds of task over the fake borders, for the tests of wrappers."""

from __future__ import annotations

from typing import Any

from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.errors import SandboxError
from clawgym_env.grading.base import Grade
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks.task import Task, TaskSet
from clawgym_env.testing import ANSWER_FILE, Ask, FakeBackend, InProcessHarness, answer_once

TASKS = TaskSet.of(
    [
        Task(id="short", instruction="Say one"),
        Task(id="long", instruction="Say fünf ☃ twice"),
        Task(id="broken", instruction="Say that the sandbox breaks"),
    ]
)
SOUND = ("short", "long")


class LengthGrader:
    """Half the reward for an answer, the other half where it is "yes"."""

    async def grade(self, task: Task, sandbox: Sandbox, response: object) -> Grade:
        answer = (await sandbox.read_file(f"{sandbox.spec.workdir}/{ANSWER_FILE}")).decode()
        right = float(answer == "yes")
        return Grade(0.5 + 0.5 * right, {"right": right, "length": float(len(answer))})


async def fragile(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    if "breaks" in context.instruction:
        raise SandboxError("The machine is gone.")
    return await answer_once(ask, sandbox, context)


class First(InProcessHarness):
    name = "first"


class Second(InProcessHarness):
    name = "second"


def keywords(**changes: Any) -> dict[str, Any]:
    """Return keywords that make environments without processes."""
    return {
        "tasks": TASKS,
        "harness": [First(fragile), Second(fragile)],
        "policies": {"yes": ScriptedEngine(["yes"]), "no": ScriptedEngine(["not at all"])},
        "sandbox": FakeBackend(),
        "grader": LengthGrader(),
        **changes,
    }
