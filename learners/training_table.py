"""What a training script shows while it runs: a progress bar under a table that gains a row per update."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from learners.callbacks import Callback

COLUMNS: Mapping[str, str] = {
    "update": "update",
    "reward": "reward/mean",
    "held-out": "eval/reward",
    "no signal": "groups/zero_variance",
    "excluded": "rollouts/excluded",
    "entropy": "entropy",
    "|w-1|": "tis/mean_abs_w_minus_1",
    "grad": "grad/norm",
    "tokens": "tokens/trained",
    "sample s": "time/sample_s",
    "update s": "time/update_s",
}
"""Heading to metric."""


class TrainingTable(Callback):
    """Shows rows on a console as they come. Use as a context manager, and as a callback of a `Trainer`."""

    def __init__(
        self, num_updates: int, *, console: Console | None = None, columns: Mapping[str, str] = COLUMNS
    ) -> None:
        self._columns = columns
        bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*bar, console=console)
        self._task = self._progress.add_task("", total=num_updates)

    def doing(self, what: str) -> None:
        """Say what is going on."""
        self._progress.update(self._task, description=what)

    def row(self, update: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of an update; one that is missing stays blank."""
        known = {"update": update, **metrics}
        self._print([f"{known[key]:.4g}" if key in known else "" for key in self._columns.values()])
        self._progress.update(self._task, completed=update)

    def on_phase(self, phase: str) -> None:
        """Say what a trainer does."""
        self.doing(phase)

    def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        """Show an update of a trainer."""
        self.row(update, metrics)

    def say(self, text: str) -> None:
        """Print a line of text."""
        self._progress.console.print(text, highlight=False, soft_wrap=True)

    def __enter__(self) -> TrainingTable:
        self._progress.start()
        self._print(list(self._columns))
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def _print(self, cells: list[str]) -> None:
        self.say(" ".join(f"{cell:>9}" for cell in cells))
