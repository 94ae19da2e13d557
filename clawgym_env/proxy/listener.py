"""Listening sockets on uvicorn's HTTP protocol, without uvicorn's server: hundreds of them cost next to nothing.

`app.ProxyServer` opens one per sandbox, and one on loopback where asked. Invariant: after `close` no connection and
no handler of that listener is left.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from clawgym_env.proxy.session import RolloutSession

_KEEP_ALIVE_S = 3600
"""Harnesses pool connections and run tools for minutes between two calls."""
MAX_CONNECTIONS = 64
"""Per listener inside a sandbox. More are closed at once: the agent's own code could open any number."""
MAX_HEAD = 1 << 20
"""Bytes of one request beside its body."""
_HANDLER_END_S = 5.0
_LINGER_RESET = struct.pack("ii", 1, 0)


class _JoiningTransport:
    """A transport that can hold writes back and make one of them.

    uvicorn writes the headers and the body of an answer one by one. Each write is a system call, over loopback with the
    receiver's work in it.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held: list[bytes] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._held is None:
            self._transport.write(data)
        else:
            self._held.append(data)

    def close(self) -> None:
        self._release()  # what was written before is still sent, as by any transport
        self._transport.close()

    @contextmanager
    def joined(self) -> Iterator[None]:
        self._held = []
        try:
            yield
        finally:
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        if held:
            self._transport.write(b"".join(held))


class PeerProtocol(HttpToolsProtocol):
    """uvicorn's protocol, open where the proxy must know what became of its bytes. Satisfies `connection.Peer`."""

    def __init__(self, config: Config, server_state: ServerState, session: RolloutSession | None) -> None:
        super().__init__(config, server_state, {"session": session, "peer": self})
        self.access_log = False
        self.gone: asyncio.Future[None]
        """Done when the connection is lost."""
        self._broken = False
        self._private = session is not None
        self._head_bytes = 0
        """Received for the current request beside its body."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.gone = asyncio.get_running_loop().create_future()
        super().connection_made(transport)
        self._joining = _JoiningTransport(transport)
        self.transport = cast(asyncio.Transport, self._joining)
        if self._private and len(self.connections) > MAX_CONNECTIONS:
            self.reset()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > MAX_HEAD:
            self.reset()

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self.pipeline:
            self.flow.resume_reading()  # a long body's end has paused it, and only who reads sees the client leave

    def connection_lost(self, exc: Exception | None) -> None:
        # A lost connection has no buffer any more; with an exception its bytes never left.
        self._broken = self._broken or exc is not None
        self.gone.set_result(None)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # uvicorn forgets to after an error, and the timer holds the session

    def joined_writes(self) -> AbstractContextManager[None]:
        """Hold back what is written inside and write it at once."""
        return self._joining.joined()

    def unsent(self) -> int:
        """Return how many bytes wait in user space."""
        return self.transport.get_write_buffer_size()

    @property
    def broken(self) -> bool:
        """Whether the connection was lost with bytes unsent."""
        return self._broken

    def reset(self) -> None:
        """Close at once, without an orderly end."""
        self._broken = True
        sock = self.transport.get_extra_info("socket")
        if sock is not None and sock.fileno() >= 0:  # an orderly end is taken for the end of the answer by some clients
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_RESET)
        self.transport.abort()


def make_config(app: ASGIApp) -> Config:
    """Return the uvicorn settings every listener shares. Touches no logger and no signal."""
    config = Config(
        app,
        interface="asgi3",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level=None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    return config


class Listener:
    """One listening socket. Made by `ProxyServer`; whoever asked for it closes it."""

    def __init__(self, server: asyncio.Server, state: ServerState, on_close: Callable[[], Awaitable[None]]) -> None:
        self._server = server
        self._state = state
        self._on_close = on_close

    @classmethod
    async def open(
        cls,
        config: Config,
        sock: socket.socket,
        *,
        session: RolloutSession | None,
        on_close: Callable[[], Awaitable[None]],
    ) -> Listener:
        """Accept on a bound socket, which the listener then owns, also when it is cancelled.

        With a `session` nothing else is served.
        """
        state = ServerState()
        loop = asyncio.get_running_loop()
        server = None
        try:
            # `create_server` yields once it accepts: cancelled there, nobody would hold what accepts.
            server = await loop.create_server(
                lambda: PeerProtocol(config, state, session), sock=sock, backlog=1024, start_serving=False
            )
            await server.start_serving()
        except BaseException:
            if server is not None:
                server.close()
            sock.close()
            raise
        return cls(server, state, on_close)

    @property
    def port(self) -> int:
        """The TCP port."""
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        """Stop accepting, cut open connections, wait for their handlers. Idempotent."""
        self._server.close()
        for protocol in list(self._state.connections):
            protocol.transport.abort()
        await self._on_close()
        tasks = set(self._state.tasks)  # their clients are gone, so they end by themselves
        if tasks:
            _, stuck = await asyncio.wait(tasks, timeout=_HANDLER_END_S)
            for task in stuck:
                task.cancel()
        await self._server.wait_closed()
