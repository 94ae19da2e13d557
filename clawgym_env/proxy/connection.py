"""One HTTP exchange as the proxy sees it: read the body, answer whole or as a stream, notice that the client left.

Sits between uvicorn's ASGI cycle and `streaming`. Invariant: `finish` and `reply` say True only when every byte has
been handed to the kernel while the client was still there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from clawgym_env.errors import ProxyError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

T = TypeVar("T")

EVENT_STREAM = b"text/event-stream; charset=utf-8"
JSON_STREAM = b"application/json; charset=utf-8"
_DRAIN_POLL_S = 0.01


class ClientGone(Exception):
    """The client closed the connection."""


class BodyTooLarge(ProxyError):
    """The request body exceeds the proxy's cap."""


class Peer(Protocol):
    """The transport behind an exchange; see `listener.PeerProtocol`."""

    gone: asyncio.Future[None]
    """Done when the connection is lost."""

    def joined_writes(self) -> AbstractContextManager[None]:
        """Hold back what is written inside and write it at once."""

    def unsent(self) -> int:
        """Return how many bytes wait in user space."""

    @property
    def broken(self) -> bool:
        """Whether the connection was lost with bytes unsent."""

    def reset(self) -> None:
        """Close at once, without an orderly end."""


class Connection:
    """Wraps one ASGI call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers: Mapping[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        self._peer = cast(Peer, scope["state"]["peer"])
        self._receive = receive
        self._send = send

    def body_bound(self, limit: int) -> int:
        """Return how many bytes the body can have at most: what is declared, or `limit` where nothing is."""
        declared = self.headers.get("content-length", "")
        if declared.isdecimal():
            return min(int(declared), limit)
        return limit if "transfer-encoding" in self.headers else 0

    async def read_body(self, limit: int) -> bytes:
        """Return the whole body.

        Raises:
            BodyTooLarge: more than `limit` bytes.
            ClientGone: before the body was complete.
        """
        declared = self.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"Expected a body of at most {limit} bytes, got {declared}.")
        chunks: list[bytes] = []
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            more = message.get("more_body", False)
            size += len(chunk)
            if size > limit:
                raise BodyTooLarge(f"Expected a body of at most {limit} bytes, got more.")
            chunks.append(chunk)
        return b"".join(chunks)

    async def until(self, future: asyncio.Future[T], timeout_s: float | None = None) -> bool:
        """Wait for a future and return whether it is done.

        Raises:
            ClientGone: the client left first.
        """
        either: set[asyncio.Future[Any]] = {future, self._peer.gone}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._peer.gone.done():
            raise ClientGone
        return future.done()

    async def reply(self, status: int, body: bytes) -> bool:
        """Send a whole JSON answer; return whether it was fully written."""
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if not await self._still_there():
            return False
        with self._peer.joined_writes():
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return await self._written()

    async def start_stream(self, content_type: bytes = EVENT_STREAM) -> None:
        """Send the headers of a stream."""
        headers = [(b"content-type", content_type), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def write(self, data: bytes) -> None:
        """Send a part of the stream."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes) -> bool:
        """Send the last bytes; return whether everything was fully written."""
        if not await self._still_there():
            return False
        await self._send({"type": "http.response.body", "body": data, "more_body": False})
        return await self._written()

    async def _still_there(self) -> bool:
        await asyncio.sleep(0)  # one turn of the loop, so that a hang-up which has already arrived is seen
        return not (self._peer.gone.done() or self._peer.broken)

    async def _written(self) -> bool:
        pause_s = 0.0  # uvloop may write at the end of this turn of the loop
        while self._peer.unsent() and not self._peer.broken:  # the transport has no event for it
            await asyncio.sleep(pause_s)
            pause_s = _DRAIN_POLL_S
        return not self._peer.broken

    async def reset(self) -> None:
        """Cut the connection, so that the client sees a failure it retries and never half an answer as a whole one."""
        self._peer.reset()
        await asyncio.wait({self._peer.gone})
