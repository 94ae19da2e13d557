"""What the environment tests share: tasks, a grader and a scripted policy over the fake borders."""

from __future__ import annotations

from typing import Any

from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.errors import SandboxError
from clawgym_env.grading.base import Grade
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks.task import Task, TaskSet
from clawgym_env.testing import ANSWER_FILE, Ask, FakeBackend, InProcessHarness, answer_once

RESERVED = {"episode", "final_obs", "final_info", "TimeLimit.truncated", "terminal_observation"}
FINAL_KEYS = {
    "task_id",
    "harness",
    "group_id",
    "rollout",
    "stop_reason",
    "graded",
    "is_success",
    "reward_components",
    "num_calls",
    "num_trajectories",
    "num_prompt_tokens",
    "num_completion_tokens",
    "policy_version",
    "timing",
}
RESET_KEYS = {"task_id", "harness", "group_id"}

WORDS = ("one", "two", "three", "fünf ☃", "break the sandbox")
TASKS = TaskSet.of([Task(id=f"task-{i}", instruction=f"Say {word}") for i, word in enumerate(WORDS)])
SOUND_TASKS = TASKS[:4]


class WordGrader:
    """1.0 where the answer holds a word of the instruction, else 0.25."""

    async def grade(self, task: Task, sandbox: Sandbox, response: str) -> Grade:
        answer = (await sandbox.read_file(f"{sandbox.spec.workdir}/{ANSWER_FILE}")).decode()
        right = task.instruction.split()[-1] in answer
        return Grade(1.0 if right else 0.25, {"right": float(right), "length": float(len(answer))}, "graded")


def echo(prompt: str, turn: int) -> str:
    return prompt.rsplit("Say ", 1)[-1].split("<")[0]


async def fragile(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    if "break the sandbox" in context.instruction:
        raise SandboxError("The machine is gone.")
    return await answer_once(ask, sandbox, context)


class Other(InProcessHarness):
    name = "other"


def keywords(**changes: Any) -> dict[str, Any]:
    """Return keywords that make an environment without processes."""
    return {
        "tasks": SOUND_TASKS,
        "harness": InProcessHarness(fragile),
        "engine": ScriptedEngine(echo),
        "sandbox": FakeBackend(),
        "grader": WordGrader(),
        **changes,
    }
