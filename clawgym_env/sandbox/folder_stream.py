"""A folder as a stream of bytes, for `copy_in` and `copy_out`; runs on both sides of the sandbox's wall.

Invariant: whatever the stream says, `unpack` creates regular files, folders and links inside the target and nothing
else; no link of the result leads out of it, no file is setuid. Imported inside the sandbox too, so it needs only `os`,
`stat` and `struct`.
"""

from __future__ import annotations

import os
import stat
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:  # `typing` would cost every copy 15 ms inside
    from typing import BinaryIO

_HEADER = struct.Struct("<cIqQI")
"""kind, mode, mtime in ns, number of data bytes, length of the path."""
_MAX_TIME = (1 << 63) - 1
"""Of what fits into a header; a file system may keep times that are far beyond."""
_CHUNK = 1 << 20
_BLOCK = 4096
_MAX_PATH = 3072
"""Leaves a KiB of Linux's 4096 bytes to the folder that the stream is unpacked into."""
_MAX_DEPTH = 100
"""Far below what `shutil.rmtree` and `os.walk`, which recurse, can take."""
_MAX_STEPS = 500
"""Parts of paths on the way to a link's end."""
MAX_ENTRIES = 100_000


def pack(folder: str, output: BinaryIO, *, max_bytes: int, make_readable: bool = False) -> None:
    """Write the contents of `folder`: links as links, anything special left out.

    Total over whatever an agent can leave: no folder packs as an empty one; what cannot be read, lies too deep or
    would bring the total over `max_bytes` is left out and counted in the last header.

    Args:
        max_bytes: bound on the blocks that the copy takes on a disk, with one block per entry.
        make_readable: give the owner of what is packed, and of the folders above it, the right to read it.
    """
    left, entries, skipped = max_bytes, 0, 0
    if make_readable:
        _open_up(folder)
    pending = [""] if os.path.isdir(folder) else []
    while pending:
        parent = pending.pop()
        children = []
        try:
            with os.scandir(os.path.join(folder, parent)) as found:
                for entry in found:
                    if entries < MAX_ENTRIES:
                        children.append(entry)
                        entries += 1
                    else:
                        skipped += 1
        except OSError:
            skipped += 1
        for entry in sorted(children, key=lambda entry: entry.name):
            path = os.path.join(parent, entry.name)
            raw = os.fsencode(path)
            source = -1
            try:
                info = entry.stat(follow_symlinks=False)
                is_folder, is_link = stat.S_ISDIR(info.st_mode), stat.S_ISLNK(info.st_mode)
                if not (is_folder or is_link or stat.S_ISREG(info.st_mode)):
                    continue
                size = 0 if is_folder else info.st_size
                cost = _BLOCK + -(-size // _BLOCK) * _BLOCK
                if len(raw) > _MAX_PATH or path.count("/") >= _MAX_DEPTH or cost > left:
                    raise OSError
                needed = stat.S_IRWXU if is_folder else stat.S_IRUSR
                if make_readable and not is_link and info.st_mode & needed != needed:
                    os.chmod(entry.path, stat.S_IMODE(info.st_mode) | needed)
                target = os.fsencode(os.readlink(entry.path)) if is_link else b""
                if len(target) > _MAX_PATH:
                    raise OSError
                if not (is_folder or is_link):
                    source = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            except OSError:
                skipped += 1
                continue
            left -= cost
            if is_link:
                output.write(_HEADER.pack(b"l", 0, 0, len(target), len(raw)) + raw + target)
                continue
            kind = b"d" if is_folder else b"f"
            mtime_ns = max(-_MAX_TIME, min(info.st_mtime_ns, _MAX_TIME))
            output.write(_HEADER.pack(kind, info.st_mode & 0o777, mtime_ns, size, len(raw)) + raw)
            if is_folder:
                pending.append(path)
            else:
                _copy_exactly(source, output, size)
    output.write(_HEADER.pack(b"e", 0, 0, skipped, 0))
    output.flush()


def _open_up(folder: str) -> None:
    """Make `folder` and those above it readable, as far as they are ours."""
    for end in [at for at, letter in enumerate(folder) if letter == "/" and at] + [len(folder)]:
        try:
            if not os.access(folder[:end], os.R_OK | os.X_OK):
                os.chmod(folder[:end], 0o700)
        except OSError:
            return


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
        if "\0" in relative or len(parts) > _MAX_DEPTH or any(part in ("", ".", "..") for part in parts):
            raise ValueError(f"Expected a relative path without '..', got {relative[:200]!r}.")
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
        os.fchmod(target, mode | 0o400)  # a checker must be able to read whatever the agent left
        os.utime(target, ns=(mtime_ns, mtime_ns))


def _make_links(links: list[tuple[str, str]], root: str, origin: str) -> None:
    """Make the links, then take away those that lead outside `root`, through each other too.

    One pass is enough: a link that passes through one that leads out leads out itself.
    """
    made: dict[str, str] = {}
    # All folders before the first link: no folder may be made, nor link put, through a link.
    for path, _ in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
    for path, target in links:
        if target.startswith(origin.rstrip("/") + "/"):
            inside = os.path.join(root, target[len(origin.rstrip("/")) + 1 :])
            target = os.path.relpath(inside, os.path.dirname(path))
        try:
            os.symlink(target, path)
        except (OSError, ValueError):
            continue
        made[path] = target
    for path in made:
        if not _stays_inside(path, root, made):
            os.unlink(path)


def _stays_inside(path: str, root: str, links: dict[str, str]) -> bool:
    """Follow a link as the kernel would, but never out of `root`; what takes too many steps counts as outside."""
    prefix = root.rstrip("/") + "/"
    todo = path[len(prefix) :].split("/")[::-1]
    at = [root.rstrip("/")]
    for _ in range(_MAX_STEPS):
        if not todo:
            return True
        part = todo.pop()
        if part == "..":
            if len(at) == 1:
                return False
            at.pop()
        elif part not in ("", "."):
            at.append(part)
            target = links.get("/".join(at))
            if target is None:
                continue
            at.pop()
            if target.startswith("/"):
                if target != root and not target.startswith(prefix):
                    return False
                at, target = at[:1], target[len(prefix) :]
            todo += target.split("/")[::-1]
    return False


def _read_exactly(source: BinaryIO, size: int) -> bytes:
    data = source.read(size)
    if len(data) != size:
        raise ValueError(f"Expected {size} more bytes of a folder, got {len(data)}.")
    return data
