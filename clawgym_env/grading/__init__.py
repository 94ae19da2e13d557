"""Graders: from a finished workspace to a score in [0, 1]."""

from clawgym_env.grading.base import Grade, Grader, GraderLike, JudgeUsage, Outcome
from clawgym_env.grading.function import FunctionGrader
from clawgym_env.grading.judge import Judge, JudgeLike
from clawgym_env.grading.task_grader import TaskGrader, as_grader

__all__ = [
    "FunctionGrader",
    "Grade",
    "Grader",
    "GraderLike",
    "Judge",
    "JudgeLike",
    "JudgeUsage",
    "Outcome",
    "TaskGrader",
    "as_grader",
]
