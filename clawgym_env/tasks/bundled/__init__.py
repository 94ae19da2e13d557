"""The bundled tasks: small jobs in four levels, made without end from a seed, needing no download.

`families()` is the catalogue, `bundled_tasks()` the task set the environments use by default. Every instance has the
form of a ClawGym task: hidden `reward/reward.sh` and `reward/check.py`, a score with partial credit.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from clawgym_env.errors import TaskError
from clawgym_env.tasks.bundled import level1, level2, level3, level4
from clawgym_env.tasks.bundled.family import Instance, TaskFamily
from clawgym_env.tasks.bundled.vocabulary import Split, Vocabulary
from clawgym_env.tasks.task import SolutionStep, Task, TaskSet

__all__ = ["Instance", "Split", "TaskFamily", "Vocabulary", "bundled_tasks", "families"]

SEED_STRIDE = 1_000_000
"""Instances of two seeds never meet while a set holds fewer than this of one family."""


def families() -> tuple[TaskFamily, ...]:
    """Return every family, easiest level first."""
    return (*level1.FAMILIES, *level2.FAMILIES, *level3.FAMILIES, *level4.FAMILIES)


def bundled_tasks(
    *,
    levels: Sequence[int] = (1, 2),
    split: Split = "train",
    size: int = 1000,
    seed: int = 0,
    families: Sequence[str] | None = None,
) -> TaskSet:
    """Return a set of bundled tasks that takes its families in turn and makes each task when it is asked for.

    Args:
        levels: ignored where `families` are named.
        split: "train" or "heldout".
        size: number of tasks.
        seed: chooses other instances, not other families.
        families: names to choose from; all of `levels` by default.

    Raises:
        TaskError: an unknown level, split or family, or a size or seed out of range.
    """
    chosen = _by_level(levels) if families is None else _by_name(families)
    if split not in ("train", "heldout"):
        raise TaskError(f'Expected split "train" or "heldout", got {split!r}.')
    if size < 1 or seed < 0:
        raise TaskError(f"Expected size >= 1 and seed >= 0, got size={size}, seed={seed}.")
    first = seed * SEED_STRIDE

    def make(position: int) -> Task:
        turn, family = divmod(position, len(chosen))
        return chosen[family].instance(first + turn, split=split).task

    return TaskSet("bundled", size, make, solve=_solve)


def _solve(task: Task) -> Sequence[SolutionStep]:
    """Make the instance again from the task's id: "copy_file-heldout-000003"."""
    name, split, index = task.id.rsplit("-", 2)
    known_split: Split = "heldout" if split == "heldout" else "train"
    return _by_name([name])[0].instance(int(index), split=known_split).oracle


def _by_level(levels: Sequence[int]) -> list[TaskFamily]:
    known = sorted({family.level for family in families()})
    for level in levels:
        if level not in known:
            raise TaskError(f"Expected bundled levels among {known}, got {level!r}.")
    chosen = [family for family in families() if family.level in levels]
    if not chosen:
        raise TaskError(f"Expected at least one bundled level of {known}, got none.")
    return chosen


def _by_name(names: Sequence[str]) -> list[TaskFamily]:
    known = {family.name: family for family in families()}
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise TaskError(
                f"Expected a bundled task family, got {name!r}. Nearest: {nearest!r}. Known: {', '.join(known)}."
            )
    if not names:
        raise TaskError(f"Expected at least one bundled task family, got none. Known: {', '.join(known)}.")
    return [known[name] for name in dict.fromkeys(names)]
