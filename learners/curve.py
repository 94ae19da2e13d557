"""The reward curve of a run as a PNG, drawn from the objects of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_curve(records: Sequence[Mapping[str, float]], file: Path, *, title: str = "") -> None:
    """Draw `reward/mean` and `eval/reward` over `update`; records without either are skipped."""
    # The object interface with an Agg canvas: no display, no global pyplot state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(title=title, xlabel="update", ylabel="reward", ylim=(0, 1))
    for name, label, style in (("reward/mean", "training", "-"), ("eval/reward", "held-out", "o--")):
        points = [(record["update"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if axes.lines:
        axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=144)
