"""A running proxy for tests: a real socket, a scripted engine, and raw clients that can misbehave."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from clawgym_env.engine.base import Engine, Generation, SamplingParams, TokenIds
from clawgym_env.engine.scripted import Script, ScriptedEngine
from clawgym_env.messages import Completion
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.proxy.session import RolloutSession, SessionSettings
from clawgym_env.tasks.task import Limits

T = TypeVar("T")

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"


class GatedEngine(ScriptedEngine):
    """A scripted engine that waits for the test: `started` counts calls, `gate` lets them through."""

    def __init__(self, reply: Script = ("hello",), **options: Any) -> None:
        super().__init__(reply, **options)
        self.gate = asyncio.Event()
        self.started = 0
        self.cancelled = 0
        self.sampling: list[SamplingParams] = []

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        self.started += 1
        self.sampling.append(sampling)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_token_ids, sampling)


@dataclass
class Rig:
    server: ProxyServer
    port: int
    engine: Engine
    session: RolloutSession
    http: httpx.AsyncClient
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    def url(self, path: str = "", session: RolloutSession | None = None) -> str:
        return f"http://127.0.0.1:{self.port}/r/{(session or self.session).key}{path}"

    async def post(self, path: str, body: Any, session: RolloutSession | None = None) -> httpx.Response:
        return await self.http.post(self.url(path, session), json=body)

    async def send(self, path: str, body: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own and return its ends, nothing read yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers.append(writer)
        data = json.dumps(body).encode()
        head = f"POST /r/{self.session.key}{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        await writer.drain()
        return reader, writer


@asynccontextmanager
async def running(
    engine: Engine | None = None,
    *,
    limits: Limits = Limits(),
    settings: SessionSettings = SessionSettings(),
    **options: Any,
) -> AsyncIterator[Rig]:
    """Start a proxy with one session, reachable over TCP."""
    engine = engine or ScriptedEngine(["hello"])
    server = ProxyServer(settings=settings)
    await server.start()
    listener = await server.listen_tcp()
    session = server.open_session(engine, limits=limits, **options)
    async with httpx.AsyncClient(timeout=20.0) as http:
        rig = Rig(server, listener.port, engine, session, http)
        try:
            yield rig
        finally:
            for writer in rig.writers:
                writer.close()
            await server.close()


def completion(**changes: Any) -> Completion:
    """Return a small reply, for tests that only write it."""
    values: dict[str, Any] = {
        "id": "abc",
        "model": "policy",
        "content": "hello",
        "reasoning": None,
        "tool_calls": (),
        "finish_reason": "stop",
        "prompt_tokens": 7,
        "completion_tokens": 3,
    }
    return Completion(**{**values, **changes})


def ask(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """Return a body both dialects accept."""
    return {"model": "policy", "max_tokens": 512, "messages": [{"role": "user", "content": text}], **fields}


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something becomes true; a test that waits for ever is ended by the loop below."""
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("The condition did not come true within 10 s.")


def run(test: Callable[[], Awaitable[T]]) -> T:
    """Run an async test with a bound and return what it returns."""

    async def bounded() -> T:
        return await asyncio.wait_for(test(), 30.0)

    return asyncio.run(bounded())
