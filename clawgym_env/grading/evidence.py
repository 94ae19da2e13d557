"""What a judge is shown of a workspace: the files asked for, or what the agent made or changed, as bounded text.

Collected by `rubric` before any hidden file enters the sandbox. Invariant: nothing outside the workspace is read, and
what is shown has a fixed bound however much the agent wrote.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from clawgym_env.grading.office_text import office_text
from clawgym_env.grading.specs import RubricGrading
from clawgym_env.messages import well_formed
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.sandbox.threads import in_thread
from clawgym_env.scratch import scratch_folder

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

MAX_FILES = 60
FILE_CHARS = 60_000
TOTAL_CHARS = 240_000
"""Of all files together, shared out evenly: some 60k tokens."""
MAX_READ_BYTES = 4 << 20
NOT_SHOWN = frozenset({"__pycache__", "node_modules"})
"""Folders that an agent does not make for anybody to read; like most hidden ones, shown only where a pattern asks."""
HIDDEN_BUT_SHOWN = frozenset({".github"})
"""Other hidden folders hold what programs keep for themselves; hidden files, `.gitignore` say, are work."""
MAX_CONTROL_SHARE = 0.01
"""Of control characters in a text."""
_CONTROL = re.compile(rb"[\x00-\x06\x0e-\x1a\x1c-\x1f\x7f]")
_WIDE = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
"""Codecs of wide characters by the mark at the start, as spreadsheets export them."""


@dataclass(frozen=True, slots=True)
class ShownFile:
    """A file as the judge sees it."""

    path: str
    """Relative to the workspace."""
    text: str
    """Its content, cut in the middle where it is long, or what there is to say of a file that is no text."""
    is_text: bool = True


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the workspace has to show."""

    files: tuple[ShownFile, ...]
    not_shown: tuple[str, ...] = ()
    """Paths of further files, beyond `MAX_FILES`."""
    missing: frozenset[str] = frozenset()
    """Files of criteria that are not there."""
    removed: tuple[str, ...] = ()
    """Files that the task brought and that are gone; not told where the grading says what to show."""

    @property
    def is_empty(self) -> bool:
        """Whether the agent did nothing that could be shown."""
        return not (self.files or self.removed)


async def collect(grading: RubricGrading, task: Task, sandbox: Sandbox) -> Evidence:
    """Read what the judge is to see out of the sandbox."""
    async with scratch_folder("evidence") as folder:
        await sandbox.copy_out(sandbox.spec.workdir, folder)
        return await in_thread(functools.partial(_collect, grading, task, folder))


def bounded(text: str, limit: int) -> str:
    """Return a text of about `limit` characters: where it is longer, its head and its tail."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n[… {len(text) - head - tail} characters left out …]\n{text[len(text) - tail :]}"


def _collect(grading: RubricGrading, task: Task, folder: Path) -> Evidence:
    root = folder.resolve()
    wanted = [criterion.file for criterion in grading.criteria if criterion.file is not None]
    missing = frozenset(path for path in wanted if not _inside(root / path, root))
    asked = (found for pattern in grading.files for found in sorted(root.glob(pattern)))
    chosen = asked if grading.files else iter(_changed(task, root))
    named = (root / path for path in wanted if path not in missing)
    paths = list(dict.fromkeys(file for path in (*named, *chosen) for file in _files(path, root)))
    shown, more = paths[:MAX_FILES], paths[MAX_FILES:]
    limit = min(FILE_CHARS, TOTAL_CHARS // max(1, len(shown)))
    return Evidence(
        files=tuple(_shown(path, root, limit) for path in shown),
        not_shown=tuple(_name(path, root) for path in more),
        missing=missing,
        removed=() if grading.files else tuple(_removed(task, root)),
    )


def _inside(path: Path, root: Path) -> bool:
    """Whether a path is there, and no link leads out of the workspace."""
    return path.exists() and path.resolve().is_relative_to(root)


def _files(path: Path, root: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder."""
    if not _inside(path, root):
        return
    if path.is_file():
        yield path
    elif path.is_dir() and not path.is_symlink():
        for inner in sorted(path.iterdir()):
            yield from _files(inner, root)


def _changed(task: Task, root: Path) -> list[Path]:
    """Return the files that are not as the task brought them."""
    given = {os.path.normpath(file.path): file for file in task.files}
    changed = []
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root)
        if any(part.startswith(".") and part not in HIDDEN_BUT_SHOWN for part in name.parts[:-1]):
            continue
        if not NOT_SHOWN.isdisjoint(name.parts):
            continue
        if not _inside(path, root) or not path.is_file():
            continue
        file = given.get(str(name))
        if file is None or not _holds(path, file.read()):
            changed.append(path)
    return changed


def _removed(task: Task, root: Path) -> Iterator[str]:
    for file in task.files:
        path = PurePosixPath(file.path)
        if ".git" not in path.parts and not os.path.lexists(root / path):
            yield well_formed(str(path))


def _holds(path: Path, data: bytes) -> bool:
    return path.stat().st_size == len(data) and path.read_bytes() == data


def _name(path: Path, root: Path) -> str:
    return well_formed(str(path.relative_to(root)))


def _shown(path: Path, root: Path, limit: int) -> ShownFile:
    text = _text(path)
    if text is None:
        return ShownFile(_name(path, root), f"(a binary file of {path.stat().st_size} bytes)", is_text=False)
    return ShownFile(_name(path, root), bounded(text, limit) or "(an empty file)")


def _text(path: Path) -> str | None:
    """Return the words in a file; None where it is no text."""
    size = path.stat().st_size
    if (office := office_text(path)) is not None:
        return well_formed(office)
    with path.open("rb") as file:
        data = file.read(MAX_READ_BYTES)
        if size > len(data):
            file.seek(max(len(data), size - MAX_READ_BYTES))
            data += b"\n" + file.read(MAX_READ_BYTES)
    if data[:2] in _WIDE:
        return data.decode(_WIDE[data[:2]], errors="replace")
    if b"\0" in data or len(_CONTROL.findall(data)) > len(data) * MAX_CONTROL_SHARE:
        return None
    for codec in ("utf-8-sig", "cp1252"):
        text = data.decode(codec, errors="replace")
        if text.count("\ufffd") <= max(2, len(text) // 100):
            return text
    return None
