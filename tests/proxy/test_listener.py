"""Sockets that accept, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Callable
from typing import Any, cast

import pytest
from proxy_rig import CHAT, GatedEngine, ask, eventually, running

from clawgym_env._loop import new_event_loop
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.proxy.listener import Listener, PeerProtocol, make_config


async def nothing() -> None:
    """No handler hangs on these listeners."""


def test_a_cancelled_open_leaves_no_socket_that_accepts() -> None:
    sock = socket.create_server(("127.0.0.1", 0))
    sock.setblocking(False)

    async def scenario() -> None:
        opening = asyncio.ensure_future(Listener.open(make_config(app), sock, session=None, on_close=nothing))
        await asyncio.sleep(0)  # it has begun to accept and yields
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening

    address = sock.getsockname()
    asyncio.run(scenario())
    assert sock.fileno() == -1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=5)


async def app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("Nobody connects.")


@pytest.mark.parametrize("size", [1_000, 100_000, 300_000])
@pytest.mark.parametrize("make_loop", [asyncio.new_event_loop, new_event_loop])
def test_a_client_that_leaves_while_its_call_generates_is_noticed_at_any_body_size(
    size: int, make_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """A body that fills uvicorn's buffer pauses reading, and who does not read sees nobody leave."""

    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            body = json.dumps(ask("x" * size)).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            head = f"POST /r/{rig.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode())
            await asyncio.sleep(0.05)  # the handler waits for the body when it comes
            writer.write(body)
            await eventually(lambda: engine.started == 1)
            (call,) = rig.session._pending
            writer.close()
            await eventually(lambda: call.waiters == 0)
            engine.gate.set()
            await eventually(call.completed.done)
            assert (await rig.session.settle())[0].timing.delivered_s is None

    with asyncio.Runner(loop_factory=make_loop) as runner:
        runner.run(test())


@pytest.mark.parametrize("end", ["keep-alive", "close"])
def test_an_answer_leaves_whole_and_in_one_write(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for the connection's end makes uvicorn close it behind the body."""
    written: list[bytes] = []
    made = PeerProtocol.connection_made

    class Watched:
        def __init__(self, transport: asyncio.Transport) -> None:
            self._transport = transport

        def __getattr__(self, name: str) -> Any:
            return getattr(self._transport, name)

        def write(self, data: bytes) -> None:
            written.append(data)
            self._transport.write(data)

    monkeypatch.setattr(
        PeerProtocol, "connection_made", lambda protocol, transport: made(protocol, cast(Any, Watched(transport)))
    )

    async def test() -> None:
        async with running(ScriptedEngine(("hello",))) as rig:
            body = json.dumps(ask("hello")).encode()
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            head = f"POST /r/{rig.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\nconnection: {end}\r\n"
            writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            headers = await reader.readuntil(b"\r\n\r\n")
            (length,) = re.findall(rb"content-length: (\d+)", headers)
            answer = await reader.readexactly(int(length))
            assert json.loads(answer)["choices"]
            assert written == [headers + answer]
            if end == "close":
                assert await reader.read() == b""
            writer.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(test())
