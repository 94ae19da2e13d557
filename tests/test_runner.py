"""What a rollout becomes when things go wrong: the failure table, run by run, over the real proxy and pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.scripted import ScriptedEngine, ScriptedReply
from clawgym_env.errors import GraderError, HarnessNotInstalled, SandboxError
from clawgym_env.grading.base import Grade, Grader
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.pool import RolloutPool, RolloutRequest, ServedPolicy
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.sandbox.base import Mount, Sandbox, SandboxSpec
from clawgym_env.tasks import Limits, Task
from clawgym_env.testing import Ask, FakeBackend, InProcessHarness

Act = Callable[[Ask, Sandbox, HarnessContext], Awaitable[str]]


class CountingGrader:
    """Gives 0.5, after failing a number of times."""

    def __init__(self, failures: int = 0) -> None:
        self.calls = 0
        self._failures = failures

    async def grade(self, task: Task, sandbox: Sandbox, response: str) -> Grade:
        self.calls += 1
        if self.calls <= self._failures:
            raise GraderError("Expected a score, got none.")
        return Grade(0.5, {"half": 0.5})


class BrokenBackend(FakeBackend):
    """Refuses to open the first `failures` sandboxes."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.refused = 0
        self._failures = failures

    async def open(self, spec: SandboxSpec) -> Sandbox:
        if self.refused < self._failures:
            self.refused += 1
            raise SandboxError("Expected a namespace, got none.")
        return await super().open(spec)


async def ask_forever(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    while True:
        await ask("more")


async def ask_once(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    return await ask("hello")


async def never_ask(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    return ""


async def hang(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    await ask("hello")
    await asyncio.sleep(3600)
    return ""


class CrashingHarness(InProcessHarness):
    """Asks once, then exits with code 3."""

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await super().run(sandbox, context)
        return HarnessExit(3, b"", b"segmentation fault", "")


class MissingHarness(InProcessHarness):
    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        raise HarnessNotInstalled("missing")


def run(
    act: Act = ask_once,
    *,
    harness: InProcessHarness | None = None,
    backend: FakeBackend | None = None,
    grader: Grader | None = None,
    engine: ScriptedEngine | None = None,
    limits: Limits | None = None,
    sampling: SamplingParams | None = None,
) -> Rollout:
    """Run one rollout and check that it left nothing open."""
    backend = backend or FakeBackend()

    async def scenario() -> Rollout:
        pool = RolloutPool(
            backend=backend,
            grader=grader or CountingGrader(),
            cache=Path("unused"),
            max_concurrency=4,
            limits=limits,
        )
        served = ServedPolicy(
            "scripted", engine or ScriptedEngine(lambda prompt, turn: "hi"), sampling or SamplingParams()
        )
        request = RolloutRequest(
            Task(id="t", instruction="Say hi."), harness or InProcessHarness(act), served, "group", 0, seed=1
        )
        try:
            return (await pool.run([request]))[0]
        finally:
            await pool.close()

    rollout = asyncio.run(scenario())
    assert not backend.alive
    return rollout


def test_a_harness_that_ends_by_itself_is_completed_and_graded() -> None:
    rollout = run()
    assert rollout.stop_reason is StopReason.COMPLETED
    assert (rollout.reward, rollout.trainable, len(rollout.tree)) == (0.5, True, 1)
    assert {"open", "harness", "settle", "grade", "total"} <= set(rollout.timing)


def test_a_spent_call_budget_ends_the_harness_and_is_graded() -> None:
    rollout = run(ask_forever, limits=Limits(max_calls=3))
    assert rollout.stop_reason is StopReason.MAX_CALLS
    assert (len(rollout.tree), rollout.trainable) == (3, True)


def test_a_spent_token_budget_ends_the_harness_and_is_graded() -> None:
    rollout = run(ask_forever, limits=Limits(max_total_tokens=10))
    assert rollout.stop_reason is StopReason.TOKEN_BUDGET
    assert rollout.trainable
    assert rollout.tree.num_completion_tokens >= 10


def test_the_wall_clock_ends_a_hanging_harness_and_what_it_did_is_graded() -> None:
    rollout = run(hang, limits=Limits(wall_clock_s=0.5))
    assert rollout.stop_reason is StopReason.WALL_CLOCK
    assert (len(rollout.tree), rollout.trainable) == (1, True)


def test_a_prompt_that_does_not_fit_ends_as_context_length() -> None:
    async def overflow(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await ask("hello")
        try:
            await ask("x" * 5000)
        except Exception:
            return "gave up"
        raise AssertionError("the proxy answered a prompt beyond the window")

    rollout = run(overflow, engine=ScriptedEngine(lambda prompt, turn: "hi", context_length=2048))
    assert rollout.stop_reason is StopReason.CONTEXT_LENGTH
    assert rollout.graded


def test_a_crash_after_a_call_is_the_policys_own_and_trained() -> None:
    rollout = run(harness=CrashingHarness(ask_once))
    assert rollout.stop_reason is StopReason.HARNESS_ERROR
    assert (rollout.harness_exit_code, rollout.trainable) == (3, True)
    assert "segmentation fault" in rollout.harness_output


def test_a_harness_without_a_call_is_infrastructure_and_retried_twice() -> None:
    tries: list[str] = []

    async def silent(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        tries.append(context.base_url)
        return await never_ask(ask, sandbox, context)

    rollout = run(silent)
    assert rollout.stop_reason is StopReason.HARNESS_ERROR
    assert (rollout.graded, rollout.reward, rollout.exclusion) == (False, 0.0, "ungraded")
    assert len(set(tries)) == 3
    assert rollout.id == "group/0~2"


def test_a_harness_that_calls_no_model_by_design_is_graded() -> None:
    class Noop(InProcessHarness):
        calls_model = False

    rollout = run(harness=Noop(never_ask))
    assert (rollout.stop_reason, rollout.reward, len(rollout.tree)) == (StopReason.COMPLETED, 0.5, 0)


def test_a_sandbox_that_opens_at_the_third_try_is_no_failure() -> None:
    backend = BrokenBackend(failures=2)
    assert run(backend=backend).stop_reason is StopReason.COMPLETED
    assert backend.refused == 2


def test_a_sandbox_that_never_opens_is_excluded_with_the_reason() -> None:
    rollout = run(backend=BrokenBackend(failures=99))
    assert rollout.stop_reason is StopReason.SANDBOX_ERROR
    assert not rollout.trainable
    assert "namespace" in rollout.error


def test_a_failing_engine_is_infrastructure_even_if_the_harness_shrugs_it_off() -> None:
    async def shrug(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        try:
            return await ask("hello")
        except Exception:
            return "whatever"

    engine = ScriptedEngine(lambda prompt, turn: ScriptedReply("", error="the engine is gone"))
    rollout = run(shrug, engine=engine)
    assert rollout.stop_reason is StopReason.ENGINE_ERROR
    assert not rollout.graded
    assert "gone" in rollout.error


def test_a_grader_that_recovers_is_tried_again_without_the_harness() -> None:
    calls: list[int] = []

    async def once(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        calls.append(1)
        return await ask("hello")

    grader = CountingGrader(failures=2)
    rollout = run(once, grader=grader)
    assert (rollout.stop_reason, rollout.reward, grader.calls, len(calls)) == (StopReason.COMPLETED, 0.5, 3, 1)


def test_a_grader_that_never_scores_is_a_grader_error_and_never_a_zero() -> None:
    grader = CountingGrader(failures=99)
    rollout = run(grader=grader)
    assert rollout.stop_reason is StopReason.GRADER_ERROR
    assert (rollout.graded, rollout.exclusion, grader.calls, len(rollout.tree)) == (False, "ungraded", 3, 1)


def test_a_missing_harness_raises_before_anything_starts() -> None:
    backend = FakeBackend()
    with pytest.raises(HarnessNotInstalled, match="clawgym install missing"):
        run(harness=MissingHarness(), backend=backend)
    assert backend.most_alive == 0


def test_a_bug_in_an_adapter_is_raised_after_its_siblings_have_finished() -> None:
    finished: list[int] = []

    async def slow(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        if context.seed == 0:
            raise ZeroDivisionError
        await asyncio.sleep(0.3)
        finished.append(context.seed)
        return await ask("hello")

    backend = FakeBackend()

    async def scenario() -> None:
        pool = RolloutPool(backend=backend, grader=CountingGrader(), cache=Path("unused"), max_concurrency=4)
        served = ServedPolicy("scripted", ScriptedEngine(lambda prompt, turn: "hi"))
        task = Task(id="t", instruction="Say hi.")
        requests = [RolloutRequest(task, InProcessHarness(slow), served, "g", i, seed=i) for i in range(3)]
        try:
            await pool.run(requests)
        finally:
            await pool.close()

    with pytest.raises(ZeroDivisionError):
        asyncio.run(scenario())
    assert sorted(finished) == [1, 2]
    assert not backend.alive
