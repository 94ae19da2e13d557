"""One rollout from start to end: open, fill, run, settle, copy out, grade, close. The only orchestration there is.

The pool calls `Runner.run`; adapters, proxy, sandbox and grader know nothing of each other. All time limits of a
rollout sit here. Invariant: whatever happens comes back as a `Rollout` with a stop reason, and every sandbox opened
here is closed here, on cancellation too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clawgym_env import registry
from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.errors import GraderError, HarnessError, HarnessNotInstalled, HarnessUnsuitable, SandboxError
from clawgym_env.grading.base import Grade, Grader, Outcome
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.rollout import Exclusion, FailureRule, Rollout, StopReason, failure_rule
from clawgym_env.sandbox.base import Mount, Sandbox, SandboxBackend, SandboxSpec
from clawgym_env.scratch import scratch_folder
from clawgym_env.tasks.git_history import scrub_history
from clawgym_env.tasks.task import Limits, McpServer, Task, Turn
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from clawgym_env.proxy.app import ProxyServer
    from clawgym_env.proxy.session import RolloutSession
    from clawgym_env.trace.store import RolloutStore

logger = logging.getLogger(__name__)

PROXY_PORT = 8080
"""The same in every sandbox: each has a network namespace of its own."""
MODEL_NAME = "policy"
OUTPUT_LIMIT = 64 << 10
LIFETIME_SLACK_S = 900.0
"""Of a sandbox, for filling, settling, copying and waiting for a slow engine, before the reaper may take it."""
PROBE_S = 10.0
"""How long a sandbox may take to show that it lives."""
SETTLE_QUIET_S = 0.05
"""Short: every process that could make a call is dead by then, only what is already in flight can still arrive."""


@dataclass(frozen=True, slots=True)
class ServedPolicy:
    """A named model and how it is sampled: one arm of the rollout clock's action."""

    name: str
    engine: Engine
    sampling: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True, slots=True)
class Equipment:
    """What a rollout needs in its sandbox beside the task's files."""

    mounts: tuple[Mount, ...]
    mcp_servers: tuple[McpServer, ...]
    """The task's, with the commands of bundled ones filled in."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """What to run."""

    task: Task
    adapter: HarnessAdapter
    served: ServedPolicy
    group_id: str
    index: int
    """Position in the group."""
    seed: int
    attempt: int = 0
    """Counts retries of infrastructure."""
    repeatable: Callable[[], bool] = lambda: True
    """Asked before infrastructure is tried again: what somebody outside has begun to answer cannot begin anew."""

    def equipment(self, cache: Path) -> Equipment:
        """Return what the sandbox must show beside the task's files.

        Raises:
            HarnessNotInstalled: with the command to run.
            HarnessUnsuitable: the task has MCP servers or goes on with a session, and the harness cannot.
        """
        if refusal := self.adapter.refusal(self.task):
            raise HarnessUnsuitable(refusal)
        servers = self.task.mcp_servers
        mounts = list(self.adapter.mounts(cache))
        ready = []
        for server in servers:
            program, *arguments = server.command
            if program.startswith(registry.BUNDLED):
                bundled = registry.bundled_server(program.removeprefix(registry.BUNDLED))
                mounts += [mount for mount in bundled.mounts(cache) if mount not in mounts]
                server = server.model_copy(update={"command": (*bundled.argv, *arguments)})
            ready.append(server)
        return Equipment(tuple(mounts), tuple(ready))

    @property
    def slot(self) -> str:
        """The place in the run, which its attempts share."""
        return f"{self.group_id}/{self.index}"

    @property
    def rollout_id(self) -> str:
        return f"{self.slot}~{self.attempt}" if self.attempt else self.slot


def slot_of(rollout_id: str) -> str:
    """Return the place in the run of a rollout, given the id of any attempt at it."""
    group_id, slash, member = rollout_id.rpartition("/")
    return group_id + slash + member.partition("~")[0]


def group_of(rollout_id: str) -> str:
    """Return the group of a rollout, given its id."""
    return rollout_id.rpartition("/")[0]


@dataclass(slots=True)
class _Progress:
    """What is known of a rollout so far; survives an exception in the middle of it."""

    started: float = field(default_factory=time.monotonic)
    timing: dict[str, float] = field(default_factory=dict)
    tree: PrefixTree = field(default_factory=PrefixTree)
    rewritten_calls: int = 0
    exit: HarnessExit | None = None
    stdout: bytes = b""
    """Of all turns, the end of it."""
    stderr: bytes = b""
    outcome: Outcome = field(default_factory=Outcome)
    grade: Grade | None = None
    stop_reason: StopReason = StopReason.COMPLETED
    error: str = ""

    def stop(self, reason: StopReason, error: str = "") -> None:
        self.stop_reason, self.error = reason, error

    def keep_output(self, exit: HarnessExit) -> None:
        self.stdout = (self.stdout + exit.stdout)[-OUTPUT_LIMIT:]
        self.stderr = (self.stderr + exit.stderr)[-OUTPUT_LIMIT:]


class Runner:
    """Runs rollouts with one sandbox backend, grader and proxy; safe to use concurrently."""

    def __init__(
        self,
        *,
        backend: SandboxBackend,
        grader: Grader,
        proxy: ProxyServer,
        cache: Path,
        limits: Limits | None = None,
        store: RolloutStore | None = None,
    ) -> None:
        self._backend = backend
        self._grader = grader
        self._proxy = proxy
        self._cache = cache
        self._limits = limits
        self._store = store

    async def run(self, request: RolloutRequest) -> Rollout:
        """Run one rollout; a failure is part of the result.

        Raises:
            HarnessNotInstalled, HarnessUnsuitable: nothing was started.
        """
        progress = _Progress()
        limits = self._limits or request.task.limits
        async with scratch_folder() as workspace:
            try:
                await self._run_harness(request, limits, workspace, progress)
                if _rule(request, progress).graded and progress.grade is None:
                    progress.grade = await self._grade(request, limits, workspace, progress)
            except (HarnessNotInstalled, HarnessUnsuitable):
                raise
            except GraderError as error:
                progress.stop(StopReason.GRADER_ERROR, str(error))
            except (SandboxError, OSError) as error:
                progress.stop(StopReason.SANDBOX_ERROR, f"{type(error).__name__}: {error}")
            except Exception:  # a bug of ours must not cost the siblings their rollouts
                logger.exception("Rollout %s failed", request.rollout_id)
                progress.stop(StopReason.SANDBOX_ERROR, traceback.format_exc())
        progress.timing["total"] = time.monotonic() - progress.started
        return _rollout(request, progress)

    async def _run_harness(self, request: RolloutRequest, limits: Limits, workspace: Path, progress: _Progress) -> None:
        """Let the harness work on the task, then grade in its sandbox or copy what it leaves to `workspace`."""
        task, adapter, served = request.task, request.adapter, request.served
        equipment = request.equipment(self._cache)
        spec = _spec(task, limits, memory_mb=max(task.memory_mb, adapter.memory_mb), mounts=equipment.mounts)
        clock = time.monotonic()
        sandbox = await self._backend.open(spec)
        try:
            for file in task.files:
                data = await asyncio.to_thread(file.read) if file.source else file.read()
                await sandbox.write_file(f"{task.workdir}/{file.path}", data, mode=0o755 if file.executable else 0o644)
            if not task.keep_git_history:
                await scrub_history(sandbox, task)
            session = self._proxy.open_session(
                engine=served.engine,
                sampling=served.sampling,
                limits=limits,
                adapter=adapter,
                seed=request.seed,
                on_call=self._recorder(request.rollout_id),
            )
            try:
                listener = await self._proxy.serve(await sandbox.listen(PROXY_PORT), session)
            except BaseException:  # no listener will close it
                await asyncio.shield(session.close())
                raise
            clock = _lap(progress, "open", clock)
            try:
                context = HarnessContext(
                    instruction=task.instruction,
                    base_url=f"http://127.0.0.1:{PROXY_PORT}/r/{session.key}",
                    api_key="sk-dummy",
                    model=MODEL_NAME,
                    workdir=task.workdir,
                    context_length=served.engine.context_length,
                    max_tokens=served.sampling.max_tokens,
                    wall_clock_s=limits.wall_clock_s,
                    seed=request.seed,
                    mcp_servers=equipment.mcp_servers,
                )
                await _until_over(sandbox, adapter, context, task.turns, session, progress)
                clock = _lap(progress, "harness", clock)
                await sandbox.kill_all()
                progress.tree = await session.settle(quiet_s=SETTLE_QUIET_S)
                progress.rewritten_calls = session.num_rewritten_calls
                response = progress.exit.response if progress.exit is not None else ""
                progress.outcome = Outcome(response, session.conversation())
                _blame(request, session, progress, wall_clock_s=limits.wall_clock_s)
            finally:
                await asyncio.shield(listener.close())
            clock = _lap(progress, "settle", clock)
            if task.grade_in == "fresh":
                await sandbox.copy_out(task.workdir, workspace)
            elif _rule(request, progress).graded:
                progress.grade = await self._grade_here(request, limits, sandbox, progress)
        finally:
            await sandbox.close()

    async def _grade(self, request: RolloutRequest, limits: Limits, workspace: Path, progress: _Progress) -> Grade:
        """Score a copy of the workspace in a fresh sandbox, trying again within the rule.

        Whatever fails here is the grading's failure: running the harness again would change the sample.
        """
        clock = time.monotonic()
        spec = _spec(request.task, limits)
        task = request.task.model_copy(update={"limits": limits})
        failure = ""
        for _ in range(failure_rule(StopReason.GRADER_ERROR, policy_asked=True).retries + 1):
            try:
                sandbox = await self._backend.open(spec)
                try:
                    await sandbox.copy_in(workspace, spec.workdir)
                    return await self._grader.grade(task, sandbox, progress.outcome)
                finally:
                    await sandbox.close()
            except (GraderError, SandboxError, OSError) as error:
                failure = str(error)
            except Exception:
                logger.exception("Grading %s failed", request.rollout_id)
                failure = traceback.format_exc()
            finally:
                _lap(progress, "grade", clock)
        raise GraderError(failure)

    async def _grade_here(
        self, request: RolloutRequest, limits: Limits, sandbox: Sandbox, progress: _Progress
    ) -> Grade:
        """Score the agent's own sandbox, once: a second try would find what the first left."""
        clock = time.monotonic()
        task = request.task.model_copy(update={"limits": limits})
        try:
            return await self._grader.grade(task, sandbox, progress.outcome)
        except (GraderError, SandboxError, OSError) as error:
            raise GraderError(str(error)) from error
        except Exception as error:
            logger.exception("Grading %s failed", request.rollout_id)
            raise GraderError(traceback.format_exc()) from error
        finally:
            _lap(progress, "grade", clock)

    def _recorder(self, rollout_id: str) -> Callable[[ModelCall], Awaitable[None]] | None:
        return None if self._store is None else functools.partial(self._store.add_call, rollout_id)


async def _until_over(
    sandbox: Sandbox,
    adapter: HarnessAdapter,
    context: HarnessContext,
    turns: Sequence[Turn],
    session: RolloutSession,
    progress: _Progress,
) -> None:
    """Wait for the harness's own end, a spent budget or the wall clock, whichever comes first."""
    harness = asyncio.ensure_future(_converse(sandbox, adapter, context, turns, session, progress))
    try:
        waited: set[asyncio.Future[Any]] = {harness, session.exhausted}
        done, _ = await asyncio.wait(waited, timeout=context.wall_clock_s, return_when=asyncio.FIRST_COMPLETED)
        if harness in done:
            await _judge_exit(harness, sandbox, progress)
        elif session.exhausted in done:
            progress.stop(session.exhausted.result())
        else:
            progress.stop(StopReason.WALL_CLOCK)
    finally:
        while not harness.done():  # an adapter may lose a cancellation, as `asyncio.wait_for` does on Python 3.11
            harness.cancel()
            await asyncio.wait({harness}, timeout=1.0)


async def _converse(
    sandbox: Sandbox,
    adapter: HarnessAdapter,
    context: HarnessContext,
    turns: Sequence[Turn],
    session: RolloutSession,
    progress: _Progress,
) -> HarnessExit:
    """Say what the user says, turn by turn, while the harness comes to its own end in good order.

    Returns:
        The end of the last turn that was begun.

    Raises:
        HarnessError: a later turn reached no model, whatever the exit code says.
    """
    context = dataclasses.replace(context, resumable=any(not turn.new_session for turn in turns))
    exit = await adapter.run(sandbox, context)
    progress.keep_output(exit)
    for number, turn in enumerate(turns, start=2):
        if exit.timed_out or exit.exit_code != 0:
            break
        context = dataclasses.replace(
            context,
            instruction=turn.text,
            session=context.session + turn.new_session,
            resume=not turn.new_session,
        )
        calls = session.num_calls
        exit = await adapter.run(sandbox, context)
        progress.keep_output(exit)
        if adapter.calls_model and exit.exit_code == 0 and session.num_calls == calls:
            raise HarnessError(f"Expected the harness to ask the model in turn {number}, got its end without a call.")
    return exit


async def _judge_exit(harness: asyncio.Future[HarnessExit], sandbox: Sandbox, progress: _Progress) -> None:
    """Say how a harness that is over ended; calls it made before an error are kept and graded."""
    try:
        progress.exit = harness.result()
    except SandboxError:
        raise
    except HarnessError as error:
        progress.stop(StopReason.HARNESS_ERROR, str(error))
        return
    except Exception:
        logger.exception("A harness adapter failed")
        progress.stop(StopReason.HARNESS_ERROR, traceback.format_exc())
        return
    if progress.exit.timed_out:
        progress.stop(StopReason.WALL_CLOCK)
    elif progress.exit.exit_code != 0:
        # Raises SandboxError where the harness is not to blame. No wall clock runs any more, and what an agent may have
        # put in place of `true` need not end.
        await sandbox.exec(["true"], timeout_s=PROBE_S)
        progress.stop(StopReason.HARNESS_ERROR, f"The harness exited with code {progress.exit.exit_code}.")


def _blame(request: RolloutRequest, session: RolloutSession, progress: _Progress, *, wall_clock_s: float) -> None:
    """Let what the proxy saw overrule how the harness says it ended: its exit code is not trusted."""
    ended_by_itself = progress.stop_reason in (StopReason.COMPLETED, StopReason.HARNESS_ERROR)
    if session.engine_error is not None:
        progress.stop(StopReason.ENGINE_ERROR, str(session.engine_error))
    elif ended_by_itself and (session.overflowed or session.window_cut):
        progress.stop(StopReason.CONTEXT_LENGTH, progress.error)
    if not policy_asked(request, progress.tree):
        if progress.stop_reason is StopReason.COMPLETED:
            progress.stop(StopReason.HARNESS_ERROR, "The harness ended without asking the model for the task.")
        elif progress.stop_reason is StopReason.CONTEXT_LENGTH:
            progress.error = (
                f"Expected a first prompt within the policy's {session.context_length} tokens, got a longer one."
            )
        elif progress.stop_reason is StopReason.WALL_CLOCK:
            got = "none" if session.last_request_at is not None else "no request from the harness"
            progress.error = (
                f"Expected a reply to the task within {wall_clock_s:g} s, got {got}. "
                "Give more wall clock, or run fewer rollouts at once."
            )


def policy_asked(request: RolloutRequest, tree: PrefixTree) -> bool:
    """Whether the policy was asked for the task itself, or the harness calls no model by design.

    A title or a summary alone is no answer to the task: its untouched workspace would be graded.
    """
    asked = any(call.kind not in ("compaction", "auxiliary") for call in tree)
    return asked or not request.adapter.calls_model


def _spec(task: Task, limits: Limits, *, memory_mb: int | None = None, mounts: tuple[Mount, ...] = ()) -> SandboxSpec:
    """Return the sandbox of a task, for its harness or its grader."""
    return SandboxSpec(
        workdir=task.workdir,
        image=task.image,
        folders=task.folders,
        memory_mb=memory_mb or task.memory_mb,
        cpus=task.cpus,
        disk_mb=task.disk_mb,
        mounts=(*task.mounts, *mounts),
        env=task.env,
        lifetime_s=limits.wall_clock_s + limits.grader_s + LIFETIME_SLACK_S,
    )


def _rule(request: RolloutRequest, progress: _Progress) -> FailureRule:
    return failure_rule(progress.stop_reason, policy_asked=policy_asked(request, progress.tree))


def _rollout(request: RolloutRequest, progress: _Progress) -> Rollout:
    exclusion: Exclusion | None = None
    if progress.grade is None:
        exclusion = "ungraded"
    elif progress.tree.relayed:
        exclusion = "relayed"
    elif progress.tree.over_branched():
        exclusion = "over_branched"
    harness_exit = progress.exit
    return Rollout(
        id=request.rollout_id,
        task_id=request.task.id,
        harness=request.adapter.name,
        policy=request.served.name,
        group_id=request.group_id,
        index=request.index,
        seed=request.seed,
        tree=progress.tree,
        stop_reason=progress.stop_reason,
        grade=progress.grade,
        exclusion=exclusion,
        instruction=request.task.instruction,
        response=harness_exit.response if harness_exit is not None else "",
        error=progress.error,
        harness_exit_code=harness_exit.exit_code if harness_exit is not None else None,
        harness_output=(progress.stdout + progress.stderr).decode("utf-8", "replace"),
        timing=progress.timing,
        rewritten_calls=progress.rewritten_calls,
    )


def _lap(progress: _Progress, name: str, since: float) -> float:
    now = time.monotonic()
    progress.timing[name] = now - since
    return now
