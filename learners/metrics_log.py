"""The record of a run: one JSON object per update in `metrics.jsonl`, and the same scalars as TensorBoard events.

Invariant: one line an update, also where a run was killed and went on from an earlier checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from clawgym_env.extras import require_package

FILE = "metrics.jsonl"


class MetricsLog:
    """Appends to the files of an output folder; a line is on disk when `write` returns."""

    def __init__(self, folder: Path, *, after: int | None = None) -> None:
        """Open the files, making the folder where missing.

        Args:
            after: the update that a run goes on from; what was recorded of later ones is forgotten.

        Raises:
            MissingPackage: tensorboard is not installed.
        """
        require_package("tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        self.records: list[dict[str, float]] = []
        """What is on record, in order, each with its `update`."""
        if after is not None and (folder / FILE).exists():
            self.records = [record for record in read_metrics(folder) if record["update"] <= after]
            _rewrite(folder / FILE, self.records)
        self._lines = (folder / FILE).open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=None if after is None else after + 1)

    def write(self, update: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one update, keys `group/name`."""
        self.records.append({"update": update, **metrics})
        self._lines.write(json.dumps(self.records[-1]) + "\n")
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
    """Return the recorded updates of an output folder, in order of writing.

    A last line that a crash has cut short is no record.
    """
    lines = (folder / FILE).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _rewrite(file: Path, records: Sequence[Mapping[str, float]]) -> None:
    new = file.with_suffix(".new")
    new.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    new.replace(file)
