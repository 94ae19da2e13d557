"""From what the user gave as `tasks` to a sequence of tasks.

Called once when an environment is made. Accepts a folder, a name with options such as
`bundled:level=1-2,split=heldout,size=200`, or tasks as they are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.errors import TaskError
from clawgym_env.tasks.bundled import Split, bundled_tasks
from clawgym_env.tasks.bundled import families as bundled_families
from clawgym_env.tasks.clawgym_format import load_clawgym
from clawgym_env.tasks.task import Task, TaskSet, TasksLike

BUNDLED = "bundled"
OPTIONS = ("level", "family", "split", "size", "seed")


def load_tasks(spec: TasksLike, *, seed: int = 0) -> Sequence[Task]:
    """Return the tasks that `spec` stands for.

    Args:
        spec: a folder in the ClawGym format; "bundled", optionally with options: "bundled:level=1-2",
            "bundled:family=write_word+two_files,split=heldout,size=200,seed=3"; or tasks.
        seed: of the bundled instances, unless `spec` says its own.

    Raises:
        TaskError: no such folder, an unknown name or option, or what is no task; known and nearest names are listed.
    """
    if isinstance(spec, Path):
        return load_clawgym(spec)
    if not isinstance(spec, str):
        return _tasks(spec)
    name, _, options = spec.partition(":")
    if name == BUNDLED:
        return _bundled(options, seed)
    if "/" in spec or Path(spec).exists():
        return load_clawgym(Path(spec).expanduser())
    hint = f" Did you mean {BUNDLED!r}?" if difflib.get_close_matches(name, [BUNDLED]) else ""
    raise TaskError(f"Expected tasks to be a folder or {BUNDLED!r}, got {spec!r}, which is neither.{hint}")


def _tasks(tasks: Sequence[Task]) -> Sequence[Task]:
    if isinstance(tasks, TaskSet):
        return tasks
    if not isinstance(tasks, Sequence) or not all(isinstance(task, Task) for task in tasks):
        raise TaskError(f"Expected tasks to be a folder, a name or a sequence of Task, got {type(tasks).__name__}.")
    if not tasks:
        raise TaskError("Expected at least one task, got an empty sequence.")
    ids = {task.id for task in tasks}
    if len(ids) < len(tasks):
        raise TaskError(f"Expected tasks with unique ids, got {len(tasks)} tasks with {len(ids)} ids.")
    return tasks


def _bundled(text: str, seed: int) -> TaskSet:
    options = _options(text)
    families = options["family"].split("+") if "family" in options else None
    split = options.get("split", "train")
    if split not in ("train", "heldout"):
        raise TaskError(f"Expected split=train or split=heldout, got split={split!r}.")
    known_split: Split = "heldout" if split == "heldout" else "train"
    levels = _levels(options.get("level", "1-2"))
    if families is not None and "level" in options:
        known = [family.name for family in bundled_families() if family.level in levels]
        if strays := [name for name in families if name not in known]:
            raise TaskError(f"Expected families of level {options['level']}, {', '.join(known)}, got {strays}.")
    return bundled_tasks(
        levels=levels,
        split=known_split,
        size=_integer("size", options.get("size", "1000")),
        seed=_integer("seed", options.get("seed", str(seed))),
        families=families,
    )


def _options(text: str) -> Mapping[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in OPTIONS:
            nearest = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.0)[0]
            raise TaskError(f"Expected options {', '.join(OPTIONS)}, got {key!r}. Nearest: {nearest!r}.")
        if not equals or not value:
            raise TaskError(f"Expected {key}=VALUE, got {part!r}.")
        if key in options:
            raise TaskError(f"Expected {key} once, got it twice: {text!r}. Join several values with '+'.")
        options[key] = value
    return options


def _levels(text: str) -> list[int]:
    """Parse `2`, `1-3` or `1+4`."""
    levels: list[int] = []
    for part in text.split("+"):
        if not re.fullmatch("[1-9](-[1-9])?", part):
            raise TaskError(f"Expected level to be like 2, 1-3 or 1+4, got {text!r}.")
        levels += range(int(part[0]), int(part[-1]) + 1)
    return levels


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise TaskError(f"Expected {name} to be a whole number, got {text!r}.") from error
