"""Learning rate schedules: the factor on a learner's rate, as a function of the update alone.

A `Trainer` asks one before each update and hands the answer to `Learner.scale_learning_rate`. Invariant: a schedule
keeps no state, so a run that goes on from a checkpoint takes every update at the rate it would have had.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

Schedule: TypeAlias = Callable[[int], float]
"""From the number of an update, the first being 1, to a factor of at least 0."""


def constant(update: int) -> float:
    """Leave the rate as it is."""
    return 1.0


def linear_warmup(num_warmup: int, then: Schedule = constant) -> Schedule:
    """Rise evenly: update k of the first `num_warmup` is taken at k / num_warmup of what `then` says.

    `then` is asked for the number of the update in the whole run.
    """
    _require(num_warmup >= 0, "num_warmup of at least 0", num_warmup)

    def factor(update: int) -> float:
        return min(1.0, update / max(num_warmup, 1)) * then(update)

    return factor


def cosine(num_updates: int, *, floor: float = 0.0) -> Schedule:
    """Fall from 1 at the first update to `floor` at update `num_updates`, along half a cosine, and stay there."""
    _require(num_updates >= 1, "num_updates of at least 1", num_updates)
    _require(0.0 <= floor <= 1.0, "floor between 0 and 1", floor)

    def factor(update: int) -> float:
        done = min(1.0, (update - 1) / max(num_updates - 1, 1))
        return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))

    return factor


def _require(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"Expected {expected}, got {got}.")
