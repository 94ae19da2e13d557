"""The record of a run: one JSON object per update in `metrics.jsonl`, and the same scalars as TensorBoard events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from torch.utils.tensorboard import SummaryWriter


class MetricsLog:
    """Appends to the files of an output folder; a line is on disk when `write` returns."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lines = (folder / "metrics.jsonl").open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"))

    def write(self, update: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one update, keys `group/name`."""
        self._lines.write(json.dumps({"update": update, **metrics}) + "\n")
        self._lines.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, update)
        self._events.flush()

    def close(self) -> None:
        """Let the files go. Idempotent."""
        self._lines.close()
        self._events.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the recorded updates of an output folder, in order of writing."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
