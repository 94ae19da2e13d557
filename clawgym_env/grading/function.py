"""A plain Python function as grader.

Made by `as_grader`. The function runs on the host, in a thread of its own, over a throw-away copy of the workspace.
Invariant: what it raises or returns beyond a number in [0, 1] is a `GraderError`; one that hangs delays nobody else.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import Grade, Outcome
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.sandbox.threads import in_thread
from clawgym_env.scratch import scratch_folder

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task


class FunctionGrader:
    """Scores with `function(task, workspace) -> float`.

    Never start a program of the workspace from such a function: it runs outside any sandbox.
    """

    def __init__(self, function: Callable[[Task, Path], float]) -> None:
        self.function = function

    async def grade(self, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
        """Score a host copy of the workspace; see `Grader.grade`. A function that hangs cannot be killed, only left."""
        name = getattr(self.function, "__name__", repr(self.function))
        async with scratch_folder("grade") as folder:
            workspace = folder / "workspace"
            await sandbox.copy_out(sandbox.spec.workdir, workspace)
            value = await self._score(name, task, workspace)
        if not isinstance(value, SupportsFloat) or isinstance(value, str):
            raise GraderError(f"Expected {name} to return a number in [0, 1] for task {task.id!r}, got {value!r}.")
        return Grade(float(value))

    async def _score(self, name: str, task: Task, workspace: Path) -> object:
        call = in_thread(functools.partial(self.function, task, workspace))
        try:
            done, _ = await asyncio.wait({call}, timeout=task.limits.grader_s)
        finally:
            call.cancel()
        if not done:
            raise GraderError(
                f"Expected {name} to score task {task.id!r} within {task.limits.grader_s:g} s, got no end. "
                f"Raise limits.grader_s or make it faster."
            )
        try:
            return call.result()
        except Exception as error:
            raise GraderError(
                f"Expected {name} to score task {task.id!r}, got {type(error).__name__}: {error}"
            ) from error
