"""The default grader: judges every task as its own `grading` says.

Made by `as_grader`, called by the runner. Each kind of grading is a function of its own module; this one only chooses.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from clawgym_env.errors import GraderError, JudgeMissing
from clawgym_env.grading.answer import score_answer
from clawgym_env.grading.base import Grade, Grader, GraderLike, Outcome
from clawgym_env.grading.command import grade_command
from clawgym_env.grading.evidence import collect
from clawgym_env.grading.function import FunctionGrader
from clawgym_env.grading.hybrid import grade_hybrid
from clawgym_env.grading.judge import Judge
from clawgym_env.grading.rubric import grade_rubric
from clawgym_env.grading.specs import AnswerGrading, CommandGrading, HybridGrading, RubricGrading
from clawgym_env.sandbox.base import Sandbox

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

MAX_ANSWER_BYTES = 1 << 20
_NOT_THE_AGENTS = frozenset({errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
"""Errors that say nothing about an answer."""


class TaskGrader:
    """Grades by the task's own `CommandGrading`, `RubricGrading`, `HybridGrading` or `AnswerGrading`.

    Args:
        judge: answers the rubrics of tasks that have one.
    """

    def __init__(self, judge: Judge | None = None) -> None:
        self.judge = judge

    def check(self, task: Task) -> None:
        """Refuse a task that cannot be graded with what is given, before its rollout costs anything.

        Raises:
            JudgeMissing: with the keyword to give.
        """
        if isinstance(task.grading, RubricGrading | HybridGrading):
            self._judge(task)

    async def grade(self, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
        """Score the workspace found in `sandbox.spec.workdir`; see `Grader.grade`."""
        grading = task.grading
        if isinstance(grading, CommandGrading):
            return await grade_command(grading, task, sandbox, outcome)
        if isinstance(grading, AnswerGrading):
            return await _grade_answer(grading, task, sandbox, outcome)
        judge = self._judge(task)
        if isinstance(grading, HybridGrading):
            return await grade_hybrid(grading, task, sandbox, outcome, judge)
        evidence = await collect(grading, task, sandbox)
        return await grade_rubric(grading, task, evidence, outcome, judge)

    def _judge(self, task: Task) -> Judge:
        if self.judge is None:
            raise JudgeMissing(task.id)
        return self.judge


async def _grade_answer(grading: AnswerGrading, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
    given = outcome.response
    if grading.file is not None:
        try:
            path = f"{sandbox.spec.workdir}/{grading.file}"
            given = (await sandbox.read_file(path, max_bytes=MAX_ANSWER_BYTES)).decode(errors="replace")
        except OSError as error:
            if error.errno in _NOT_THE_AGENTS:
                raise GraderError(f"Expected to read the answer of task {task.id!r}, got: {error}") from error
            # The agent's doing: no file, a folder in its place, one of gigabytes.
            return Grade(0.0, {"answer": 0.0}, f"Expected an answer in {grading.file}, got: {error}")
    score = score_answer(grading.expected, given, tolerance=grading.tolerance)
    return Grade(score, {"answer": score}, f"Expected {grading.expected!r}, got {given[-500:]!r}")


def as_grader(grader: GraderLike | None, *, judge: Judge | None = None) -> Grader:
    """Return a grader: the tasks' own for None, a plain function wrapped, a `Grader` as it is.

    Args:
        judge: for the tasks' own grading; a grader that replaces it brings its own.
    """
    if grader is None:
        return TaskGrader(judge)
    if judge is not None:
        raise ValueError("Expected a judge or a grader, got both: the judge answers the rubrics that tasks bring.")
    if isinstance(grader, type):
        raise TypeError(f"Expected a grader or a function, got the class {grader.__name__}. Make an instance of it.")
    if isinstance(grader, Grader):
        return grader
    if callable(grader):
        return FunctionGrader(grader)
    raise TypeError(f"Expected a grader or a function (task, workspace) -> float, got {grader!r}.")
