"""Waiting for what must come to its end: the close of a sandbox, a copy that writes where `close` removes.

`asyncio.shield` alone lets a cancelled waiter leave early; a loop that then ends takes the work down with it, and a
sandbox is left. Invariant: who waits here returns after the work's end, never before.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def finished(work: asyncio.Future[T]) -> T:
    """Return what `work` gives. A cancellation of the caller is passed on once the work is over, not to the work."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    return work.result()
