"""Grading by a command and a judge together.

Called by `task_grader`. The judge's view is taken before the command's hidden files enter; then both sides work at
once. Invariant: a side without a score becomes what the task says, never 0 in silence.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import Grade, JudgeUsage, Outcome
from clawgym_env.grading.command import grade_command
from clawgym_env.grading.evidence import collect
from clawgym_env.grading.judge import Judge
from clawgym_env.grading.rubric import grade_rubric
from clawgym_env.grading.specs import HybridGrading
from clawgym_env.sandbox.base import Sandbox

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

logger = logging.getLogger(__name__)


async def grade_hybrid(grading: HybridGrading, task: Task, sandbox: Sandbox, outcome: Outcome, judge: Judge) -> Grade:
    """Return the weighted mean of both sides; `automated`, `rubric` and the parts of each are components.

    Raises:
        GraderError: a side gave no score and `missing_side` says "error", or neither did.
    """
    evidence = await collect(grading.rubric, task, sandbox)
    automated, rubric = await asyncio.gather(
        grade_command(grading.automated, task, sandbox, outcome),
        grade_rubric(grading.rubric, task, evidence, outcome, judge),
        return_exceptions=True,
    )
    weights = {"automated": grading.automated_weight, "rubric": 1.0 - grading.automated_weight}
    sides: dict[str, Grade] = {}
    failures: list[GraderError] = []
    for name, side in (("automated", automated), ("rubric", rubric)):
        if isinstance(side, Grade):
            sides[name] = side
        elif isinstance(side, GraderError):
            failures.append(side)
        else:
            raise side
    if failures and (grading.missing_side == "error" or not sides):
        raise GraderError("\n".join(map(str, failures)))
    for failure in failures:
        logger.warning("A side of task %s gave no score (%s): %s", task.id, grading.missing_side, failure)
    total = sum(weights[name] for name in sides) if grading.missing_side == "renormalise" else 1.0
    reward = sum(weights[name] * side.reward for name, side in sides.items()) / total
    components = {name: side.reward for name, side in sides.items()}
    for name, side in sides.items():
        components |= {f"{name}/{part}": value for part, value in side.components.items()}
    said = [f"-- {name}\n{side.output}" for name, side in sides.items()]
    said += [f"-- no score ({grading.missing_side})\n{failure}" for failure in failures]
    usage = sides["rubric"].judge_usage if "rubric" in sides else JudgeUsage()
    return Grade(min(1.0, reward), components, "\n".join(said), usage)
