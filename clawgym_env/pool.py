"""Many rollouts at once: bounded concurrency, bounded retries of infrastructure, results in the order asked for.

The environments hand it `RolloutRequest`s and get `Rollout`s. Invariant: one bad rollout never cancels or delays its
siblings' results beyond their own end, and a retry is a fresh rollout with an id of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clawgym_env.grading.base import Grader
from clawgym_env.rollout import Rollout, StopReason, failure_rule
from clawgym_env.runner import RolloutRequest, Runner, ServedPolicy
from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.tasks.task import Limits

if TYPE_CHECKING:
    from clawgym_env.proxy.app import ProxyServer
    from clawgym_env.trace.store import RolloutStore

__all__ = ["RolloutPool", "RolloutRequest", "ServedPolicy"]


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
    ) -> None:
        if max_concurrency < 1:
            raise ValueError(f"Expected max_concurrency of at least 1, got {max_concurrency}.")
        self._backend = backend
        self._grader = grader
        self._cache = cache
        self._limits = limits
        self._store = store
        self._slots = asyncio.Semaphore(max_concurrency)
        self._runner: Runner | None = None
        self._proxy: ProxyServer | None = None

    async def run(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Run all requests and return their rollouts in the same order.

        Raises:
            HarnessNotInstalled: before anything was started.
        """
        runner = await self._started(requests)
        tasks = [asyncio.create_task(self._run_one(runner, request)) for request in requests]
        try:
            await asyncio.wait(tasks) if tasks else None
        finally:
            await _cancel(tasks)
        return [task.result() for task in tasks]

    async def as_completed(self, requests: Iterable[RolloutRequest]) -> AsyncIterator[Rollout]:
        """Yield rollouts as they finish; requests are drawn lazily, so that a slot is never idle and never early."""
        pending: set[asyncio.Task[Rollout]] = set()
        source = iter(requests)
        try:
            while True:
                while not self._slots.locked() or not pending:
                    request = next(source, None)
                    if request is None:
                        break
                    runner = await self._started([request])
                    await self._slots.acquire()
                    pending.add(asyncio.create_task(self._run_held(runner, request)))
                if not pending:
                    return
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    yield task.result()
        finally:
            await _cancel(pending)

    async def close(self) -> None:
        """End the proxy. Rollouts still running must have been cancelled before."""
        proxy, self._proxy, self._runner = self._proxy, None, None
        if proxy is not None:
            await proxy.close()

    async def _started(self, requests: Sequence[RolloutRequest]) -> Runner:
        """Fail early on what is not installed, and start the proxy at the first use."""
        for harness in {id(request.adapter): request.adapter for request in requests}.values():
            harness.mounts(self._cache)
        if self._runner is None:
            from clawgym_env.proxy.app import ProxyServer

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

    async def _run_one(self, runner: Runner, request: RolloutRequest) -> Rollout:
        await self._slots.acquire()
        return await self._run_held(runner, request)

    async def _run_held(self, runner: Runner, request: RolloutRequest) -> Rollout:
        """Run a request whose slot is held, trying infrastructure again within its rule."""
        try:
            while True:
                rollout = await runner.run(request)
                rule = failure_rule(rollout.stop_reason, len(rollout.tree))
                # A failed grader was tried again by the runner; running the harness again would change the sample.
                if rollout.stop_reason is StopReason.GRADER_ERROR or request.attempt >= rule.retries:
                    break
                request = dataclasses.replace(request, attempt=request.attempt + 1)
            if self._store is not None:
                await self._store.add_rollout(rollout)
            return rollout
        finally:
            self._slots.release()


async def _cancel(tasks: Collection[asyncio.Task[Rollout]]) -> None:
    """Cancel tasks and wait until each has closed its sandboxes."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
