"""Which of several servers answers a call.

Rollouts are not known here, and need not be: the prompt of a rollout's next call begins with its last one, so the
server that has read most of a prompt already is the one that answered the rollout before. Invariant: what a server is
credited with was read under its present weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_env.engine.base import TokenIds
from clawgym_env.engine.vllm.server import VllmServer

BLOCK = 64
"""Tokens that are remembered together; a few of vLLM's own blocks of 16."""
MAX_BLOCKS = 1 << 16
"""Remembered of one server, some four million tokens: about what its cache can hold."""
CALL_COST = 256
"""Tokens that might as well be read as wait behind one more call. A bigger one keeps rollouts more to their server."""


@dataclass(slots=True, eq=False)
class Replica:
    """One server and what is known of it."""

    server: VllmServer
    in_flight: int = 0
    lost: bool = False
    """Whether it has to be found, and given the present weights, before it answers calls again."""
    term: int = 0
    """Counts the times it was found again: what it answered before says nothing of it now."""
    _read: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def num_read(self, blocks: Sequence[int]) -> int:
        """Return how many blocks of a prompt, from its start, the server has read before."""
        for count, block in enumerate(blocks):
            if block not in self._read:
                return count
        return len(blocks)

    def remember(self, blocks: Sequence[int]) -> None:
        """Credit the server with a prompt."""
        for block in blocks:
            self._read[block] = None
            self._read.move_to_end(block)
        while len(self._read) > MAX_BLOCKS:
            self._read.popitem(last=False)

    def forget(self) -> None:
        """The server's cache is empty."""
        self._read.clear()


def prefix_blocks(token_ids: TokenIds) -> list[int]:
    """Return a number for each whole block of a prompt; it stands for the block and all that is before it."""
    data, blocks, digest = np.ascontiguousarray(token_ids, dtype=np.int32).tobytes(), [], 0
    size = BLOCK * 4
    for start in range(0, len(data) - size + 1, size):
        digest = hash((digest, data[start : start + size]))
        blocks.append(digest)
    return blocks


def cheapest(replicas: Sequence[Replica], blocks: Sequence[int]) -> Replica:
    """Return the server that has least to do until it answers a prompt: what it must read, and the calls before it."""

    def cost(replica: Replica) -> int:
        return BLOCK * (len(blocks) - replica.num_read(blocks)) + CALL_COST * replica.in_flight

    return min(replicas, key=cost)
