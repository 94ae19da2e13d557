"""What a training run tells others, and what may end it early.

A `Trainer` calls these between its steps, on its own thread. Invariant: a rule for stopping sees the records of the run
and nothing else, so a run that goes on from a checkpoint stops where it would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

Record: TypeAlias = Mapping[str, float]
"""The metrics of one update, keys `group/name`, and its number as `update`."""
StopRule: TypeAlias = Callable[[Sequence[Record]], bool]
"""Given all records so far, whether to stop."""


class Callback:
    """Hears what a run does; override what you need. An error raised here ends the run."""

    def on_phase(self, phase: str) -> None:
        """Hear what begins now: sampling, updating, evaluating."""

    def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        """Hear the metrics of an update that is on record; update 0 is the evaluation before the first."""


class Sleeps(Protocol):
    """An engine that can free its GPU until it is used again."""

    def sleep(self) -> None:
        """Free it. Blocking."""


class SleepWhileUpdating(Callback):
    """Frees the GPU that an engine shares with the trainer, from the end of sampling until the weights are new."""

    def __init__(self, engine: Sleeps) -> None:
        self._engine = engine

    def on_phase(self, phase: str) -> None:
        if phase == "updating":
            self._engine.sleep()


def never(records: Sequence[Record]) -> bool:
    """Let the run take all its updates."""
    return False


def without_progress(metric: str, *, patience: int, min_gain: float = 0.0) -> StopRule:
    """Stop after `patience` values of `metric` in a row that are not more than `min_gain` above the best before them.

    Args:
        metric: higher is better; records without it do not count.
    """
    if patience < 1:
        raise ValueError(f"Expected patience of at least 1, got {patience}.")

    def stop(records: Sequence[Record]) -> bool:
        values = [record[metric] for record in records if metric in record]
        before, latest = values[:-patience], values[-patience:]
        return bool(before) and max(latest) <= max(before) + min_gain

    return stop
