"""Many rollouts at once: bounded concurrency, bounded retries of infrastructure, results in the order asked for.

The environments hand it `RolloutRequest`s and get `Rollout`s. Invariant: one bad rollout never cancels or delays its
siblings' results beyond their own end, and a retry is a fresh rollout with an id of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from clawgym_env.grading.base import Grader
from clawgym_env.rollout import Rollout, StopReason, failure_rule
from clawgym_env.runner import RolloutRequest, Runner, ServedPolicy, policy_asked, slot_of
from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.sandbox.reaper import reap
from clawgym_env.tasks.task import Limits

if TYPE_CHECKING:
    from clawgym_env.proxy.app import ProxyServer
    from clawgym_env.trace.store import RolloutStore

logger = logging.getLogger(__name__)

__all__ = ["RolloutPool", "RolloutRequest", "ServedPolicy"]

T = TypeVar("T")


class RolloutPool:
    """Runs rollouts, at most `max_concurrency` sandboxed harnesses alive at once. Used from one event loop."""

    def __init__(
        self,
        *,
        backend: SandboxBackend,
        grader: Grader,
        cache: Path,
        max_concurrency: int,
        limits: Limits | None = None,
        store: RolloutStore | None = None,
        reuse_finished: bool = False,
    ) -> None:
        """Open nothing yet.

        Args:
            reuse_finished: load what the store holds finished already instead of running it again. For a run that goes
                on: a rollout is known by its group and index, whatever policy answered. One without a grade, which no
                batch has taken, is run again.
        """
        if max_concurrency < 1:
            raise ValueError(f"Expected max_concurrency of at least 1, got {max_concurrency}.")
        self._backend = backend
        self._grader = grader
        self._cache = cache
        self._limits = limits
        self._store = store
        self._finished = _finished(store) if store is not None and reuse_finished else {}
        self._max_concurrency = max_concurrency
        self._slots = asyncio.Semaphore(max_concurrency)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._starting = asyncio.Lock()
        self._runner: Runner | None = None
        self._proxy: ProxyServer | None = None

    async def run(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Run all requests and return their rollouts in the same order.

        Raises:
            HarnessNotInstalled, HarnessUnsuitable: before anything was started.
        """
        for request in requests:
            request.equipment(self._cache)
        runner = await self._started()
        tasks = [self._spawn(self._run_one(runner, request)) for request in requests]
        try:
            await asyncio.wait(tasks) if tasks else None
        finally:
            await _cancel(tasks)
        return [task.result() for task in tasks]

    async def as_completed(self, requests: Iterable[RolloutRequest]) -> AsyncIterator[Rollout]:
        """Yield rollouts as they finish.

        `max_concurrency` workers draw requests and go on while the caller works on a rollout, but never more than
        `max_concurrency` finished ones wait for it: what runs too far ahead of the learner is stale. Ends early when
        the pool is closed.

        Raises:
            HarnessNotInstalled, HarnessUnsuitable: when such a request is drawn; what already runs is finished first.
        """
        runner, source = await self._started(), iter(requests)
        finished: asyncio.Queue[Rollout | None] = asyncio.Queue()
        room = asyncio.Semaphore(self._max_concurrency)

        async def work() -> None:
            for request in source:
                request.equipment(self._cache)
                rollout = await self._run_one(runner, request)
                await room.acquire()
                finished.put_nowait(rollout)

        async def feed() -> None:
            workers = [self._spawn(work()) for _ in range(self._max_concurrency)]
            try:
                await asyncio.wait(workers)
            finally:
                await _cancel(workers)
            for worker in workers:
                worker.result()

        feeder = self._spawn(feed())
        feeder.add_done_callback(lambda _: finished.put_nowait(None))
        try:
            while (rollout := await finished.get()) is not None:
                room.release()
                yield rollout
            if not feeder.cancelled():
                feeder.result()
        finally:
            await _cancel([feeder])

    async def close(self) -> None:
        """Cancel what still runs, wait until its sandboxes are closed, end the proxy and reap. Idempotent."""
        await _cancel(list(self._tasks))
        proxy, self._proxy, self._runner = self._proxy, None, None
        if proxy is not None:
            await proxy.close()
            await reap([self._backend])

    async def _started(self) -> Runner:
        """At the first use, remove what earlier runs left and start the proxy."""
        async with self._starting:
            if self._runner is None:
                from clawgym_env.proxy.app import ProxyServer

                await reap([self._backend])
                self._proxy = proxy = ProxyServer()
                await proxy.start()
                self._runner = Runner(
                    backend=self._backend,
                    grader=self._grader,
                    proxy=proxy,
                    cache=self._cache,
                    limits=self._limits,
                    store=self._store,
                )
            return self._runner

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _run_one(self, runner: Runner, request: RolloutRequest) -> Rollout:
        """Run a request when a slot is free, trying infrastructure again within its rule."""
        async with self._slots:
            for stored in self._finished.get(request.slot, ()):
                if (rollout := await asyncio.to_thread(stored)) is not None:
                    return rollout
            while True:
                rollout = await runner.run(request)
                rule = failure_rule(rollout.stop_reason, policy_asked=policy_asked(request, rollout.tree))
                # A failed grader was tried again by the runner; running the harness again would change the sample.
                last = rollout.stop_reason is StopReason.GRADER_ERROR or request.attempt >= rule.retries
                if last or not request.repeatable():
                    break
                logger.warning(
                    "Rollout %s stopped after %.0f s (%s: %s): attempt %d of %d",
                    rollout.id,
                    rollout.timing.get("total", 0.0),
                    rollout.stop_reason.value,
                    rollout.error.strip().rpartition("\n")[2],
                    request.attempt + 2,
                    rule.retries + 1,
                )
                request = dataclasses.replace(request, attempt=request.attempt + 1)
            if self._store is not None:
                await self._store.add_rollout(rollout)
            return rollout


def _finished(store: RolloutStore) -> Mapping[str, Sequence[Callable[[], Rollout | None]]]:
    """Return what loads the finished attempts at each place in the run; None from one that is to be made again."""
    used = {rollout_id for batch in store.batches().values() for rollout_id in batch}

    def load(rollout_id: str) -> Rollout | None:
        rollout = store.load(rollout_id)
        return rollout if rollout.graded or rollout_id in used else None

    found: dict[str, list[Callable[[], Rollout | None]]] = {}
    for rollout_id in store.rollout_ids():
        found.setdefault(slot_of(rollout_id), []).append(functools.partial(load, rollout_id))
    return found


async def _cancel(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until each has closed its sandboxes."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
