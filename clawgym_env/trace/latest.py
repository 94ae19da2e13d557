"""What is kept of a rollout's latest conversations, so that a turn costs what is new in it.

Harnesses send the whole history with every call. Bodies (`proxy.bodies`), transcripts (`transcript`) and places in the
tree (`matching`) each take over what they made of the request before. Invariant: memory is bounded by `KEPT`
conversations, however many a rollout opens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

KEPT = 4
"""Conversations: the main agent's and those of sub-agents that run beside it."""


class Latest(Generic[T]):
    """What is kept of the latest conversations of one rollout: of each what was made of its latest request.

    Thread-safe: of two at once one may be forgotten, never mixed up.
    """

    def __init__(self) -> None:
        self._kept: tuple[T, ...] = ()

    def nearest(self, in_common: Callable[[T], int]) -> tuple[T | None, int]:
        """Return what has most in common with a request, and how much; None and 0 when nothing has anything."""
        before, shared = None, 0
        for kept in self._kept:
            length = in_common(kept)
            if length > shared:
                before, shared = kept, length
        return before, shared

    def find(self, is_it: Callable[[T], bool]) -> T | None:
        """Return what answers to a description, None without one."""
        return next(filter(is_it, self._kept), None)

    def keep(self, made: T, before: T | None, *, gone_on: bool) -> None:
        """Keep what was made, in place of `before` where its conversation has gone on."""
        self._kept = (made, *[kept for kept in self._kept if kept is not before or not gone_on][: KEPT - 1])


def shared_length(one: Sequence[S], other: Sequence[S]) -> int:
    """Return with how many equal items both begin. Slices of them must be of one type."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # most conversations only grow
        return shorter
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b and a != b:
            return at
    return shorter
