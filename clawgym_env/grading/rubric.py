"""Grading by a judge model's answers to the criteria of a rubric.

Called by `task_grader`. The workspace is read first (`evidence.collect`), so that the judge may be asked while a
command already works there. Invariant: a criterion scores 0 without the judge's word only where the file it is about,
or all work, is missing; whatever else is no verdict is a `GraderError`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from clawgym_env.grading.base import Grade, JudgeUsage, Outcome
from clawgym_env.grading.evidence import Evidence
from clawgym_env.grading.judge import Judge
from clawgym_env.grading.judge_prompt import SYSTEM, judge_prompt
from clawgym_env.grading.specs import Criterion, RubricGrading
from clawgym_env.grading.verdict import Verdict, read_verdict

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task


async def grade_rubric(grading: RubricGrading, task: Task, evidence: Evidence, outcome: Outcome, judge: Judge) -> Grade:
    """Return the weighted mean of the criteria's scores, each of which is a component.

    Raises:
        GraderError: the judge gave no usable verdict.
    """
    nothing = evidence.is_empty and not (grading.show_conversation and outcome.conversation)
    asked = [] if nothing else [one for one in grading.criteria if one.file not in evidence.missing]
    together = [[one] for one in asked] if grading.separate_calls or not asked else [asked]
    answers = await asyncio.gather(
        *(_ask(criteria, grading, task, evidence, outcome, judge) for criteria in together), return_exceptions=True
    )
    scores = {one.name: 0.0 for one in grading.criteria}
    lines = ["The agent left nothing to judge."] if nothing else []
    lines += [f"{one.name}: 0, no file {one.file}" for one in grading.criteria if not nothing and one not in asked]
    lines += [
        f"Shown to the judge by name only, since it is no text: {file.path}"
        for file in evidence.files
        if not file.is_text
    ]
    used = JudgeUsage()
    for criteria, answer in zip(together, answers, strict=True):
        if isinstance(answer, BaseException):
            raise answer
        verdict, usage = answer
        given = dict(zip((one.name for one in criteria), verdict.scores, strict=True))
        scores |= given
        lines += [", ".join(f"{name}: {score:g}" for name, score in given.items()), verdict.notes]
        used += usage
    total = sum(one.weight for one in grading.criteria)
    reward = sum(one.weight * scores[one.name] for one in grading.criteria) / total
    return Grade(min(1.0, reward), scores, "\n".join(lines), used)


async def _ask(
    criteria: Sequence[Criterion],
    grading: RubricGrading,
    task: Task,
    evidence: Evidence,
    outcome: Outcome,
    judge: Judge,
) -> tuple[Verdict, JudgeUsage]:
    prompt = judge_prompt(
        [task.instruction, *(turn.text for turn in task.turns)],
        evidence,
        criteria,
        guidance=grading.guidance,
        conversation=outcome.conversation if grading.show_conversation else None,
    )
    return await judge.ask(SYSTEM, prompt, functools.partial(read_verdict, criteria=criteria))
