"""How the trainer's weights get into servers: one contract, and the way through files, which works anywhere.

Used by `VllmEngine.update_weights`, which pauses the servers around it and compares what came of it. Invariant: what
is loaded is what was published last, whole; a failure in the middle is raised, and then no server may be sampled.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from clawgym_env.engine.vllm.server import VllmServer

if TYPE_CHECKING:
    from clawgym_env.policy import Policy


class WeightSync(Protocol):
    """Carries weights. Blocking, called by one thread at a time."""

    def publish(self, policy: Policy) -> None:
        """Take the policy's present weights, so that they can be loaded until the next time."""

    def load(self, servers: Sequence[VllmServer]) -> None:
        """Put what was published last into servers, all of them paused.

        Raises:
            EngineError: a server failed; what it holds now is nothing to sample from.
        """

    def close(self) -> None:
        """Give back what was taken. Idempotent."""


class FileSync:
    """Through a folder in the form of Hugging Face that every server reads.

    Args:
        folder: the same path here and at the servers; by default a new one in memory, for servers on this machine.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._own: Path | None = None
        self._published: Path | None = None
        self._count = 0

    def publish(self, policy: Policy) -> None:
        """Write the weights beside those before, which then go: who still reads them is not disturbed."""
        from clawgym_env.policy import save_weights

        self._count += 1
        folder = self._root() / f"weights-{self._count}"
        save_weights(policy, folder)
        before, self._published = self._published, folder
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def load(self, servers: Sequence[VllmServer]) -> None:
        """Have servers read what was written last, one after the other: they may share their processors."""
        for server in servers:
            server.reload(str(self._published))

    def close(self) -> None:
        """Remove what was written."""
        for folder in (self._published, self._own):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        self._published = self._own = None

    def _root(self) -> Path:
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            return self._folder
        if self._own is None:
            memory = Path("/dev/shm")
            self._own = Path(tempfile.mkdtemp(prefix="clawgym-weights-", dir=memory if memory.is_dir() else None))
            # An engine that nobody closes must not keep a model in memory.
            weakref.finalize(self, shutil.rmtree, self._own, ignore_errors=True)
        return self._own
