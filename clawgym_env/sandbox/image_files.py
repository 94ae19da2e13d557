"""What goes into an image: archives that are the same bytes whenever their contents are.

Names, modes, links and contents count; times and owners do not, so the hash of an archive can be the tag of the image
that is made from it.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO

from clawgym_env.sandbox.base import WORKDIR
from clawgym_env.sandbox.bubblewrap import ETC, ETC_FILES, HOME, MERGED

_EMPTY = ("usr", "home", "opt", "var", "proc", "sys", "dev", "run", HOME[1:], WORKDIR[1:])
_BLOCK = 1 << 20


def skeleton(archive: IO[bytes]) -> None:
    """Write the root of a file system whose `/usr` is this machine's: empty folders, links into /usr, a small /etc."""
    with _open(archive) as tar:
        for name in _EMPTY:
            _add_folder(tar, name)
        _add_folder(tar, "tmp", mode=0o1777)
        _add_link(tar, "var/tmp", "/tmp")
        for name in MERGED:
            if os.path.islink(f"/{name}"):
                _add_link(tar, name, os.readlink(f"/{name}"))
        for name in ETC:
            if os.path.lexists(f"/etc/{name}"):
                _add_tree(tar, Path("/etc", name), f"etc/{name}")
        for name, text in ETC_FILES.items():
            _add_file(tar, f"etc/{name}", text.encode())


def merged_folders() -> list[Path]:
    """Return those of this machine's /bin, /lib and so on that are folders, as before the merge into /usr."""
    return [Path("/", name) for name in MERGED if not os.path.islink(f"/{name}") and os.path.isdir(f"/{name}")]


def folder(
    archive: IO[bytes], source: Path, *, names: Iterable[str], instead: Mapping[str, bytes] = MappingProxyType({})
) -> None:
    """Write a folder for a builder.

    Args:
        names: of what is in it, relative to `source`.
        instead: contents that take the place of a file, or are added.
    """
    with _open(archive) as tar:
        for name in sorted({*names} - instead.keys()):
            _add(tar, source / name, name)
        for name, data in instead.items():
            _add_file(tar, name, data)


def build_context(archive: IO[bytes], trees: Mapping[str, Path], files: Mapping[str, bytes]) -> None:
    """Write files and whole folders for a builder, by their names in the context, and rewind.

    Unlike elsewhere times are kept: compiled Python code is only used while it knows that of its source.
    """
    with _open(archive) as tar:
        for name, data in files.items():
            _add_file(tar, name, data)
        for name, source in trees.items():
            tar.add(source.resolve(), name, filter=_without_owner)
    archive.seek(0)


def digest(archive: IO[bytes]) -> str:
    """Return a hash of an archive, short enough for a tag, and rewind it."""
    sha = hashlib.sha256()
    archive.seek(0)
    while block := archive.read(_BLOCK):
        sha.update(block)
    archive.seek(0)
    return sha.hexdigest()[:16]


def _open(archive: IO[bytes]) -> tarfile.TarFile:
    return tarfile.open(fileobj=archive, mode="w", format=tarfile.PAX_FORMAT)


def _add_tree(tar: tarfile.TarFile, source: Path, name: str) -> None:
    _add(tar, source, name)
    if source.is_dir() and not source.is_symlink():
        for entry in sorted(os.listdir(source)):
            _add_tree(tar, source / entry, f"{name}/{entry}")


def _add(tar: tarfile.TarFile, source: Path, name: str) -> None:
    info = tar.gettarinfo(str(source), arcname=name)
    if info is None:  # a socket
        return
    info = _without_owner(info)
    info.mtime = 0
    if info.isreg():
        with source.open("rb") as file:
            tar.addfile(info, file)
    else:
        tar.addfile(info)


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _add_folder(tar: tarfile.TarFile, name: str, *, mode: int = 0o755) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, mode
    tar.addfile(info)


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _without_owner(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info
