"""Plays a recording against the live proxy as the harness would have: same bodies, its own ids put for the recorded.

Requests go out one after the other in the order in which the recording's server finished them, so sub-agents that ran
beside their parent are replayed between its calls: a request never comes before the reply it goes on from. Faults are
what this proxy lets a harness see of them: where the recorded server answered with an error or cut the line before a
byte, the client leaves while its call is being answered; where the line broke in mid-reply, the call is answered after
the client has left; a refused prompt is one that does not fit.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from recorded_policy import RecordedPolicy, is_object
from recordings import Call, Exchange, Recording, Reply
from wire_reading import read_error, read_reply

from clawgym_env.engine.base import SamplingParams
from clawgym_env.harness import HarnessAdapter
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.proxy.session import PendingCall, RolloutSession
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.prefix_tree import PrefixTree

OWN_HEADERS = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
"""Of the client's connection, not of the harness's request."""
UNLIMITED = Limits(max_calls=10_000, max_total_tokens=1 << 40)
WAIT_S = 30.0


@dataclass(frozen=True)
class Replayed:
    tree: PrefixTree
    policy: RecordedPolicy
    refused: int
    unknown_fields: frozenset[str]


@dataclass
class Player:
    """One harness at one session."""

    http: httpx.AsyncClient
    url: str
    session: RolloutSession
    policy: RecordedPolicy
    recording: Recording
    refused: int = 0
    _ours: dict[str, str] = field(default_factory=dict)
    """Recorded ids and marks to those of this proxy."""
    _told: dict[PendingCall, asyncio.Future[Reply]] = field(default_factory=dict)
    """Where the policy waits to be told what to say."""

    async def play(self) -> None:
        for position, exchange in enumerate(self.recording.exchanges):
            try:
                async with asyncio.timeout(WAIT_S):
                    await self._exchange(exchange, position)
            except BaseException as error:
                error.add_note(f"at request {exchange.number} of {self.recording.name}")
                raise

    async def _exchange(self, exchange: Exchange, position: int) -> None:
        if exchange.dialect is None:
            response = await self._send(exchange)
            assert response.status_code == 200
        elif exchange.reply is not None:
            await self._answered(exchange, exchange.reply)
        elif exchange.status == 400:
            await self._refused(exchange)
        else:
            await self._broken(exchange, position)

    async def _answered(self, exchange: Exchange, reply: Reply) -> None:
        assert exchange.dialect is not None
        sending = asyncio.create_task(self._send(exchange))
        call = await self._call_of(sending)
        if call is not None:
            self._tell(call, reply)
        response = await sending
        if call is not None:
            await eventually(lambda: call.waiters == 0)  # the proxy knows that the reply was delivered
        assert response.status_code == 200, response.text
        content_type = response.headers["content-type"]
        got = read_reply(exchange.dialect, content_type, response.content, stream=exchange.stream)
        assert_same_reply(got, reply)
        self._learn(reply, got)

    async def _refused(self, exchange: Exchange) -> None:
        assert exchange.dialect is not None
        window, self.session.context_length = self.session.context_length, 1
        response = await self._send(exchange)
        self.session.context_length = window
        assert response.status_code == 400
        read_error(exchange.dialect, 400, response.content)
        self.refused += 1

    async def _broken(self, exchange: Exchange, position: int) -> None:
        sending = asyncio.create_task(self._send(exchange))
        call = await self._call_of(sending)
        assert call is not None, "a call that nobody got an answer to cannot have been answered"
        sending.cancel()
        with suppress(asyncio.CancelledError):
            await sending
        await eventually(lambda: call.waiters == 0)
        if exchange.fault is not None and exchange.fault.startswith("midreset"):
            self._tell(call, self._next_reply(position))
            await eventually(lambda: call.completed.done())

    def _next_reply(self, position: int) -> Reply:
        """Return the turn the server had begun to send: the one it sent when asked again."""
        return next((e.reply for e in self.recording.exchanges[position:] if e.reply is not None), Reply("I will"))

    async def _send(self, exchange: Exchange) -> httpx.Response:
        headers = [(name, value) for name, value in exchange.headers if name.lower() not in OWN_HEADERS]
        content = None if exchange.body is None else json.dumps(self._echo(exchange.body)).encode()
        return await self.http.request(exchange.method, self.url + exchange.path, content=content, headers=headers)

    async def _call_of(self, sending: asyncio.Task[httpx.Response]) -> PendingCall | None:
        """Return the call that waits for the policy on behalf of this client; None when its answer was there already.

        Requests are sent one at a time, so it is the only call with somebody waiting.
        """

        def asking() -> PendingCall | None:
            call = next((call for call in self.session._pending if call.waiters), None)
            known = call in self._told or len(self.policy.waiting) > len(self._told)
            return call if known else None

        await eventually(lambda: sending.done() or asking() is not None)
        call = asking()
        if call is not None and call not in self._told:
            self._told[call] = self.policy.waiting[len(self._told)]
        return call

    def _tell(self, call: PendingCall, reply: Reply) -> None:
        """Let the policy answer a call, unless it has already for another client."""
        if not self._told[call].done():
            self._told[call].set_result(reply)

    def _learn(self, recorded: Reply, got: Reply) -> None:
        pairs = [(mark, got.marks[place]) for place, mark in recorded.marks.items() if place in got.marks]
        for old, new in zip(recorded.calls, got.calls, strict=True):
            if old.id:  # Gemini's have none, and its CLI makes some up
                pairs += [(old.id, new.id), (_bare(old.id), _bare(new.id))]
            if not is_object(old.arguments):
                pairs.append((old.arguments, new.arguments))
        self._ours.update(pairs)

    def _echo(self, value: Any) -> Any:
        """Put this proxy's ids for the recorded ones, wherever the harness sends them back."""
        if isinstance(value, dict):
            return {name: self._echo(item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._echo(item) for item in value]
        return self._ours.get(value, value) if isinstance(value, str) else value


def assert_same_reply(got: Reply, recorded: Reply) -> None:
    """What the harness is told is what the recorded server told it, but for ids."""
    assert got.text.strip() == recorded.text.strip()
    assert got.reasoning == recorded.reasoning
    assert got.cut == recorded.cut
    assert [_spelled(call) for call in got.calls] == [_spelled(call) for call in recorded.calls]
    assert len({_bare(call.id) for call in got.calls}) == len(got.calls)


def _spelled(call: Call) -> tuple[str, str, Any]:
    arguments = json.loads(call.arguments) if is_object(call.arguments) else call.arguments.strip()
    return call.namespace, call.name, arguments


def _bare(call_id: str) -> str:
    return "".join(filter(str.isalnum, call_id))


async def replay(recording: Recording, adapter: HarnessAdapter | None = None) -> Replayed:
    """Play a whole recording against a proxy of its own."""
    policy = RecordedPolicy()
    server = ProxyServer()
    await server.start()
    try:
        listener = await server.listen_tcp()
        session = server.open_session(policy, sampling=SamplingParams(), limits=UNLIMITED, adapter=adapter)
        url = f"http://127.0.0.1:{listener.port}/r/{session.key}"
        async with httpx.AsyncClient(timeout=WAIT_S, trust_env=False) as http:
            player = Player(http, url, session, policy, recording)
            await player.play()
            assert session.engine_error is None
            tree = await session.settle(quiet_s=0.0)
    finally:
        await server.close()
    return Replayed(tree, policy, player.refused, frozenset(session.unknown_fields))


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until something becomes true; the time limit of the exchange ends a wait in vain."""
    while not condition():  # noqa: ASYNC110 (what is waited for is inside the proxy, which has no event for a test)
        await asyncio.sleep(0.001)
