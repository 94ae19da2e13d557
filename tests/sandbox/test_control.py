"""The host's end of the control socket does not trust the other: each test is a supervisor that lies."""

from __future__ import annotations

import array
import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.control import Control
from clawgym_env.sandbox.supervised import SupervisedSandbox
from clawgym_env.sandbox.supervisor import DONE, LISTENING, READY, REPLY

FIRST_REQUEST = 2


class Lied(SupervisedSandbox):
    """A sandbox whose supervisor is the test."""

    def __init__(self) -> None:
        super().__init__(SandboxSpec())
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.attach(ours)

    async def _start(self) -> None:
        pass

    async def _end(self) -> None:
        self.theirs.close()

    @property
    def control(self) -> Control:
        return self._control

    def say(self, data: bytes, *fds: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.theirs.sendmsg([data], rights)


@contextmanager
def nothing_leaks() -> Iterator[None]:
    before = os.listdir("/proc/self/fd")
    yield
    assert len(os.listdir("/proc/self/fd")) == len(before)


def pipe_end() -> int:
    ours, theirs = os.pipe()
    os.close(theirs)
    return ours


def unix_listener() -> int:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")
    listener.listen()
    return listener.detach()


def tcp(*, listens: bool, kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    found = socket.socket(socket.AF_INET, kind)
    found.bind(("127.0.0.1", 0))
    if listens:
        found.listen()
    return found.detach()


@pytest.mark.parametrize(
    "wrong",
    [
        pipe_end,
        unix_listener,
        lambda: tcp(listens=False),
        lambda: tcp(listens=True),  # on another port
        lambda: tcp(listens=False, kind=socket.SOCK_DGRAM),
    ],
    ids=["pipe", "unix", "deaf", "other-port", "udp"],
)
def test_only_the_listener_that_was_asked_for_is_taken(wrong: Callable[[], int]) -> None:
    async def main() -> None:
        async with Lied() as sandbox:
            fd = wrong()
            sandbox.say(REPLY.pack(LISTENING, FIRST_REQUEST, 0), fd)
            os.close(fd)
            asking = asyncio.ensure_future(sandbox.listen(1))
            with pytest.raises(SandboxError, match="got another"):
                await asking

    with nothing_leaks():
        asyncio.run(main())


@pytest.mark.parametrize("data", [b"x", bytes(60), bytes(200), REPLY.pack(250, 77, -1)[:-1]])
def test_garbage_fails_whoever_waits(data: bytes) -> None:
    async def main() -> None:
        async with Lied() as sandbox:
            asking = asyncio.ensure_future(sandbox.kill_all())
            await asyncio.sleep(0)
            sandbox.say(data, 0)
            with pytest.raises(SandboxError, match="supervisor ended"):
                await asking
            with pytest.raises(SandboxError, match="live sandbox"):
                await sandbox.kill_all()

    with nothing_leaks():
        asyncio.run(main())


def test_descriptors_that_nobody_asked_for_are_closed() -> None:
    async def main() -> None:
        async with Lied() as sandbox:
            asking = asyncio.ensure_future(sandbox.kill_all())
            await asyncio.sleep(0)
            for kind, job_id in ((READY, 0), (READY, 0), (LISTENING, 99), (77, 99), (DONE, FIRST_REQUEST)):
                sandbox.say(REPLY.pack(kind, job_id, 0), 0)
            await asking
            sandbox.say(REPLY.pack(DONE, 98, 0), 0, 0, 0)
            with pytest.raises(SandboxError):
                await sandbox.kill_all()

    with nothing_leaks():
        asyncio.run(main())


def test_a_listener_that_comes_in_the_moment_of_a_cancellation_is_closed() -> None:
    async def main() -> None:
        async with Lied() as sandbox:
            for steps in range(12):
                asking = asyncio.ensure_future(sandbox.listen(1))
                await asyncio.sleep(0)
                fd = tcp(listens=True)
                sandbox.say(REPLY.pack(LISTENING, FIRST_REQUEST + steps, 0), fd)
                os.close(fd)
                for _ in range(steps):
                    await asyncio.sleep(0)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    with nothing_leaks():
        asyncio.run(main())
