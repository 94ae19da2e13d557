"""The connections on which calls of rollouts wait for their answers, one set for each event loop.

`VllmEngine` chooses the server and reads what comes back; here a call waits for its turn, is watched, and is given up.
Invariant: a call that ends, however it ends, holds no connection, so that the server aborts what it still samples.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from dataclasses import dataclass, field

import httpx

from clawgym_env.engine.vllm.errors import ServerLost
from clawgym_env.engine.vllm.replicas import Replica
from clawgym_env.engine.vllm.server import CONNECT_S, raise_for_status
from clawgym_env.engine.vllm.wire import GENERATE, Choice, read_choice
from clawgym_env.errors import EngineError

WATCH_S = 60.0
"""A server that has been silent for so long on a call is asked whether it lives."""
UNAVAILABLE = (502, 503, 504)
GIVEN_UP = "Expected an answer, but the call was given up: look for what failed before, or for who closed the engine."


@dataclass(slots=True, eq=False)
class _Lane:
    """What belongs to one event loop."""

    client: httpx.AsyncClient
    turns: defaultdict[str, asyncio.Semaphore]
    """By server."""
    tasks: set[asyncio.Task[httpx.Response]] = field(default_factory=set)


class Calls:
    """Calls in flight.

    Args:
        max_concurrency: at one server; more wait for their turn.
    """

    def __init__(self, max_concurrency: int) -> None:
        self._max_concurrency = max_concurrency
        self._lanes: dict[asyncio.AbstractEventLoop, _Lane] = {}
        self._given_up = 0
        """Counts the times that all calls were given up, those too that wait for their turn."""
        self._guard = threading.Lock()

    async def ask(self, replica: Replica, body: bytes) -> Choice:
        """Post one call and wait for its answer; the clock of a rollout is the runner's.

        Raises:
            ServerLost: the server is gone, or answers its health check no more.
            EngineError: it refuses, or answers something else.
        """
        lane = self._lane()
        before = self._given_up
        replica.in_flight += 1
        try:
            async with lane.turns[replica.server.url]:
                if self._given_up != before:
                    raise EngineError(GIVEN_UP)
                response = await self._watched(lane, replica, body)
        finally:
            replica.in_flight -= 1
        if response.status_code in UNAVAILABLE:
            raise ServerLost(f"Expected an answer from {replica.server.url}, got {response.status_code}.")
        raise_for_status(response, replica.server.url)
        return read_choice(response.content)

    def cancel(self) -> None:
        """Give up all calls; each is raised as an `EngineError`. From any thread."""
        self._given_up += 1
        for loop, lane in self._open_lanes():
            loop.call_soon_threadsafe(_cancel, lane)

    async def close(self) -> None:
        """Give up all calls and close the connections."""
        self._given_up += 1
        for loop, lane in self._open_lanes():
            if loop is asyncio.get_running_loop():
                await _close(lane)
            else:
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_close(lane), loop))
        self._lanes.clear()

    def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        with self._guard:
            for other in [other for other in self._lanes if other.is_closed()]:
                del self._lanes[other]
            if loop not in self._lanes:
                client = httpx.AsyncClient(
                    timeout=httpx.Timeout(None, connect=CONNECT_S),
                    # None is kept: a call takes far longer than to connect, and vLLM closes idle ones unannounced.
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                    trust_env=False,
                )
                self._lanes[loop] = _Lane(client, defaultdict(lambda: asyncio.Semaphore(self._max_concurrency)))
            return self._lanes[loop]

    def _open_lanes(self) -> list[tuple[asyncio.AbstractEventLoop, _Lane]]:
        with self._guard:
            return [(loop, lane) for loop, lane in self._lanes.items() if loop.is_running()]

    async def _watched(self, lane: _Lane, replica: Replica, body: bytes) -> httpx.Response:
        server = replica.server
        request = lane.client.post(server.url + GENERATE, content=body, headers={"content-type": "application/json"})
        task = asyncio.ensure_future(request)
        lane.tasks.add(task)
        try:
            while not (await asyncio.wait({task}, timeout=WATCH_S))[0]:
                if not await asyncio.to_thread(server.healthy):
                    raise ServerLost(f"Expected {server.url}/health to answer during a call, got no 200.")
            if task.cancelled():
                raise EngineError(GIVEN_UP)
            return task.result()
        except httpx.TransportError as error:
            raise ServerLost(
                f"Expected an answer from the vLLM server at {server.url}, got {type(error).__name__}: {error}."
            ) from error
        finally:
            lane.tasks.discard(task)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})


def _cancel(lane: _Lane) -> None:
    for task in lane.tasks:
        task.cancel()


async def _close(lane: _Lane) -> None:
    _cancel(lane)
    await lane.client.aclose()
