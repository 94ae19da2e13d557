"""Host folders that live as long as the work of one process on them, such as a workspace between two sandboxes.

The runner takes one per rollout. Removing happens in a thread: a workspace may hold many thousand files.
Invariant: a folder is gone when its work is over; what a killed process left is swept by the next reaper.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from clawgym_env.ownership import owner_alive, owner_is_elsewhere, owner_tag

PREFIX = "clawgym-"
ELSEWHERE_S = 7 * 86_400.0
"""How long a folder stays whose owner cannot be asked: from before a reboot, or of a container that shares /tmp."""


def make_scratch_folder(kind: str) -> Path:
    """Make an empty folder that is swept once this process is dead; whoever made it removes it before.

    Args:
        kind: part of its name, for whoever finds it.
    """
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner_tag()}-{kind}-"))


@asynccontextmanager
async def scratch_folder(kind: str = "workspace") -> AsyncIterator[Path]:
    """Give an empty folder and remove it afterwards."""
    folder = make_scratch_folder(kind)  # on no thread: cancelled meanwhile, it would be nobody's
    try:
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def sweep_scratch_folders(*, dry_run: bool = False) -> list[str]:
    """Remove the folders of dead processes and return their paths, or only return them."""
    removed = []
    for folder in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        if not _left_behind(folder):
            continue
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)
        if dry_run or not folder.exists():
            removed.append(str(folder))
    return removed


def _left_behind(folder: Path) -> bool:
    name = folder.name.removeprefix(PREFIX)
    if owner_is_elsewhere(name):
        with suppress(OSError):
            return time.time() - folder.lstat().st_mtime > ELSEWHERE_S
        return False
    return not owner_alive(name)
