"""The host's end of the control socket to a sandbox's supervisor.

Made at once, attached when the backend has a connection (an inherited socket, or one that the supervisor opened).
Invariant: the supervisor is not trusted. A reply is a fixed-size struct with at most one file descriptor, checked
before use; anything else, and the end of the stream, fails whatever is waiting.
"""

from __future__ import annotations

import array
import asyncio
import marshal
import os
import socket
import struct
from contextlib import suppress

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import supervisor

Argument = int | dict[int, int] | None
Job = tuple[str, tuple[object, ...]]
"""What to do and its arguments, as `supervisor.run` takes them: strings, numbers, lists and dicts of them."""

_CREDENTIALS = struct.Struct("iII")


class Control:
    """Requests to the supervisor and their replies."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._loop = asyncio.get_running_loop()
        self._exits: dict[int, asyncio.Future[int]] = {}
        self._answers: dict[int, asyncio.Future[tuple[int, int | None]]] = {}
        self._next_id = 1
        self.ready: asyncio.Future[int] = self._loop.create_future()
        """The supervisor's pid in our pid namespace, told by the kernel; 0 when it has none there."""
        self.lost = False
        """Whether the supervisor hung up."""

    @property
    def attached(self) -> bool:
        """Whether there is a socket, which `close` closes."""
        return self._socket is not None

    def attach(self, connected: socket.socket) -> None:
        """Take over the socket to the supervisor."""
        connected.setblocking(False)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket = connected
        self._loop.add_reader(connected, self._on_readable, connected)

    async def spawn(self, job: Job, fds: tuple[int, int, int]) -> tuple[int, asyncio.Future[int]]:
        """Start a job on the given stdin, stdout and stderr (still the caller's to close).

        Returns:
            Its id and the future of its exit code.
        """
        job_id = self._new_id()
        exit_code: asyncio.Future[int] = self._loop.create_future()
        self._exits[job_id] = exit_code
        # A file, not the message, holds the job: arguments and environment may be larger than a packet.
        payload = os.memfd_create("job")
        try:
            view = memoryview(_packed(job))
            while view:
                view = view[os.write(payload, view) :]
            os.lseek(payload, 0, os.SEEK_SET)
            await self._send(("spawn", job_id, None), payload, *fds)
        except BaseException:
            del self._exits[job_id]
            raise
        finally:
            os.close(payload)
        return job_id, exit_code

    async def request(
        self, kind: str, argument: Argument = None, *, job_id: int | None = None
    ) -> tuple[int, int | None]:
        """Send a request and return its reply's value and file descriptor (a descriptor means success)."""
        job_id = self._new_id() if job_id is None else job_id
        answer = self._answers.get(job_id)
        if answer is None:
            answer = self._answers[job_id] = self._loop.create_future()
            await self._send((kind, job_id, argument))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            if answer.done() and not answer.exception() and (fd := answer.result()[1]) is not None:
                os.close(fd)  # it came in the very moment
            raise
        finally:
            self._answers.pop(job_id, None)

    def kill_nowait(self, job_id: int) -> None:
        """Ask for the end of a job's tree without waiting, as far as the socket takes it."""
        if self._socket is not None and not self.lost:
            with suppress(OSError):
                self._socket.send(_packed(("kill", job_id, None)))

    def close(self) -> None:
        """Hang up; the supervisor ends if it still runs."""
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        self._fail("The sandbox was closed.")

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def _send(self, message: tuple[str, int, Argument], *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        while True:
            if self._socket is None or self.lost:
                raise SandboxError("Expected a live sandbox, got one whose supervisor has ended.")
            try:
                self._socket.sendmsg([_packed(message)], rights)
                return
            except BlockingIOError:
                await asyncio.sleep(0.005)
            except OSError as error:
                raise SandboxError(f"Expected a live sandbox, got {error} from its control socket.") from error

    def _on_readable(self, connected: socket.socket) -> None:
        size = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(4)
        try:
            data, ancillary, _, _ = connected.recvmsg(64, size, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        fds: list[int] = []
        sender = 0
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds += array.array("i", content[: len(content) // 4 * 4])
            elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                sender = _CREDENTIALS.unpack(content)[0]
        if len(data) != supervisor.REPLY.size or len(fds) > 1:
            self._loop.remove_reader(connected)
            self._fail("The sandbox's supervisor ended.")
        else:
            kind, job_id, value = supervisor.REPLY.unpack(data)
            if self._deliver(kind, job_id, value, sender, fds[0] if fds else None):
                return
        for fd in fds:
            os.close(fd)

    def _deliver(self, kind: int, job_id: int, value: int, sender: int, fd: int | None) -> bool:
        """Hand a reply to who waits for it; False when nobody took the descriptor."""
        if kind == supervisor.READY and not self.ready.done():
            if value == 0:
                self.ready.set_result(sender)
            else:
                fault = f"Expected the folders of the sandbox to be made, got: {os.strerror(value)}."
                self.ready.set_exception(SandboxError(fault))
                self.ready.exception()  # whoever waits sees it; nobody waiting is no error
        elif kind == supervisor.EXITED:
            exit_code = self._exits.pop(job_id, None)
            if exit_code is not None and not exit_code.done():
                exit_code.set_result(value)
        else:
            answer = self._answers.get(job_id)
            if answer is not None and not answer.done():
                taken = kind == supervisor.LISTENING
                answer.set_result((value, fd if taken else None))
                return taken
        return False

    def _fail(self, reason: str) -> None:
        self.lost = True
        waiting: list[asyncio.Future[int] | asyncio.Future[tuple[int, int | None]]] = [self.ready]
        waiting += [*self._exits.values(), *self._answers.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(SandboxError(reason))
                future.exception()  # whoever still waits sees it; nobody waiting is no error
        self._exits.clear()


def _packed(message: object) -> bytes:
    """Serialise for the supervisor; it trusts us, and `json` would cost it 10 ms. Version 2 suits any Python 3."""
    return marshal.dumps(message, 2)  # type: ignore[arg-type]
