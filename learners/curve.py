"""The curves of a run as a PNG, drawn from the objects of `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clawgym_env.extras import require_package

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curve(records: Sequence[Mapping[str, float]], file: Path, *, title: str = "") -> None:
    """Draw `reward/mean` and `eval/reward` over `update`; records without either are skipped."""
    figure = _figure(7, 4)
    axes = figure.add_subplot(title=title, xlabel="update", ylabel="reward", ylim=(0, 1))
    for name, label, style in (("reward/mean", "training", "-"), ("eval/reward", "held-out", "o--")):
        points = [(record["update"], record[name]) for record in records if name in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    if axes.lines:
        axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    _save(figure, file)


def draw_panels(
    records: Sequence[Mapping[str, float]], file: Path, panels: Mapping[str, Sequence[str]], *, title: str = ""
) -> None:
    """Draw metrics over `update`, below each other.

    Args:
        panels: the metrics of each panel, by its label; a metric that no record has leaves no line.
    """
    figure = _figure(8, 2 * len(panels))
    figure.suptitle(title)
    for position, (label, names) in enumerate(panels.items(), 1):
        axes = figure.add_subplot(len(panels), 1, position, ylabel=label)
        for name in names:
            points = [(record["update"], record[name]) for record in records if name in record]
            if points:
                axes.plot(*zip(*points, strict=True), label=name)
        if len(axes.lines) > 1:
            axes.legend(loc="best", fontsize="small")
        axes.grid(alpha=0.3)
    axes.set_xlabel("update")
    _save(figure, file)


def _figure(width: float, height: float) -> Figure:
    # The object interface with an Agg canvas: no display, no global pyplot state.
    require_package("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=144)
