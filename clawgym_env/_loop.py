"""The one background event loop behind the synchronous Gymnasium face.

Everything asynchronous (proxy, sandboxes, engines' waiters) lives on this loop, in one permanent thread: sandboxes die
with the thread that spawned them, so that thread must outlive every rollout, and an `asyncio.run` per step would
neither work in notebooks nor keep connections. Invariant: `run` returns only when the coroutine has finished its
clean-up, also after Ctrl-C.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Return uvloop's, which serves sockets for less, where it is there: uvicorn brings it on Linux."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class BackgroundLoop:
    """An event loop in a daemon thread of its own."""

    def __init__(self) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clawgym-loop", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result.

        Ctrl-C cancels the coroutine, waits until it has closed what it opened, then raises `KeyboardInterrupt`.
        """
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("Expected a call from outside the background loop. Await the coroutine instead.")
        outcome: Future[T] = Future()
        started: Future[asyncio.Task[T]] = Future()

        def finish(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(asyncio.CancelledError())
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def start() -> None:
            task = self._loop.create_task(coroutine)
            task.add_done_callback(finish)
            started.set_result(task)

        self._loop.call_soon_threadsafe(start)
        try:
            return outcome.result()
        except KeyboardInterrupt:
            self._loop.call_soon_threadsafe(started.result().cancel)
            outcome.exception()  # waits for the clean-up; a second Ctrl-C ends the wait
            raise

    def close(self) -> None:
        """Cancel what still runs, let it clean up, and end the thread. Idempotent."""
        atexit.unregister(self.close)
        if not self._thread.is_alive():
            return

        async def drain() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._loop.shutdown_asyncgens()

        self.run(drain())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)
        self._loop.close()


def shared_loop() -> BackgroundLoop:
    """Return the process's loop, started at the first call; a forked child, which inherits no thread, gets its own."""
    return _loop_of(os.getpid())


@functools.cache
def _loop_of(pid: int) -> BackgroundLoop:
    return BackgroundLoop()
