"""A folder as a stream of bytes, for `copy_in` and `copy_out`; runs on both sides of the sandbox's wall.

Invariant: whatever the stream says, `unpack` creates regular files, folders and links inside the target and nothing
else; no link of the result leads out of it, no file is setuid. Imported inside the sandbox too, so it needs only `os`,
`stat` and `struct`.
"""

from __future__ import annotations

import os
import stat
import struct
from typing import BinaryIO

_HEADER = struct.Struct("<cIqQI")
"""kind, mode, mtime in ns, number of data bytes, length of the path."""
_CHUNK = 1 << 20
_MAX_PATH = 4096
MAX_ENTRIES = 100_000


def pack(folder: str, output: BinaryIO, *, max_bytes: int) -> None:
    """Write the contents of `folder`: links as links, anything special left out.

    A file that would bring the total over `max_bytes` is left out and counted in the last header.
    """
    left, entries, skipped = max_bytes, 0, 0
    pending = [""]
    os.stat(folder)
    while pending:
        parent = pending.pop()
        with os.scandir(os.path.join(folder, parent)) as found:
            children = sorted(found, key=lambda entry: entry.name)
        for entry in children:
            path = os.path.join(parent, entry.name)
            info = entry.stat(follow_symlinks=False)
            raw = os.fsencode(path)
            entries += 1
            if entries > MAX_ENTRIES or len(raw) > _MAX_PATH:
                skipped += 1
            elif stat.S_ISDIR(info.st_mode):
                output.write(_HEADER.pack(b"d", info.st_mode & 0o777, info.st_mtime_ns, 0, len(raw)) + raw)
                pending.append(path)
            elif stat.S_ISLNK(info.st_mode):
                target = os.fsencode(os.readlink(entry.path))
                output.write(_HEADER.pack(b"l", 0, info.st_mtime_ns, len(target), len(raw)) + raw + target)
            elif not stat.S_ISREG(info.st_mode):
                continue
            elif info.st_size > left:
                skipped += 1
            else:
                try:
                    source = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                except OSError:
                    skipped += 1
                    continue
                left -= info.st_size
                output.write(_HEADER.pack(b"f", info.st_mode & 0o777, info.st_mtime_ns, info.st_size, len(raw)) + raw)
                _copy_exactly(source, output, info.st_size)
    output.write(_HEADER.pack(b"e", 0, 0, skipped, 0))
    output.flush()


def _copy_exactly(source: int, output: BinaryIO, size: int) -> None:
    """Copy `size` bytes; a file that shrinks meanwhile is padded, since its size is already written."""
    try:
        while size:
            data = os.read(source, min(size, _CHUNK)) or bytes(min(size, _CHUNK))
            output.write(data)
            size -= len(data)
    finally:
        os.close(source)


def unpack(source: BinaryIO, folder: str, *, origin: str, max_bytes: int) -> int:
    """Recreate a packed folder in `folder` (made if missing) and return how many files `pack` left out.

    Args:
        origin: where the folder was packed from; an absolute link into it becomes a relative one.

    Raises:
        ValueError: the stream is malformed, unsafe or larger than `max_bytes`.
    """
    os.makedirs(folder, exist_ok=True)
    root = os.path.realpath(folder)
    links: list[tuple[str, str]] = []
    folders: list[tuple[str, int, int]] = []
    for _ in range(MAX_ENTRIES + 2):
        kind, mode, mtime_ns, size, path_length = _HEADER.unpack(_read_exactly(source, _HEADER.size))
        if kind == b"e":
            break
        if path_length > _MAX_PATH or (kind == b"l" and size > _MAX_PATH):
            raise ValueError(f"Expected a path of at most {_MAX_PATH} bytes, got {max(path_length, size)}.")
        relative = os.fsdecode(_read_exactly(source, path_length))
        parts = relative.split("/")
        if "\0" in relative or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"Expected a relative path without '..', got {relative!r}.")
        path = os.path.join(root, relative)
        # Links are made last: until then no folder on the way can lead out.
        if kind == b"l":
            links.append((path, os.fsdecode(_read_exactly(source, size))))
            continue
        if kind == b"d":
            os.makedirs(path, exist_ok=True)
            folders.append((path, mode, mtime_ns))
            continue
        max_bytes -= size
        if kind != b"f" or max_bytes < 0:
            raise ValueError(f"Expected a folder within its size limit, got {kind!r} of {size} bytes.")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write_file(source, path, mode & 0o777, mtime_ns, size)
    else:
        raise ValueError(f"Expected at most {MAX_ENTRIES} entries, got more.")
    _make_links(links, root, origin)
    for path, mode, mtime_ns in reversed(folders):
        os.chmod(path, (mode & 0o777) | 0o700)
        os.utime(path, ns=(mtime_ns, mtime_ns))
    return int(size)


def _write_file(source: BinaryIO, path: str, mode: int, mtime_ns: int, size: int) -> None:
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    with open(target, "wb", buffering=0) as file:
        while size:
            data = _read_exactly(source, min(size, _CHUNK))
            size -= len(data)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.fchmod(target, mode)
        os.utime(target, ns=(mtime_ns, mtime_ns))


def _make_links(links: list[tuple[str, str]], root: str, origin: str) -> None:
    """Make the links, then take away those that resolve outside `root`, until none does.

    Only the finished tree tells where a link leads: one harmless link can carry another out.
    """
    made = []
    for path, target in links:
        if target.startswith(origin.rstrip("/") + "/"):
            inside = os.path.join(root, target[len(origin.rstrip("/")) + 1 :])
            target = os.path.relpath(inside, os.path.dirname(path))
        try:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)
        except (OSError, ValueError):
            continue
        made.append(path)
    while True:
        out = [path for path in made if not _is_inside(os.path.realpath(path), root)]
        if not out:
            return
        for path in out:
            os.unlink(path)
        made = [path for path in made if path not in out]


def _is_inside(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise ValueError(f"Expected {size} more bytes of a folder, got {len(data)}.")
    return data
