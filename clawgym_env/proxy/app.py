"""The serving proxy: harnesses call it in their own dialect, the policy's engine answers, the session records.

The runner opens a session per rollout and serves it on a socket inside the sandbox. A plain ASGI callable routes
`/r/<key>/v1/…`. Invariants: the key is the only credential; a listener inside a sandbox knows no other rollout; admin
routes are not here.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.proxy import streaming
from clawgym_env.proxy.connection import BodyTooLarge, ClientGone, Connection
from clawgym_env.proxy.dialects import dialect_of, routes
from clawgym_env.proxy.listener import Listener, make_config
from clawgym_env.proxy.session import RolloutSession, SessionClosed, SessionSettings
from clawgym_env.proxy.wire import STATUS, ErrorKind, MemoryNeeded, WireDialect, bounded
from clawgym_env.proxy.work import Work
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.calls import ModelCall

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from clawgym_env.harness import HarnessAdapter

logger = logging.getLogger(__name__)

MAX_BODY = 32 << 20
"""Bytes of one request body. A history of 128k tokens is under 1 MB of text; what remains is for images, which are
read as placeholders."""
API_VERSIONS = frozenset({"v1", "v1beta", "v1alpha"})


class ProxyServer:
    """One proxy per process. `start`, then sessions and listeners; `close` ends them all."""

    def __init__(self, *, settings: SessionSettings = SessionSettings()) -> None:
        self._settings = settings
        self._sessions: dict[str, RolloutSession] = {}
        self._listeners: set[Listener] = set()
        self._config = make_config(self._serve_request)
        self._work: Work | None = None

    async def start(self) -> None:
        """Start the worker threads. Idempotent."""
        if self._work is None:
            self._work = Work()

    def open_session(
        self,
        engine: Engine,
        *,
        sampling: SamplingParams = SamplingParams(),
        limits: Limits = Limits(),
        adapter: HarnessAdapter | None = None,
        seed: int = 0,
        on_call: Callable[[ModelCall], Awaitable[None]] | None = None,
    ) -> RolloutSession:
        """Make a rollout's session and its key.

        Args:
            on_call: awaited with every recorded call before its reply leaves.
        """
        if self._work is None:
            raise ProxyError("Expected a started proxy. Await ProxyServer.start() first.")
        key = secrets.token_hex(16)
        session = RolloutSession(
            key,
            engine=engine,
            sampling=sampling,
            limits=limits,
            seed=seed,
            work=self._work,
            adapter=adapter,
            on_call=on_call,
            on_close=lambda: self._drop(key),
            settings=self._settings,
        )
        self._sessions[key] = session
        return session

    async def serve(self, sock: socket.socket, session: RolloutSession) -> Listener:
        """Serve one rollout, and only that, on a listening socket. Closing the listener ends the session."""
        return await self._listen(sock, session)

    async def listen_tcp(self, host: str = "127.0.0.1", port: int = 0) -> Listener:
        """Serve every open session on a TCP address of this machine, for harnesses that run without a sandbox."""
        sock = socket.create_server((host, port), backlog=1024)
        sock.setblocking(False)
        return await self._listen(sock, None)

    async def close(self) -> None:
        """End every session and listener. Idempotent."""
        await asyncio.gather(*(session.close() for session in list(self._sessions.values())))
        await asyncio.gather(*(listener.close() for listener in list(self._listeners)))
        work, self._work = self._work, None
        if work is not None:
            work.close()

    async def _listen(self, sock: socket.socket, session: RolloutSession | None) -> Listener:
        async def on_close() -> None:
            self._listeners.discard(listener)
            if session is not None:
                await session.close()

        listener = await Listener.open(self._config, sock, session=session, on_close=on_close)
        self._listeners.add(listener)
        return listener

    def _drop(self, key: str) -> None:
        self._sessions.pop(key, None)

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request. The ASGI callable."""
        connection = Connection(scope, receive, send)
        try:
            await self._route(connection, cast("RolloutSession | None", scope["state"]["session"]))
        except ClientGone:
            return
        except Exception:  # the boundary: cut, so that no client waits for an answer that has broken
            logger.exception("A request could not be answered.")
            await connection.reset()

    async def _route(self, connection: Connection, only: RolloutSession | None) -> None:
        key, rest = split_path(connection.path)
        dialect = dialect_of(rest, connection.headers)
        operation = dialect.operation(rest)
        session = self._sessions.get(key)
        if session is None or (only is not None and session is not only):
            await _refuse(
                connection, dialect, "not_found", "Expected the URL of a running rollout, got an unknown key."
            )
        elif connection.method != "POST" and any(rest.startswith(f"{route}/") for route in dialect.ROUTES):
            await _refuse(connection, dialect, "not_found", f"No reply is kept here, so there is no {rest!r}.")
        elif connection.method != "POST":
            await connection.reply(200, b"" if connection.method == "HEAD" else _probe_body(dialect, session, rest))
        elif operation is None:
            await _refuse(connection, dialect, "not_found", f"Expected one of {routes()}, got {rest!r}.")
        else:
            try:
                async with session.body_room(connection.body_bound(MAX_BODY)) as keep:
                    body = await connection.read_body(MAX_BODY)
                    keep(len(body))
                    await _call(connection, dialect, session, body, path=rest, count=operation == "count")
            except BodyTooLarge as error:
                await _refuse(connection, dialect, "too_large", str(error))
            except MemoryNeeded as error:
                await _refuse(connection, dialect, "memory_needed", str(error))
            except ProxyError as error:
                await _refuse(connection, dialect, "invalid_request", str(error))
            except SessionClosed as error:
                await _refuse(connection, dialect, "not_found", str(error))


async def _call(
    connection: Connection, dialect: WireDialect, session: RolloutSession, body: bytes, *, path: str, count: bool
) -> None:
    """Answer one model call (or count its prompt)."""
    target = f"{path}?{connection.query}"
    request, digest = await session.read(dialect, body, target)
    if count:
        try:
            tokens = await session.count_tokens(request, connection.headers, size=len(body))
        except ContextOverflow as overflow:
            await connection.reply(400, dialect.overflow_error(overflow))
        else:
            await connection.reply(200, dialect.count_body(tokens))
        return
    call = session.submit(request, digest, connection.headers, size=len(body))
    if call is None:
        await streaming.hold(connection, session)
    else:
        await streaming.answer(connection, dialect, request, session=session, call=call)


def split_path(path: str) -> tuple[str, str]:
    """Split `/r/<key>/v1/<rest>` into key and rest; both are empty for another path.

    The version may be missing or doubled: clients disagree about whose part of the URL it is.
    """
    parts = path.strip("/").split("/")
    if len(parts) < 2 or parts[0] != "r":
        return "", ""
    rest = parts[2:]
    while rest and rest[0] in API_VERSIONS:
        rest = rest[1:]
    return parts[1], "/".join(rest)


async def _refuse(connection: Connection, dialect: WireDialect, kind: ErrorKind, message: str) -> None:
    await connection.reply(STATUS[kind], dialect.error_body(kind, bounded(message)))


def _probe_body(dialect: WireDialect, session: RolloutSession, rest: str) -> bytes:
    """Return model cards for /models; an empty object for any other probe."""
    if rest == "models":
        return dialect.models_body(None, session.context_length)
    if rest.startswith("models/"):
        return dialect.models_body(rest.removeprefix("models/"), session.context_length)
    return b"{}"
