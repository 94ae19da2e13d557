"""What a rollout becomes when things go wrong: the failure table, run by run, over the real proxy and pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.scripted import ScriptedEngine, ScriptedReply
from clawgym_env.errors import GraderError, HarnessNotInstalled, HarnessUnsuitable, SandboxError
from clawgym_env.grading.base import Grade, Grader, Outcome
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.pool import RolloutPool, RolloutRequest, ServedPolicy
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.runner import OUTPUT_LIMIT
from clawgym_env.sandbox.base import Mount, Sandbox, SandboxSpec
from clawgym_env.tasks import Limits, Task, Turn
from clawgym_env.testing import Ask, FakeBackend, FakeSandbox, InProcessHarness

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
    turns: Sequence[Turn] = (),
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
            Task(id="t", instruction="Say hi.", turns=tuple(turns)),
            harness or InProcessHarness(act),
            served,
            "group",
            0,
            seed=1,
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


def test_a_last_reply_cut_by_the_window_ends_as_context_length() -> None:
    engine = ScriptedEngine(lambda prompt, turn: "x" * 5000, context_length=2048)
    rollout = run(engine=engine, sampling=SamplingParams(max_tokens=4096))
    assert (rollout.stop_reason, rollout.graded) == (StopReason.CONTEXT_LENGTH, True)


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


def test_a_bug_in_an_adapter_is_data_with_its_traceback_and_costs_no_sibling() -> None:
    async def buggy(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        if context.seed == 0:
            await ask("hello")
            raise ZeroDivisionError
        return await ask("hello")

    broken, *siblings = asyncio.run(_run_many(buggy, 3))
    assert (broken.stop_reason, broken.graded, len(broken.tree)) == (StopReason.HARNESS_ERROR, True, 1)
    assert "ZeroDivisionError" in broken.error
    assert [rollout.stop_reason for rollout in siblings] == [StopReason.COMPLETED] * 2


def test_a_workspace_that_cannot_be_copied_is_data() -> None:
    class Unreadable(FakeSandbox):
        async def copy_out(self, source: str, target: Path) -> None:
            raise PermissionError(13, "no")

    class UnreadableBackend(FakeBackend):
        async def open(self, spec: SandboxSpec) -> Sandbox:
            sandbox = Unreadable(spec, self.alive.discard)
            self.alive.add(sandbox)
            return sandbox

    rollout = run(backend=UnreadableBackend())
    assert (rollout.stop_reason, rollout.trainable) == (StopReason.SANDBOX_ERROR, False)
    assert "PermissionError" in rollout.error


def test_a_sandbox_that_fails_while_grading_does_not_run_the_harness_again() -> None:
    calls: list[int] = []

    async def once(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        calls.append(1)
        return await ask("hello")

    class OneOnly(FakeBackend):
        async def open(self, spec: SandboxSpec) -> Sandbox:
            if self.most_alive:
                raise SandboxError("no more")
            return await super().open(spec)

    rollout = run(once, backend=OneOnly())
    assert (rollout.stop_reason, len(calls), rollout.id) == (StopReason.GRADER_ERROR, 1, "group/0")


def test_a_wall_clock_before_the_first_call_is_not_graded() -> None:
    async def slow_start(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await asyncio.sleep(3600)
        return ""

    rollout = run(slow_start, limits=Limits(wall_clock_s=0.1))
    assert (rollout.stop_reason, rollout.graded, rollout.id) == (StopReason.WALL_CLOCK, False, "group/0~2")
    assert rollout.error.startswith("Expected a reply to the task within 0.1 s, got no request from the harness.")


def test_another_attempt_is_told_with_what_it_cost_and_why(caplog: pytest.LogCaptureFixture) -> None:
    rollout = run(never_ask)
    assert rollout.id == "group/0~2"
    told = [record.getMessage() for record in caplog.records if record.name == "clawgym_env.pool"]
    assert [message.partition(" stopped after ")[0] for message in told] == ["Rollout group/0", "Rollout group/0~1"]
    assert told[1].endswith("(harness_error: The harness ended without asking the model for the task.): attempt 3 of 3")


class TrueNeverEnds(CrashingHarness):
    """Leaves a `true` behind that waits for ever."""

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        exit = await super().run(sandbox, context)
        assert isinstance(sandbox, FakeSandbox)
        await sandbox.write_file("/root/bin/true", b"#!/bin/sh\nexec /bin/sleep 3600\n", mode=0o755)
        sandbox._environment["PATH"] = sandbox._path("/root/bin")
        return exit


def test_a_sandbox_has_limited_time_to_show_that_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clawgym_env.runner.PROBE_S", 0.3)
    rollout = run(harness=TrueNeverEnds(ask_once))
    assert (rollout.stop_reason, rollout.harness_exit_code, rollout.graded) == (StopReason.HARNESS_ERROR, 3, True)


def test_a_first_prompt_that_never_fits_is_not_graded_and_not_retried() -> None:
    async def long(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        try:
            return await ask("x" * 5000)
        except Exception:
            return ""

    rollout = run(long, engine=ScriptedEngine(lambda prompt, turn: "hi", context_length=1024))
    assert (rollout.stop_reason, rollout.graded, rollout.id) == (StopReason.CONTEXT_LENGTH, False, "group/0")
    assert "1024" in rollout.error


def test_a_summary_alone_is_no_answer_to_the_task() -> None:
    async def compact_first(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await ask("Create a detailed summary of the conversation so far.")
        return ""

    rollout = run(compact_first)
    assert [call.kind for call in rollout.tree] == ["compaction"]
    assert (rollout.stop_reason, rollout.graded, rollout.id) == (StopReason.HARNESS_ERROR, False, "group/0~2")


class Diary:
    """A grader that keeps what it was told, and an agent that keeps what it was told."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.contexts: list[HarnessContext] = []

    async def grade(self, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
        self.outcome = outcome
        return Grade(1.0)

    async def repeat(self, ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        self.contexts.append(context)
        return f"told: {await ask(context.instruction)}"


MORE = Turn(text="And then?")
AFRESH = Turn(text="Who am I?", new_session=True)


def counting() -> ScriptedEngine:
    """Return a policy that says which reply of the conversation this is."""
    return ScriptedEngine(lambda prompt, turn: f"reply {turn}")


def test_turns_are_one_conversation_until_a_new_session_begins() -> None:
    diary = Diary()
    rollout = run(diary.repeat, grader=diary, engine=counting(), turns=[MORE, AFRESH, MORE])
    assert rollout.stop_reason is StopReason.COMPLETED
    assert [call.lineage_parent for call in rollout.tree] == [None, 0, None, 2]
    assert [trajectory.calls for trajectory in rollout.tree.trajectories()] == [(0, 1), (2, 3)]
    assert [message.content for message in diary.outcome.conversation] == [
        *("Say hi.", "reply 0", "And then?", "reply 1"),
        *("Who am I?", "reply 0", "And then?", "reply 1"),
    ]
    assert rollout.response == diary.outcome.response == "told: reply 1"
    assert [(it.session, it.resume) for it in diary.contexts] == [(0, False), (0, True), (1, False), (1, True)]
    assert all(it.resumable for it in diary.contexts)


def test_the_output_of_all_turns_is_kept_and_bounded() -> None:
    async def talk(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await ask(context.instruction)
        return context.instruction + "x" * (OUTPUT_LIMIT // 2)

    kept = run(talk, turns=[MORE]).harness_output
    assert "Say hi." not in kept
    assert kept.count("And then?") == 1
    assert len(kept) == OUTPUT_LIMIT


def test_the_first_turn_that_fails_is_the_last() -> None:
    rollout = run(harness=CrashingHarness(ask_once), turns=[MORE, MORE])
    assert (rollout.stop_reason, rollout.harness_exit_code, len(rollout.tree)) == (StopReason.HARNESS_ERROR, 3, 1)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [(Limits(max_calls=2), StopReason.MAX_CALLS), (Limits(max_total_tokens=4), StopReason.TOKEN_BUDGET)],
)
def test_a_budget_is_for_all_turns_together(limits: Limits, reason: StopReason) -> None:
    diary = Diary()
    rollout = run(diary.repeat, grader=diary, limits=limits, turns=[MORE, MORE, MORE, MORE])
    assert (rollout.stop_reason, len(rollout.tree), rollout.trainable) == (reason, 2, True)
    assert rollout.response == ""
    assert rollout.harness_output == "told: hi" * len(rollout.tree)


def test_the_wall_clock_is_for_all_turns_together_and_ends_the_one_that_hangs() -> None:
    async def hang_later(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        return await (hang if context.resume else ask_once)(ask, sandbox, context)

    rollout = run(hang_later, limits=Limits(wall_clock_s=1.0), turns=[MORE, MORE])
    assert (rollout.stop_reason, len(rollout.tree), rollout.trainable) == (StopReason.WALL_CLOCK, 2, True)


def test_a_later_turn_that_reaches_no_model_is_the_harness_failure_whatever_its_exit_code() -> None:
    async def forget(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        return "" if context.resume else await ask("hello")

    rollout = run(forget, turns=[MORE])
    assert (rollout.stop_reason, rollout.graded, len(rollout.tree)) == (StopReason.HARNESS_ERROR, True, 1)
    assert "turn 2" in rollout.error


def test_a_harness_that_cannot_go_on_is_refused_tasks_that_ask_for_it_and_takes_new_sessions() -> None:
    class Forgetful(InProcessHarness):
        supports_resume = False

    backend = FakeBackend()
    with pytest.raises(HarnessUnsuitable, match="go on with its session"):
        run(harness=Forgetful(ask_once), backend=backend, turns=[MORE])
    assert backend.most_alive == 0
    rollout = run(harness=Forgetful(ask_once), turns=[AFRESH, AFRESH])
    assert (rollout.stop_reason, len(rollout.tree)) == (StopReason.COMPLETED, 3)


def test_the_pool_keeps_working_while_the_caller_does_and_never_runs_far_ahead() -> None:
    started: list[int] = []

    async def note(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        started.append(context.seed)
        return await ask("hello")

    async def scenario() -> tuple[int, int]:
        pool, requests = _pool(note, 20, max_concurrency=2)
        stream = pool.as_completed(requests)
        await anext(stream)
        await asyncio.sleep(3)
        ahead = len(started)
        rest = [rollout async for rollout in stream]
        await pool.close()
        return ahead, len(rest)

    ahead, rest = asyncio.run(scenario())
    assert rest == 19
    assert 3 <= ahead <= 1 + 2 + 2


def test_closing_the_pool_ends_an_open_stream_and_its_rollouts() -> None:
    backend = FakeBackend()

    async def scenario() -> list[Rollout]:
        pool, requests = _pool(hang_after_first, 4, max_concurrency=2, backend=backend)
        stream = pool.as_completed(requests)
        await anext(stream)
        await pool.close()
        assert not backend.alive
        return [rollout async for rollout in stream]

    assert asyncio.run(scenario()) == []


async def hang_after_first(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    return await (ask_once if context.seed == 0 else hang)(ask, sandbox, context)


async def _run_many(act: Act, count: int) -> list[Rollout]:
    pool, requests = _pool(act, count)
    try:
        return await pool.run(requests)
    finally:
        await pool.close()


def _pool(
    act: Act, count: int, *, max_concurrency: int = 4, backend: FakeBackend | None = None
) -> tuple[RolloutPool, list[RolloutRequest]]:
    pool = RolloutPool(
        backend=backend or FakeBackend(), grader=CountingGrader(), cache=Path("unused"), max_concurrency=max_concurrency
    )
    served = ServedPolicy("scripted", ScriptedEngine(lambda prompt, turn: "hi"))
    task = Task(id="t", instruction="Say hi.")
    return pool, [RolloutRequest(task, InProcessHarness(act), served, "g", i, seed=i) for i in range(count)]
