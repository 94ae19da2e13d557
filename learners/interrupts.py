"""Ctrl-C that waits: an optimizer step is taken whole or not at all, so that a checkpoint after it is a sound one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold SIGINT back until the body has ended, then let it act as it would have.

    An error of the body goes before it: a step that failed half-way is not to be taken for one that was interrupted,
    after which a checkpoint is written. Off the main thread, where no signal arrives, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived = False

    def remember(signum: int, frame: FrameType | None) -> None:
        nonlocal arrived
        arrived = True

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if arrived:
        signal.raise_signal(signal.SIGINT)
