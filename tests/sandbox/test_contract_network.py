"""Contract of every backend: the listener, a sandbox's one way out."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from contract import InSandbox, every_backend, isolated, python

from clawgym_env.sandbox.base import Sandbox, SandboxBackend, SandboxSpec

FETCH = "import sys, urllib.request as u; print(u.urlopen('http://127.0.0.1:' + sys.argv[1]).read().decode())"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    await writer.drain()
    writer.close()


def _port_inside(backend: SandboxBackend, listener: socket.socket, port: int) -> str:
    """Return where commands reach a listener: without walls there is one network, and it takes any free port."""
    return str(port if isolated(backend) else listener.getsockname()[1])


@every_backend
def test_a_listener_inside_is_served_by_the_host(in_sandbox: InSandbox, backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> None:
        listener = await sandbox.listen(8123)
        port = _port_inside(backend, listener, 8123)
        with pytest.raises(OSError, match="in use"):
            await sandbox.listen(8123)
        async with await asyncio.start_server(_answer, sock=listener):
            answers = await asyncio.gather(*(python(sandbox, FETCH, port) for _ in range(5)))
        assert answers == ["hello\n"] * 5
        if isolated(backend):
            with socket.socket() as outside:
                assert outside.connect_ex(("127.0.0.1", 8123)) != 0

    in_sandbox(body)


@every_backend
def test_a_sandbox_has_several_listeners(in_sandbox: InSandbox, backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> None:
        ports = (8001, 8002)
        listeners = [await sandbox.listen(port) for port in ports]
        async with contextlib.AsyncExitStack() as stack:
            for port, listener in zip(ports, listeners, strict=True):
                inside = _port_inside(backend, listener, port)
                await stack.enter_async_context(await asyncio.start_server(_answer, sock=listener))
                assert await python(sandbox, FETCH, inside) == "hello\n"

    in_sandbox(body)


def test_a_port_that_a_command_took_is_in_use(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        code = """
import os, socket, time
server = socket.create_server(("127.0.0.1", 8200))
if os.fork(): os._exit(0)
time.sleep(1000)
"""
        await python(sandbox, code)
        with pytest.raises(OSError, match="in use"):
            await sandbox.listen(8200)

    in_sandbox(body)


def test_two_sandboxes_can_listen_on_one_port_and_do_not_meet(backend: SandboxBackend) -> None:
    async def main() -> None:
        first, second = await asyncio.gather(*(backend.open(SandboxSpec()) for _ in range(2)))
        try:
            listeners = [await sandbox.listen(8080) for sandbox in (first, second)]
            async with await asyncio.start_server(_answer, sock=listeners[0]):
                listeners[1].close()
                assert (await first.exec(["python3", "-c", FETCH, "8080"])).exit_code == 0
                assert (await second.exec(["python3", "-c", FETCH, "8080"])).exit_code == 1
        finally:
            await asyncio.gather(first.close(), second.close())

    asyncio.run(main())
