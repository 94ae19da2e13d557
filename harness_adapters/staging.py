"""Folders that appear in the install cache whole or not at all.

An installer fills a private stage beside the target, and one rename puts it in place; a file lock lets one process
work while others wait. Invariant: whoever sees the target folder sees a complete install.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from clawgym_env.errors import HarnessError

LINK = "program"
"""What is run in an install folder, or a link to it: its real place differs between processors."""
VERIFY_S = 300
"""A product has this long to start for the first time."""


@contextmanager
def staged(target: Path, log: Callable[[str], None]) -> Iterator[Path | None]:
    """Give an empty folder that becomes `target` when the block ends well; None where `target` is there already.

    Size and time of an install are logged.

    Raises:
        HarnessError: the cache cannot be written.
    """
    if target.is_dir():
        yield None
        return
    with _locked(target.with_name(f".{target.name}.lock"), log):
        if target.is_dir():
            yield None
            return
        for left_behind in target.parent.glob(f".{target.name}-*"):
            shutil.rmtree(left_behind, ignore_errors=True)  # by an installer that was killed: we hold the lock
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            stage.chmod(0o755)
            started = time.monotonic()
            yield stage
            size = sum(file.lstat().st_size for file in stage.rglob("*"))
            os.rename(stage, target)
            log(f"{target.name}: {size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s.")
        finally:
            shutil.rmtree(stage, ignore_errors=True)


@contextmanager
def _locked(path: Path, log: Callable[[str], None]) -> Iterator[None]:
    """Hold an exclusive lock; the system lets go of it when the process dies."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise HarnessError(f"Expected to write to the cache {path.parent}, got: {error}. Set CLAWGYM_CACHE.") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"Another process is installing {path.parent.name}/{path.name[1:-5]}; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tail(output: bytes, lines: int = 15) -> str:
    """Return the end of a command's output, which is where its reason is."""
    return "\n".join(output.decode("utf-8", "replace").strip().splitlines()[-lines:]) or "no output"
