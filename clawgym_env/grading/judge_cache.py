"""Replies of a judge that were paid for, by the hash of the whole question.

Owned by a `Judge`. With a folder every reply is a file of its own, so a run that goes on after a crash, or two at once,
find what is there; without one the latest are kept in memory. Invariant: a file is a whole reply or is not there.
"""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from clawgym_env.sandbox.threads import in_thread

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 1024


class ReplyCache:
    """Keeps texts by key.

    Args:
        folder: made at the first reply; None keeps `MAX_IN_MEMORY` replies in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._latest: OrderedDict[str, str] = OrderedDict()

    async def get(self, key: str) -> str | None:
        """Return the reply to this question; None where it was never answered."""
        if self.folder is None:
            return self._latest.get(key)
        return await in_thread(functools.partial(_read, self._path(key)))

    async def put(self, key: str, reply: str) -> None:
        """Keep a reply."""
        if self.folder is None:
            self._latest[key] = reply
            if len(self._latest) > MAX_IN_MEMORY:
                self._latest.popitem(last=False)
            return
        try:
            await in_thread(functools.partial(_write, self._path(key), reply))
        except OSError as error:  # a full disk: the reply in hand is still good
            logger.warning("A judge's reply could not be kept, equal questions will be paid again: %s", error)

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / key[:2] / f"{key}.txt"


def _read(path: Path) -> str | None:
    with suppress(OSError, UnicodeDecodeError):
        return path.read_bytes().decode()
    return None


def _write(path: Path, reply: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid4().hex}")
    partial.write_bytes(reply.encode(errors="replace"))
    os.replace(partial, path)
