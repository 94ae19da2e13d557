"""From what the user gave as `tasks` to a sequence of tasks.

Called once when an environment is made. Accepts a folder or file in one of the `formats`, with the format's name before
it or not and options behind it, the bundled tasks by name, or tasks as they are.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.errors import TaskError
from clawgym_env.tasks.bundled import Split, bundled_tasks
from clawgym_env.tasks.bundled import families as bundled_families
from clawgym_env.tasks.formats import FORMATS, format_of
from clawgym_env.tasks.reading import OnError
from clawgym_env.tasks.task import Task, TaskSet, TasksLike

BUNDLED = "bundled"
OPTIONS = ("level", "family", "split", "size", "seed")


def load_tasks(spec: TasksLike, *, seed: int = 0, on_error: OnError | None = None) -> Sequence[Task]:
    """Return the tasks that `spec` stands for.

    Args:
        spec: a path, whose format is found by what lies there; a path with the format's name and options, as in
            "harbor:PATH" or "officeqa:PATH,difficulty=hard"; "bundled", optionally with options:
            "bundled:level=1-2", "bundled:family=write_word+two_files,split=heldout,size=200,seed=3"; or tasks.
        seed: of the bundled instances, unless `spec` says its own.
        on_error: told what is wrong with a task of a path, which is then left out.

    Raises:
        TaskError: nothing there, an unknown name, format or option, or what is no task; known names are listed.
    """
    if isinstance(spec, Path):
        return format_of(spec).open(spec, {}, on_error=on_error)
    if not isinstance(spec, str):
        return _tasks(spec)
    name, colon, rest = spec.partition(":")
    if name == BUNDLED:
        return _bundled(rest, seed)
    named = {one.name: one for one in FORMATS}.get(name) if colon else None
    path, options = _path_and_options(rest if named else spec)
    if named is not None:
        return named.open(path, options, on_error=on_error)
    if "/" in spec or path.exists():
        return format_of(path).open(path, options, on_error=on_error)
    hint = f" Did you mean {BUNDLED!r}?" if difflib.get_close_matches(name, [BUNDLED]) else ""
    formats = ", ".join(one.name for one in FORMATS)
    raise TaskError(
        f"Expected tasks to be a folder or {BUNDLED!r}, got {spec!r}, which is neither.{hint} "
        f"A format can be named before its path: {formats}."
    )


def _path_and_options(text: str) -> tuple[Path, Mapping[str, str]]:
    """Read `PATH,name=value,…`; a path that exists has no options in it."""
    whole = Path(text).expanduser()
    if whole.exists():
        return whole, {}
    path, *pairs = re.split(r",(?=\s*\w+\s*=)", text)
    return Path(path).expanduser(), _pairs(",".join(pairs))


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
    options = _pairs(text)
    for key in options:
        if key not in OPTIONS:
            nearest = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0.0)[0]
            raise TaskError(f"Expected options {', '.join(OPTIONS)}, got {key!r}. Nearest: {nearest!r}.")
    return options


def _pairs(text: str) -> Mapping[str, str]:
    """Read `name=value,…`."""
    pairs: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise TaskError(f"Expected {key}=VALUE, got {part!r}.")
        if key in pairs:
            raise TaskError(f"Expected {key} once, got it twice: {text!r}. Join several values with '+'.")
        pairs[key] = value
    return pairs


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
