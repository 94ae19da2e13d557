"""`clawgym eval`: how good is a policy in a harness, and how sure is that?"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from clawgym_env.cli._rollout_args import CommonRolloutArgs
from clawgym_env.evaluation import Progress, evaluate
from clawgym_env.evaluation.report import MAX_ERROR, overview


@dataclass(frozen=True, kw_only=True)
class EvalArgs(CommonRolloutArgs):
    """Whom to evaluate, on what, and where the results go."""

    out: Path
    """Folder for results.json, results.csv, report.md and every rollout; the same command again goes on there."""
    harness: tuple[str, ...] = ("mini",)
    """One or several, with options as in "claude-code?bare"."""
    attempts: int = 1
    """Rollouts of each task with each harness."""
    limit: int | None = None
    """How many tasks, from the first on; all where not given."""
    ungraded_as_zero: bool = False
    """Count a rollout that infrastructure left without a grade as 0, instead of leaving it out."""
    fresh: bool = False
    """Discard the evaluation found in the folder."""


def eval_command(args: OmitArgPrefixes[FlagCreatePairsOff[EvalArgs]]) -> int:
    """Evaluate a policy in harnesses on tasks, or go on where it stopped; exit code 1 where a task has no grade."""
    with _shown(Console(stderr=True)) as show:
        result = evaluate(
            args.tasks,
            harness=args.harness,
            policy=args.load_policy(),
            engine=args.engine,
            sampling=args.sampling,
            sandbox=args.sandbox,
            judge=args.load_judge(),
            limits=args.limits,
            attempts=args.attempts,
            limit=args.limit,
            max_concurrency=args.max_concurrency,
            seed=args.seed,
            ungraded_as_zero=args.ungraded_as_zero,
            out=args.out,
            fresh=args.fresh,
            command=shlex.join(["clawgym", *sys.argv[1:]]),
            on_progress=show,
        )
    print(overview(result))
    print(f"\nResults: {args.out}")
    return 0 if result.complete else 1


class _Show(Protocol):
    def __call__(self, progress: Progress, /) -> None: ...


@contextmanager
def _shown(console: Console) -> Iterator[_Show]:
    """Yield what shows progress: a bar on a terminal, else a line per finished rollout."""
    if not console.is_terminal:
        yield _print_line
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(TextColumn("{task.description}"), *columns, console=console) as bar:
        task = bar.add_task("starting", total=None)

        def show(progress: Progress) -> None:
            bar.update(task, description=_standing(progress), completed=progress.done, total=progress.total)
            if progress.latest is not None and not progress.latest.graded:
                bar.console.print(_line(progress), highlight=False, markup=False, soft_wrap=True)

        yield show


def _print_line(progress: Progress) -> None:
    text = _line(progress) if progress.latest is not None else f"{progress.done} of {progress.total} are there already"
    if progress.latest is not None or progress.done:
        print(text, file=sys.stderr, flush=True)


def _line(progress: Progress) -> str:
    assert progress.latest is not None
    rollout = progress.latest
    error = " ".join(rollout.error.split())[:MAX_ERROR]
    parts = (
        f"{progress.done}/{progress.total}",
        rollout.task_id,
        rollout.harness,
        rollout.stop_reason.value,
        f"{rollout.reward:.3f}" if rollout.graded else f"NO GRADE: {error}",
        f"{rollout.timing.get('total', 0.0):.1f} s",
        _standing(progress),
    )
    return "  ".join(parts)


def _standing(progress: Progress) -> str:
    mean = "no grade yet" if progress.mean is None else f"mean {progress.mean:.4f}"
    return f"{mean}, {progress.ungraded} UNGRADED" if progress.ungraded else mean
