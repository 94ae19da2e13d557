"""The reaper: removes from this machine what dead controllers left of their sandboxes.

Run by every pool before its first rollout and after its last, and by `clawgym reap`. Each backend knows its own kind of
leftovers; scratch folders belong to none. Invariant: what a living controller owns stays, and no trouble with an
earlier run's leftovers ever stops this one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.sandbox.threads import in_thread
from clawgym_env.scratch import sweep_scratch_folders

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """One thing that a dead controller, or a sandbox past its lifetime, had left."""

    kind: str
    """The backend's name, or "scratch" for a folder of the host."""
    name: str


async def reap(backends: Iterable[SandboxBackend], *, dry_run: bool = False) -> list[Leftover]:
    """Remove what dead controllers left and return it.

    Args:
        dry_run: only look.
    """
    found = []
    for backend in backends:
        try:
            found += [Leftover(backend.name, name) for name in await backend.reap(dry_run=dry_run)]
        except Exception as error:
            _logger.warning("Could not look for what earlier runs left of %s sandboxes: %r", backend.name, error)
    folders = await in_thread(partial(sweep_scratch_folders, dry_run=dry_run))
    return found + [Leftover("scratch", folder) for folder in folders]
