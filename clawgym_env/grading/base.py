"""The grader contract: from a finished workspace to one score in [0, 1].

Runs after the harness has ended, on a copy of the workspace in a fresh sandbox. A grader that cannot score raises
`GraderError`; it never returns 0 for want of an answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from clawgym_env.errors import GraderError
from clawgym_env.messages import Message
from clawgym_env.sandbox.base import Sandbox

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task


@dataclass(frozen=True, slots=True)
class JudgeUsage:
    """What asking a judge model cost."""

    calls: int = 0
    """Answered requests, those in which a reply was not usable included."""
    cached: int = 0
    """Questions that were answered before, at no cost."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """As the server counts them; 0 where it does not."""

    def __add__(self, other: JudgeUsage) -> JudgeUsage:
        return JudgeUsage(
            self.calls + other.calls,
            self.cached + other.cached,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class Grade:
    """A score and what it is made of."""

    reward: float
    """In [0, 1]."""
    components: Mapping[str, float] = field(default_factory=dict)
    output: str = ""
    """What the grader printed (bounded), so that a reward of 0 can be debugged."""
    judge_usage: JudgeUsage = JudgeUsage()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reward) and 0.0 <= self.reward <= 1.0):
            raise GraderError(f"Expected a reward in [0, 1], got {self.reward}. Mend the task's checker.")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a grader may see of a rollout beside the workspace."""

    response: str = ""
    """The answer the harness shows its user, of the last turn."""
    conversation: tuple[Message, ...] = ()
    """The main agent's messages in order over all sessions and compactions, the system prompts left out."""


@runtime_checkable
class Grader(Protocol):
    """Scores one workspace."""

    async def grade(self, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
        """Score the workspace found in `sandbox.spec.workdir`.

        Args:
            sandbox: holds the workspace and nothing of the task's hidden files; the grader brings those in itself.
                Fresh unless the task says `grade_in="same"`; no process of the agent lives and no route leads to the
                proxy.
            outcome: what was said.

        Raises:
            GraderError: no usable score.
        """


GraderLike: TypeAlias = Grader | Callable[["Task", Path], float]
"""A grader, or a plain function of the task and a host copy of the workspace."""
