"""Evaluation: a policy through harnesses on tasks, and what it came to in numbers that can be trusted.

`evaluate` runs or resumes, `EvaluationResult` is what `results.json` holds, `report` turns it into text for people.
"""

from __future__ import annotations

from clawgym_env.evaluation.result import EvaluationResult, StopCount, Summary, TaskResult, Ungraded
from clawgym_env.evaluation.run import Progress, evaluate
from clawgym_env.evaluation.settings import EvaluationError, EvaluationSettings

__all__ = [
    "EvaluationError",
    "EvaluationResult",
    "EvaluationSettings",
    "Progress",
    "StopCount",
    "Summary",
    "TaskResult",
    "Ungraded",
    "evaluate",
]
