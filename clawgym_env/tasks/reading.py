"""Files and folders of tasks on the host, read with suspicion.

Used by the loaders. Invariant: what is returned as a `TaskFile` is a regular file of a bearable size that no link leads
to from outside its folder, and an error names the path.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from pydantic import ValidationError

from clawgym_env.errors import TaskError
from clawgym_env.tasks.task import Task, TaskFile

MAX_FILE_BYTES = 64 << 20

OnError: TypeAlias = Callable[[TaskError], None]
"""Told what is wrong with one task of a set, which is then left out. None instead: the first error is raised."""


@contextmanager
def reported(on_error: OnError | None) -> Iterator[None]:
    """Hand a `TaskError` of the block to `on_error`."""
    try:
        yield
    except TaskError as error:
        if on_error is None:
            raise
        on_error(error)


@contextmanager
def naming(place: object) -> Iterator[None]:
    """Say in a `TaskError` of the block, or in one of pydantic's, where it lies."""
    try:
        yield
    except TaskError as error:
        raise TaskError(f"In {place}: {error}") from error
    except ValidationError as error:
        raise TaskError(f"Expected a valid task in {place}, got {explain(error)}.") from error


def load_each(folders: Iterable[Path], load: Callable[[Path], Task], on_error: OnError | None) -> dict[Path, Task]:
    """Load a task per folder, in order.

    Raises:
        TaskError: a folder that is no task, or an id that two folders share; without `on_error` only.
    """
    found: dict[Path, Task] = {}
    by_id: dict[str, Path] = {}
    for folder in folders:
        with reported(on_error):
            task = load(folder)
            if task.id in by_id:
                raise TaskError(f"Expected unique task ids, got {task.id!r} in both {by_id[task.id]} and {folder}.")
            by_id[task.id], found[folder] = folder, task
    return found


def explain(error: ValidationError) -> str:
    """Return every complaint of pydantic on one line."""
    complaints = []
    for detail in error.errors():
        place, message = ".".join(map(str, detail["loc"])) or "the whole", detail["msg"].removeprefix("Value error, ")
        complaints.append(f"{place}: {message[:1].lower()}{message[1:]}")
    return "; ".join(complaints)


def read_text(path: Path, *, max_bytes: int = MAX_FILE_BYTES) -> str:
    """Return the text of a task's own file.

    Raises:
        TaskError: no such file, too big, or no UTF-8.
    """
    check_file(path, path.parent, max_bytes)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise TaskError(f"Expected UTF-8 in {path}, got: {error}.") from error


def files_below(folder: Path, place: PurePosixPath, *, max_bytes: int = MAX_FILE_BYTES) -> Iterator[TaskFile]:
    """Yield a folder's files in a stable order; nothing where there is no folder.

    Args:
        place: where the folder goes, relative to the workspace or absolute.

    Raises:
        TaskError: a link to a folder or out of `folder`, what is no regular file, a big one, a name not in UTF-8.
    """
    if folder.is_symlink():
        raise TaskError(f"Expected a folder, got a link: {folder}. Copy what it points to.")
    if not folder.is_dir():
        return
    for parent, subfolders, names in os.walk(folder, onerror=_unreadable):
        subfolders.sort()
        for name in subfolders:
            if (Path(parent) / name).is_symlink():
                raise TaskError(f"Expected a folder, got a link: {Path(parent) / name}. Copy what it points to.")
        for name in sorted(names):
            path = Path(parent) / name
            yield task_file(path, folder, str(place / path.relative_to(folder)), max_bytes=max_bytes)


def task_file(path: Path, folder: Path, target: str, *, max_bytes: int = MAX_FILE_BYTES) -> TaskFile:
    """Return the file at `path`, which belongs to `folder`, as a file of a task; see `files_below`."""
    mode = check_file(path, folder, max_bytes)
    try:
        target.encode()
    except UnicodeEncodeError as error:
        raise TaskError(f"Expected a file name in UTF-8, got {target!r} in {folder!r}.") from error
    return TaskFile(path=target, source=path.absolute(), executable=bool(mode & stat.S_IXUSR))


def check_file(path: Path, folder: Path, max_bytes: int) -> int:
    """Return the mode of a regular file of a bearable size that does not lie outside `folder`."""
    try:
        real = path.resolve()
        status = path.stat()
    except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle
        raise TaskError(f"Expected a readable file, got {path}: {getattr(error, 'strerror', error)}.") from error
    if not real.is_relative_to(folder.resolve()):
        raise TaskError(f"Expected links to stay in {folder}, got {path} -> {real}.")
    if not stat.S_ISREG(status.st_mode):
        raise TaskError(f"Expected a regular file, got {path}.")
    if status.st_size > max_bytes:
        raise TaskError(f"Expected a file of at most {max_bytes} bytes, got {path} with {status.st_size}.")
    return status.st_mode


def inside_path(path: str, workdir: str) -> str:
    """Return a workspace file's path relative to the workspace.

    Raises:
        TaskError: it is empty, leads out or holds a NUL.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute() and pure.is_relative_to(workdir):
        pure = pure.relative_to(workdir)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or "\0" in path:
        raise TaskError(f"Expected a path inside the workspace {workdir}, got {path!r}.")
    return str(pure)


def _unreadable(error: OSError) -> None:
    raise TaskError(f"Expected a readable folder, got {error.filename}: {error.strerror}.") from error
