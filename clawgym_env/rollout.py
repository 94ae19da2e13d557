"""A finished rollout: the whole opaque run of one harness on one task, as data.

Made by `runner`, returned by the environments, trained on by learners. Invariant: immutable, and every rollout has a
stop reason; one without a grade has reward 0.0 *and* `graded` False, and learners leave it out of statistics and loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

from clawgym_env.grading.base import Grade
from clawgym_env.trace.prefix_tree import PrefixTree


class StopReason(StrEnum):
    """What ended a rollout."""

    COMPLETED = "completed"
    HARNESS_ERROR = "harness_error"
    MAX_CALLS = "max_calls"
    TOKEN_BUDGET = "token_budget"
    WALL_CLOCK = "wall_clock"
    CONTEXT_LENGTH = "context_length"
    SANDBOX_ERROR = "sandbox_error"
    ENGINE_ERROR = "engine_error"
    GRADER_ERROR = "grader_error"


class FailureRule(NamedTuple):
    """What happens to a rollout that stopped for some reason."""

    graded: bool
    trained: bool
    retries: int
    """How often infrastructure is tried again before the rollout is excluded."""


FAILURE_RULES: Mapping[StopReason, FailureRule] = {
    StopReason.COMPLETED: FailureRule(True, True, 0),
    StopReason.MAX_CALLS: FailureRule(True, True, 0),
    StopReason.TOKEN_BUDGET: FailureRule(True, True, 0),
    StopReason.WALL_CLOCK: FailureRule(True, True, 0),
    StopReason.CONTEXT_LENGTH: FailureRule(True, True, 0),
    StopReason.HARNESS_ERROR: FailureRule(True, True, 0),
    StopReason.SANDBOX_ERROR: FailureRule(False, False, 2),
    StopReason.ENGINE_ERROR: FailureRule(False, False, 2),
    StopReason.GRADER_ERROR: FailureRule(False, False, 2),
}
"""For a rollout in which the policy was asked at least once; see `failure_rule`."""


def failure_rule(stop_reason: StopReason, *, policy_asked: bool) -> FailureRule:
    """Return the rule for a rollout that stopped like this.

    Args:
        policy_asked: whether any call was captured that is for the task itself (no title, no summary), or the harness
            calls no model by design. Where the policy was never asked, whatever ended the rollout is not its doing: an
            untouched workspace's score would be a silent zero.
    """
    rule = FAILURE_RULES[stop_reason]
    if policy_asked or not rule.graded:
        return rule
    # A first prompt that is too long will be too long again.
    return FailureRule(graded=False, trained=False, retries=0 if stop_reason is StopReason.CONTEXT_LENGTH else 2)


TRUNCATED = frozenset(StopReason) - {StopReason.COMPLETED, StopReason.HARNESS_ERROR}
"""Ended by our budget or our infrastructure, not by the harness."""

Exclusion = Literal["over_branched", "stale", "ungraded"]


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One finished rollout. Identity, not value, decides equality; `copy.deepcopy` returns the same object."""

    id: str
    task_id: str
    harness: str
    policy: str
    """Name of the policy that answered."""
    group_id: str
    """Rollouts of one group share task and harness."""
    index: int
    """Position in the group."""
    seed: int
    tree: PrefixTree
    stop_reason: StopReason
    grade: Grade | None
    exclusion: Exclusion | None
    instruction: str
    response: str
    error: str = ""
    """Why there is no grade, or the harness's failure, in words."""
    harness_exit_code: int | None = None
    harness_output: str = ""
    """stdout and stderr, bounded."""
    timing: Mapping[str, float] = field(default_factory=dict)
    """Seconds: open, harness, settle, grade, total."""
    rewritten_calls: int = 0
    """Calls in whose request the adapter replaced a nonce or clock stamp, which would have kept prefixes apart."""

    @property
    def reward(self) -> float:
        """The grade's reward, 0.0 without a grade."""
        return self.grade.reward if self.grade is not None else 0.0

    @property
    def graded(self) -> bool:
        return self.grade is not None

    @property
    def trainable(self) -> bool:
        """Whether it counts in group statistics and loss."""
        return self.exclusion is None and self.grade is not None

    def __deepcopy__(self, memo: dict[int, object]) -> Rollout:
        return self
