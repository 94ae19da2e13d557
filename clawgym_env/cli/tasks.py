"""`clawgym tasks check`: is a set of tasks sound?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional

from clawgym_env.tasks.checking import SetCheck, check_tasks
from clawgym_env.tasks.proving import Player, Proof, num_proofs, prove
from clawgym_env.tasks.task import TaskSet

MAX_ERROR_CHARS = 300


@dataclass(frozen=True)
class TasksArgs:
    """Which tasks, and how far to go."""

    action: Positional[Literal["check"]]
    path: Positional[str]
    """A folder or file of tasks, with the format's name before it or not, or "bundled:level=1"."""
    run: bool = False
    """Also play each task in a sandbox, idly and by its solution where one is known."""
    sandbox: str = "local"
    jobs: int = 2
    """Sandboxes at once."""
    limit: int | None = None
    """How many tasks to play, from the first on."""
    noop_limit: float = 0.12
    """Most that doing nothing may earn."""
    oracle_limit: float = 1.0
    """Least that the solution must earn."""


def tasks_command(args: OmitArgPrefixes[FlagCreatePairsOff[TasksArgs]]) -> int:
    """Read every task and say what is wrong with it: clawgym tasks check PATH. Exit code 1 where anything is."""
    console = Console(soft_wrap=True)
    tasks, report = check_tasks(args.path)
    _show_check(report, console)
    sound = not report.problems
    if args.run and len(tasks):
        sound = _play(tasks[: args.limit], args, console) and sound
    return 0 if sound else 1


def _show_check(report: SetCheck, console: Console) -> None:
    for problem in report.problems:
        console.print(problem, style="red", markup=False, highlight=False)
    files = sum(task.num_files + task.num_hidden for task in report.tasks)
    size = sum(task.size for task in report.tasks)
    verdict = f"{len(report.problems)} errors" if report.problems else "sound as far as reading tells"
    console.print(f"{len(report.tasks)} tasks with {files} files ({_size(size)}): {verdict}", highlight=False)
    for need, count in sorted(report.needs.items()):
        console.print(f"  {count} need: {need}", highlight=False)


def _play(tasks: TaskSet, args: TasksArgs, console: Console) -> bool:
    """Play the tasks and show the offenders; return whether there are none."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("playing", total=num_proofs(tasks))
        proofs = prove(tasks, sandbox=args.sandbox, jobs=args.jobs, on_proof=lambda proof: progress.advance(bar))
    for player in ("noop", "oracle"):
        if line := _summary([proof for proof in proofs if proof.player == player], player):
            console.print(line, highlight=False)
    offenders = [proof for proof in proofs if _offends(proof, args)]
    if offenders:
        table = Table("task", "player", "score", "why", title="offenders")
        for proof in sorted(offenders, key=lambda proof: (proof.player, -(proof.score or 0.0), proof.task_id)):
            expected = f"<= {args.noop_limit:g}" if proof.player == "noop" else f">= {args.oracle_limit:g}"
            why = f"expected {expected}. {proof.error[-MAX_ERROR_CHARS:]}".rstrip(". ")
            table.add_row(Text(proof.task_id), proof.player, _score(proof.score), Text(why))
        console.print(table)
    return not offenders


def _offends(proof: Proof, args: TasksArgs) -> bool:
    if proof.score is None:
        return not proof.skipped
    return proof.score > args.noop_limit if proof.player == "noop" else proof.score < args.oracle_limit


def _summary(proofs: Sequence[Proof], player: Player) -> str:
    scores = [proof.score for proof in proofs if proof.score is not None]
    skipped = [proof.error for proof in proofs if proof.skipped]
    parts = []
    if scores:
        parts.append(f"{len(scores)} scores, mean {fmean(scores):.4f}, min {min(scores):.4f}, max {max(scores):.4f}")
    if skipped:
        parts.append(f"{len(skipped)} skipped ({'; '.join(sorted(set(skipped)))})")
    return f"{player}: {', '.join(parts)}" if parts else ""


def _score(score: float | None) -> str:
    return "-" if score is None else f"{score:.4f}"


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
