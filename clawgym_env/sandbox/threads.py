"""Blocking work beside the event loop, a thread per call.

Used for copies in and out of sandboxes and by graders. Invariant: no call waits for another. In asyncio's own executor
a few grading functions that hang would hold every thread, and with them all rollouts; here each holds only its own,
which does not keep the process from ending either.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T]) -> asyncio.Future[T]:
    """Start `function` in a daemon thread and return its outcome's future.

    Cancelling the future leaves the thread to its end and drops what it gives. What is no `Exception` (a `SystemExit`)
    arrives as a `RuntimeError`: it must not end the loop.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(finish: Callable[[], None]) -> None:
        if not future.done():
            finish()

    def work() -> None:
        finish: Callable[[], None]
        try:
            value = context.run(function)
            finish = lambda: future.set_result(value)  # noqa: E731
        except BaseException as raised:
            fits = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if fits else RuntimeError(repr(raised))
            finish = lambda: future.set_exception(error)  # noqa: E731
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(deliver, finish)

    threading.Thread(target=work, name="clawgym-work", daemon=True).start()
    return future
