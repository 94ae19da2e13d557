from __future__ import annotations

import asyncio
import socket

import pytest

from clawgym_env.proxy.listener import Listener, make_config


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
