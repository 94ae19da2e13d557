"""What runs rollouts behind both environments and the command line.

Turns the keywords of `gym.make` into tasks, harnesses, policies, a sandbox backend and a grader, and opens a pool and
a store at the first rollout. Synchronous outside, asynchronous inside (one shared background loop). Invariant: making
one starts nothing and needs nothing installed, and `close` leaves nothing behind but the run directory.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from clawgym_env import registry
from clawgym_env._loop import shared_loop
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.envs.arms import DEFAULT_POLICY as DEFAULT_POLICY  # beside the other default
from clawgym_env.envs.arms import Arms
from clawgym_env.envs.arms import Policies as Policies
from clawgym_env.envs.sampler import Draw, GroupSampler
from clawgym_env.grading.base import GraderLike
from clawgym_env.grading.judge import Judge, JudgeLike
from clawgym_env.grading.task_grader import TaskGrader, as_grader
from clawgym_env.harness import HarnessAdapter
from clawgym_env.pool import RolloutPool, RolloutRequest, ServedPolicy
from clawgym_env.rollout import Rollout
from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.tasks.loading import load_tasks
from clawgym_env.tasks.task import Limits, TaskSet, TasksLike

if TYPE_CHECKING:
    from clawgym_env.policy import Policy
    from clawgym_env.trace.store import RolloutStore

logger = logging.getLogger(__name__)

HarnessLike: TypeAlias = Union[
    str, HarnessAdapter, Sequence["str | HarnessAdapter"], Mapping["str | HarnessAdapter", float]
]
"""A name ("claude-code?bare"), an import path, an adapter, or several to draw from, by weight where a mapping."""
SandboxLike: TypeAlias = Union[str, SandboxBackend]

DEFAULT_TASKS = "bundled"
JUDGE_CACHE = Path("cache", "judge")
"""In the run directory: what a judge was paid for is not asked again when a run goes on."""


class RolloutService:
    """Runs rollouts for whoever draws them. Keywords as in `gym.make`."""

    def __init__(
        self,
        *,
        tasks: TasksLike = DEFAULT_TASKS,
        harness: HarnessLike = "mini",
        policy: str | Path | Policy | None = None,
        engine: str | Engine | None = None,
        policies: Policies | None = None,
        sampling: SamplingParams | Mapping[str, float] | None = None,
        sandbox: SandboxLike = "local",
        grader: GraderLike | None = None,
        judge: JudgeLike | None = None,
        limits: Limits | Mapping[str, float] | None = None,
        run_dir: str | Path | None = None,
        max_concurrency: int = 1,
    ) -> None:
        self.tasks = load_tasks(tasks)
        several = [harness] if isinstance(harness, str | HarnessAdapter) else harness
        self.harnesses = tuple(map(registry.adapter, several))
        self._harness_weights = list(several.values()) if isinstance(several, Mapping) else None
        self._arms = Arms(
            policies, policy=policy, engine=engine, sampling=SamplingParams.model_validate(sampling or {})
        )
        self._sandbox = sandbox
        self._judge = None if judge is None else Judge.parse(judge)
        if self._judge is not None and run_dir is not None:
            self._judge.keep_in(Path(run_dir) / JUDGE_CACHE)
        self._grader = as_grader(grader, judge=self._judge)
        self._limits = None if limits is None else Limits.model_validate(limits)
        self._run_dir = None if run_dir is None else Path(run_dir)
        self.max_concurrency = max_concurrency
        self._reuse_finished = False
        self._pool: RolloutPool | None = None
        self._store: RolloutStore | None = None
        self.closed = False

    def sampler(self) -> GroupSampler:
        """Return what draws groups from the tasks and harnesses.

        Raises:
            ValueError: there are none, or the weights of the harnesses are no positive numbers.
        """
        return GroupSampler(self.tasks, self.harnesses, weights=self._harness_weights)

    @property
    def policy_names(self) -> tuple[str, ...]:
        """The arms of the action, in order."""
        return self._arms.names

    @property
    def harness_names(self) -> tuple[str, ...]:
        """The harnesses, in order."""
        return tuple(adapter.name for adapter in self.harnesses)

    def check_harness(self, harness: int) -> int:
        """Return the index of a harness as it is.

        Raises:
            ValueError: there is none; the message lists them.
        """
        if not 0 <= harness < len(self.harnesses):
            names = ", ".join(f"{index} ({name})" for index, name in enumerate(self.harness_names))
            raise ValueError(f"Expected a harness out of {names}, got {harness}.")
        return harness

    @property
    def run_dir(self) -> Path | None:
        """Where every call and rollout is stored."""
        return self._run_dir

    @property
    def store(self) -> RolloutStore | None:
        """The run directory's store, open from the first rollout on; None without a run directory."""
        return self._store

    def reuse_finished(self) -> None:
        """From the first rollout on, load those the run directory holds finished instead of running them again.

        Raises:
            RuntimeError: rollouts ran already.
        """
        if self._pool is not None:
            raise RuntimeError("Expected new environments to go on with a run, got some that ran already.")
        self._reuse_finished = True

    def open_store(self) -> RolloutStore | None:
        """Open the run directory's store before the first rollout does; None without a run directory."""
        if self._run_dir is not None and self._store is None:
            from clawgym_env.trace.store import RolloutStore

            self._store = RolloutStore(self._run_dir)
        return self._store

    def request(self, draw: Draw, *, policy: int = 0, index: int = 0) -> RolloutRequest:
        """Return the order for member `index` of a drawn group.

        Raises:
            HarnessNotInstalled, PolicyNotBuilt, MissingPackage: with the command to run.
            HarnessUnsuitable: the harness plays solutions, and none is known.
            JudgeMissing: the task is graded by a judge; with the keyword to give.
        """
        if isinstance(self._grader, TaskGrader):
            self._grader.check(draw.task)
        adapter = self.harnesses[draw.harness]
        if adapter.plays_solutions:
            adapter = adapter.knowing(self.tasks.solution(draw.task) if isinstance(self.tasks, TaskSet) else None)
        adapter.mounts(cache_dir())  # A missing harness shows here, before a policy is loaded for seconds.
        return RolloutRequest(
            task=draw.task,
            adapter=adapter,
            served=self.served(policy),
            group_id=draw.group_id,
            index=index,
            seed=draw.rollout_seed(index),
        )

    def served(self, policy: int = 0) -> ServedPolicy:
        """Return an arm with its engine, loading it at the first use.

        Raises:
            PolicyNotBuilt: with the command to run.
        """
        return self._arms.served(policy)

    def run(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Run all requests; their rollouts come in the same order. Ctrl-C closes every sandbox, then raises."""
        return shared_loop().run(self.running(requests))

    def running(self, requests: Sequence[RolloutRequest]) -> Coroutine[Any, Any, list[Rollout]]:
        """Return what `run` waits for, to be awaited on the shared loop; cancelled, it closes every sandbox."""
        return self._open().run(requests)

    def as_completed(self, requests: Iterable[RolloutRequest]) -> Generator[Rollout, None, None]:
        """Yield rollouts as they finish, drawing requests as slots fall free.

        Others keep running while the caller works on one. Ending the iteration early cancels them.
        """
        loop, stream = shared_loop(), self._open().as_completed(requests)
        try:
            while (rollout := loop.run(_next(stream))) is not None:
                yield rollout
        finally:
            loop.run(_finish(stream))

    def close(self) -> None:
        """End the proxy, the engines made here and the store. Idempotent."""
        if self.closed:
            return
        self.closed = True
        pool, self._pool = self._pool, None
        if pool is not None or self._arms.open:
            shared_loop().run(_close(pool, self._arms))
        if self._store is not None:
            self._store.close()
        if self._judge is not None:
            logger.info("Judge %s was asked: %s", self._judge.model, self._judge.usage)

    def _open(self) -> RolloutPool:
        if self.closed:
            raise RuntimeError("Expected an open environment, got a closed one. Make a new one.")
        if self._pool is None:
            self.open_store()
            self._pool = RolloutPool(
                backend=registry.backend(self._sandbox),
                grader=self._grader,
                cache=cache_dir(),
                max_concurrency=self.max_concurrency,
                limits=self._limits,
                store=self._store,
                reuse_finished=self._reuse_finished,
            )
        return self._pool


async def _next(stream: AsyncIterator[Rollout]) -> Rollout | None:
    return await anext(stream, None)


async def _finish(stream: AsyncIterator[Rollout]) -> None:
    close = getattr(stream, "aclose", None)
    if close is not None:
        await close()


async def _close(pool: RolloutPool | None, arms: Arms) -> None:
    if pool is not None:
        await pool.close()
    await arms.close()
