"""Where the proxy does its own computing: short steps on the event loop, long ones on worker threads.

`app` makes one for all sessions; `session` says how long a step is. A hop to a thread and back costs more than most
turns of a conversation have to be read and rendered, but a loop that is busy serves nobody. Invariant: of the short
steps one is done in each turn of the loop, however many requests arrive at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

THREADS = 2
"""Python code runs in one at a time; a second one uses the time in which the first encodes text, which needs no
interpreter lock. More of them only keep the event loop waiting for the lock."""


class Work:
    """Made and used on the event loop of the server."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="clawgym-proxy")
        self._taken = False
        """Whether this turn of the loop has had its step."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def short(self, step: Callable[[], T]) -> T:
        """Do what takes about a millisecond, as soon as it is its turn."""
        if self._taken:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            asyncio.get_running_loop().call_soon(self._next)
        return step()

    async def long(self, step: Callable[[], T]) -> T:
        """Do what may take longer."""
        running = asyncio.get_running_loop().run_in_executor(self._threads, step)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait({running})  # a thread cannot be stopped, and what it touches must not be shared
            raise

    def close(self) -> None:
        """Begin no further long step. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        """Give this turn of the loop to whoever has waited longest."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # a cancelled one is
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
