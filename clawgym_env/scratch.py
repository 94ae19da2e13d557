"""Host folders that hold a workspace for the moment between two sandboxes.

The runner takes one per rollout. Making and removing happens in threads: a workspace may hold many thousand files.
Invariant: a folder is gone when its rollout is over; what a killed controller left is swept by the next one.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from clawgym_env.ownership import owner_alive, owner_tag

PREFIX = "clawgym-workspace-"


@asynccontextmanager
async def scratch_folder() -> AsyncIterator[Path]:
    """Give an empty folder and remove it afterwards."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=f"{PREFIX}{owner_tag()}-"))
    try:
        yield folder
    finally:
        await asyncio.shield(asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True))


def sweep_scratch_folders() -> None:
    """Remove the folders of controllers that are gone."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        if not owner_alive(folder.name.removeprefix(PREFIX)):
            shutil.rmtree(folder, ignore_errors=True)
