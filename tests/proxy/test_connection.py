"""One exchange with fakes for uvicorn's side: what counts as delivered, and bodies that are too large."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
from proxy_rig import run

from clawgym_env.proxy.connection import BodyTooLarge, ClientGone, Connection

Message = dict[str, Any]


class FakePeer:
    """A transport whose client reads `chunk` bytes per look, or breaks at the `breaks_at`-th."""

    def __init__(self, *, waiting: int = 0, chunk: int = 0, breaks_at: int | None = None) -> None:
        self.waiting = waiting
        self.chunk = chunk
        self.breaks_at = breaks_at
        self.looks = 0
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave(self) -> None:
        self.gone.set_result(None)

    def joined_writes(self) -> AbstractContextManager[None]:
        return nullcontext()

    def unsent(self) -> int:
        self.looks += 1
        self.waiting = max(self.waiting - self.chunk, 0)
        return self.waiting

    @property
    def broken(self) -> bool:
        return self.breaks_at is not None and self.looks >= self.breaks_at

    def reset(self) -> None:
        self.breaks_at = 0
        self.leave()


def connect(
    peer: FakePeer, *, body: tuple[bytes, ...] = (b"",), headers: tuple[tuple[bytes, bytes], ...] = ()
) -> tuple[Connection, list[Message]]:
    """Return a connection and what it sends."""
    sent: list[Message] = []
    parts = [{"type": "http.request", "body": part, "more_body": i + 1 < len(body)} for i, part in enumerate(body)]

    async def receive() -> Message:
        return parts.pop(0) if parts else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": "POST", "path": "/", "query_string": b"", "headers": list(headers), "state": {"peer": peer}}
    return Connection(scope, receive, send), sent


def answered(make_peer: Callable[[], FakePeer], *, leaves: bool = False) -> tuple[bool, list[Message], FakePeer]:
    """Answer one request and return what `reply` said, what was sent and the peer."""

    async def test() -> tuple[bool, list[Message], FakePeer]:
        peer = make_peer()
        connection, sent = connect(peer)
        await connection.read_body(100)
        if leaves:
            peer.leave()
        return await connection.reply(200, b"{}"), sent, peer

    return run(test)


def test_a_reply_is_delivered_when_nothing_is_left_in_user_space() -> None:
    delivered, sent, peer = answered(lambda: FakePeer(waiting=100, chunk=40))
    assert delivered
    assert peer.looks == 3
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]


def test_a_reply_to_a_client_that_broke_off_while_reading_is_not_delivered() -> None:
    delivered, *_ = answered(lambda: FakePeer(waiting=100, breaks_at=2))
    assert not delivered


def test_a_reply_to_a_client_that_has_left_is_not_delivered() -> None:
    delivered, sent, _ = answered(FakePeer, leaves=True)
    assert not delivered
    assert sent == []


def test_waiting_ends_when_the_client_leaves() -> None:
    async def test() -> None:
        peer = FakePeer()
        connection, _ = connect(peer)
        await connection.read_body(100)
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        assert not await connection.until(never, 0.001)
        peer.leave()
        with pytest.raises(ClientGone):
            await connection.until(never)

    run(test)


def test_a_client_that_leaves_within_its_body_is_gone() -> None:
    async def test() -> None:
        connection, _ = connect(FakePeer(), body=())
        with pytest.raises(ClientGone):
            await connection.read_body(100)

    run(test)


def test_a_body_in_parts_is_put_together() -> None:
    async def test() -> None:
        connection, _ = connect(FakePeer(), body=(b"ab", b"", b"c"))
        assert await connection.read_body(3) == b"abc"

    run(test)


@pytest.mark.parametrize("headers", [(), ((b"content-length", b"4"),)])
def test_a_body_over_the_cap_is_refused_with_or_without_a_declared_length(
    headers: tuple[tuple[bytes, bytes], ...],
) -> None:
    async def test() -> None:
        connection, _ = connect(FakePeer(), body=(b"ab", b"cd"), headers=headers)
        with pytest.raises(BodyTooLarge, match="at most 3 bytes"):
            await connection.read_body(3)

    run(test)
