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


_SCORED = FailureRule(graded=True, trained=True, retries=0)
_TRIED_AGAIN = FailureRule(graded=False, trained=False, retries=2)
_GIVEN_UP = FailureRule(graded=False, trained=False, retries=0)

FAILURE_RULES: Mapping[StopReason, tuple[FailureRule, FailureRule]] = {
    StopReason.COMPLETED: (_SCORED, _TRIED_AGAIN),
    StopReason.HARNESS_ERROR: (_SCORED, _TRIED_AGAIN),
    StopReason.MAX_CALLS: (_SCORED, _TRIED_AGAIN),
    StopReason.TOKEN_BUDGET: (_SCORED, _TRIED_AGAIN),
    StopReason.WALL_CLOCK: (_SCORED, _TRIED_AGAIN),
    StopReason.CONTEXT_LENGTH: (_SCORED, _GIVEN_UP),  # a first prompt that is too long will be too long again
    StopReason.SANDBOX_ERROR: (_TRIED_AGAIN, _TRIED_AGAIN),
    StopReason.ENGINE_ERROR: (_TRIED_AGAIN, _TRIED_AGAIN),
    StopReason.GRADER_ERROR: (_TRIED_AGAIN, _TRIED_AGAIN),  # the grader only: another run is another sample
}
"""What becomes of a rollout, by what stopped it: where the policy was asked for the task, and where it never was."""


def failure_rule(stop_reason: StopReason, *, policy_asked: bool) -> FailureRule:
    """Return the rule for a rollout that stopped like this.

    Args:
        policy_asked: whether any call was captured that is for the task itself (no title, no summary), or the harness
            calls no model by design. Where the policy was never asked, whatever ended the rollout is not its doing: an
            untouched workspace's score would be a silent zero.
    """
    asked, never_asked = FAILURE_RULES[stop_reason]
    return asked if policy_asked else never_asked


def failure_table() -> str:
    """Return `FAILURE_RULES` as the Markdown table of docs/guarantees.md."""
    words = {
        _SCORED: "graded and trained on",
        _TRIED_AGAIN: f"run again, {_TRIED_AGAIN.retries} times at most, then left out",
        _GIVEN_UP: "left out",
    }
    lines = ["| stopped by | the policy was asked | it never was |", "| --- | --- | --- |"]
    for reason, (asked, never_asked) in FAILURE_RULES.items():
        row = f"| `{reason}` | {words[asked]} | {words[never_asked]} |"
        lines.append(row.replace("run again", "graded again") if reason is StopReason.GRADER_ERROR else row)
    return "\n".join(lines)


TRUNCATED = frozenset(StopReason) - {StopReason.COMPLETED, StopReason.HARNESS_ERROR}
"""Ended by our budget or our infrastructure, not by the harness."""

Exclusion = Literal["over_branched", "relayed", "stale", "ungraded"]
"""Why a rollout is not trained on; relayed: a model behind an API answered."""


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
