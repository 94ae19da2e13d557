"""The host's ends of a command's stdin, stdout and stderr, driven by the event loop without threads.

Invariant: memory is bounded by the caller's limit whatever the command writes, and a command that floods its output
costs the loop a few wake-ups a second, not a core.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios
from contextlib import suppress

_CHUNK = 1 << 18
_DRAIN_PIPE = 1 << 20
_DRAIN_INTERVAL_S = 0.005


class OutputPipe:
    """Reads one pipe: keeps the head, counts the rest."""

    def __init__(self, fd: int, limit: int) -> None:
        self._fd = fd
        self._limit = limit
        self._loop = asyncio.get_running_loop()
        self._head = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self.dropped = 0
        """Bytes read beyond the limit."""
        os.set_blocking(fd, False)
        self._loop.add_reader(fd, self._on_readable)

    @property
    def closed(self) -> bool:
        """Whether every writer is gone, or `close` was called."""
        return self._fd < 0

    def take(self) -> bytes:
        """Read what lies in the pipe now and return the head. A daemon may still hold the other end."""
        left = self._pending()
        while left > 0 and not self.closed:
            left -= self._read(min(left, _CHUNK)) or left
        return bytes(self._head)

    def discard(self) -> None:
        """Go on reading, keep nothing: a daemon that outlives its command must not die of SIGPIPE."""
        self._limit = 0
        self._head.clear()

    def close(self) -> None:
        """Stop reading."""
        if self.closed:
            return
        self._loop.remove_reader(self._fd)
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._fd)
        self._fd = -1

    def _pending(self) -> int:
        if self.closed:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def _read(self, size: int) -> int:
        """Read once; 0 when the pipe is empty or at its end (then closed)."""
        try:
            data = os.read(self._fd, size)
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        room = max(0, self._limit - len(self._head))
        self._head += data[:room]
        self.dropped += max(0, len(data) - room)
        return len(data)

    def _on_readable(self) -> None:
        self._read(_CHUNK)
        if self.dropped and not self.closed:
            # Past the limit nothing is worth a wake-up of its own: let a big pipe fill, empty it now and then.
            self._loop.remove_reader(self._fd)
            with suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, _DRAIN_PIPE)
            self._drain()

    def _drain(self) -> None:
        size = self._read(_DRAIN_PIPE)
        if self.closed:
            return
        if size:
            self._timer = self._loop.call_later(_DRAIN_INTERVAL_S, self._drain)
        else:
            self._loop.add_reader(self._fd, self._on_readable)


class InputPipe:
    """Writes bytes to one pipe, then closes it."""

    def __init__(self, fd: int, data: bytes) -> None:
        self._fd = fd
        self._left = memoryview(data)
        self._loop = asyncio.get_running_loop()
        os.set_blocking(fd, False)
        self._loop.add_writer(fd, self._on_writable)
        self._on_writable()

    def close(self) -> None:
        """Stop writing."""
        if self._fd >= 0:
            self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _on_writable(self) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._fd, self._left[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the command closed its stdin
            pass
        self.close()
