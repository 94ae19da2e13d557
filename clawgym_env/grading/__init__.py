"""Graders: from a finished workspace to a score in [0, 1]."""

from clawgym_env.grading.base import Grade, Grader, GraderLike, Outcome
from clawgym_env.grading.command import CommandGrader, as_grader
from clawgym_env.grading.function import FunctionGrader

__all__ = ["CommandGrader", "FunctionGrader", "Grade", "Grader", "GraderLike", "Outcome", "as_grader"]
