"""The proxy alone, for harnesses that run outside: `clawgym proxy`.

Starts a `ProxyServer` on one TCP port and the admin API on another, with a token of its own. Invariant: leaving the
context closes both listeners, every open rollout and the store; the engine belongs to whoever gave it.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.errors import ClawGymError
from clawgym_env.proxy.admin import AdminApi
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.proxy.listener import Listener, make_config
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.store import RolloutStore

ADMIN_HOST = "127.0.0.1"
"""Whoever opens rollouts from elsewhere brings a tunnel: a bearer token in plain HTTP is for this machine."""


@dataclass(frozen=True, slots=True)
class StandaloneProxy:
    """Where a running proxy is found."""

    base_url: str
    """`http://HOST:PORT`, for harnesses; a rollout's own URL is below it."""
    admin_url: str
    token: str


@asynccontextmanager
async def standalone_proxy(
    engine: Engine,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    admin_port: int = 0,
    advertise: str | None = None,
    token: str | None = None,
    sampling: SamplingParams = SamplingParams(),
    limits: Limits = Limits(),
    store: RolloutStore | None = None,
) -> AsyncIterator[StandaloneProxy]:
    """Run the proxy while the context is open.

    Args:
        host, port: where harnesses connect; port 0 takes a free one, here and for `admin_port`.
        advertise: the host name written into base URLs, where harnesses do not reach us as `host`.
        token: of the admin API; a random one by default.
        sampling, limits: of rollouts that are opened without their own.
        store: gets every call before its reply leaves. The caller closes it.

    Raises:
        ClawGymError: a port is taken, or no address of this machine.
    """
    token = token or secrets.token_urlsafe(24)
    server = ProxyServer()
    await server.start()
    try:
        with _bound(host, port):
            models = await server.listen_tcp(host, port)
        base_url = f"http://{advertise or host}:{models.port}"
        api = AdminApi(server, engine, base_url=base_url, token=token, sampling=sampling, limits=limits, store=store)
        with _bound(ADMIN_HOST, admin_port):
            admin = await _listen(api, admin_port)
        try:
            yield StandaloneProxy(base_url, f"http://{ADMIN_HOST}:{admin.port}", token)
        finally:
            await admin.close()
    finally:
        await server.close()


@contextmanager
def _bound(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ClawGymError(
            f"Expected a free port {port} of this machine's {host}, got: {why}. Choose another, or 0 for any free one."
        ) from error


async def until_stopped() -> None:
    """Wait for Ctrl-C or a SIGTERM, which is how a server ends."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        await stopped.wait()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _listen(api: AdminApi, port: int) -> Listener:
    async def on_close() -> None:
        """Nothing hangs on this listener."""

    sock = socket.create_server((ADMIN_HOST, port), backlog=128)
    sock.setblocking(False)
    return await Listener.open(make_config(api.app), sock, session=None, on_close=on_close)
