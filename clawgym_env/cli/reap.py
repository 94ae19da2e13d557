"""`clawgym reap`: remove what killed runs left on this machine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from clawgym_env import registry
from clawgym_env.errors import ClawGymError
from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.sandbox.reaper import reap


@dataclass(frozen=True)
class ReapArgs:
    """Where to look."""

    sandbox: str = "all"
    """local, docker, an import path, or all."""
    dry_run: bool = False
    """Only show what would be removed."""


def reap_command(args: OmitArgPrefixes[FlagCreatePairsOff[ReapArgs]]) -> None:
    """Remove the sandboxes and folders of runs that were killed; what a living run owns stays."""
    found = asyncio.run(reap(_backends(args.sandbox), dry_run=args.dry_run))
    for leftover in found:
        print(f"{leftover.kind}  {leftover.name}")
    print(f"{len(found)} leftovers {'found' if args.dry_run else 'removed'}")


def _backends(name: str) -> Iterator[SandboxBackend]:
    """Yield the backends to ask; one that this machine lacks has left nothing on it."""
    for one in registry.BACKENDS if name == "all" else (name,):
        try:
            yield registry.backend(one)
        except registry.UnknownName:
            raise
        except (ClawGymError, ImportError) as error:
            print(f"{one}: not here ({error})", file=sys.stderr)
