"""A task of several turns with every harness for real: a turn goes on with the one before, a new session does not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import pytest
from fake_sandbox import CONTEXT, FakeSandbox

from clawgym_env.cache import cache_dir
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.grading.base import Grade, Outcome
from clawgym_env.pool import RolloutPool, RolloutRequest, ServedPolicy
from clawgym_env.registry import adapter
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks import Limits, Task, Turn


@dataclass
class Listener:
    """A grader that keeps what it was told."""

    heard: list[Outcome] = field(default_factory=list)

    async def grade(self, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
        self.heard.append(outcome)
        return Grade(1.0)


def obey(prompt: str, turn: int) -> str:
    """Say what one was told to say last."""
    return prompt.rpartition("Say ")[2].partition(".")[0].title() + "."


def play(spec: str, *turns: Turn) -> tuple[Rollout, Outcome]:
    """Run one rollout of `Say one.` and the turns after it."""
    harness = adapter(spec)
    harness.install(cache_dir())
    grader = Listener()

    async def run() -> Rollout:
        pool = RolloutPool(backend=LocalBackend(), grader=grader, cache=cache_dir(), max_concurrency=1)
        served = ServedPolicy("scripted", ScriptedEngine(obey, context_length=200_000))
        task = Task(id="t", instruction="Say one.", turns=turns, limits=Limits(wall_clock_s=1200))
        try:
            (rollout,) = await pool.run([RolloutRequest(task, harness, served, "g", 0, seed=1)])
            return rollout
        finally:
            await pool.close()

    rollout = asyncio.run(run())
    assert rollout.stop_reason is StopReason.COMPLETED, (rollout.error, rollout.harness_output)
    return rollout, grader.heard[0]


FIRST, SECOND = (f"c1a76000-0000-4000-8000-00000000000{number}" for number in (1, 2))


@pytest.mark.parametrize(
    ("spec", "begun", "resumed"),
    [
        ("claude-code", ("--session-id", SECOND), ("--resume", SECOND)),
        ("claude-code?version=2.0.76", ("--session-id", SECOND), ("--resume", SECOND)),
        ("codex", ("exec", "--skip-git-repo-check"), ("exec", "resume", "--last", "--skip-git-repo-check")),
        ("gemini-cli", ("--output-format", "json"), ("--output-format", "json", "--resume", "latest")),
        ("opencode?title=false", ("--title", "Task"), ("--auto", "--continue")),
        ("openclaw", ("agent", "--local"), ("--session-id", SECOND)),
        ("pi", ("--session-id", SECOND), ("--session-id", SECOND)),
        ("qwen-code", ("--session-id", SECOND), ("--resume", SECOND)),
    ],
)
def test_a_session_is_named_when_it_begins_and_gone_on_with_by_that_name(
    spec: str, begun: tuple[str, ...], resumed: tuple[str, ...]
) -> None:
    harness = adapter(spec)
    assert harness.supports_resume
    for resume, words in ((False, begun), (True, resumed)):
        sandbox = FakeSandbox()
        context = replace(CONTEXT, session=1, resume=resume, resumable=True)
        asyncio.run(harness.run(sandbox, context))
        argv = sandbox.execs[0].argv
        assert words in [argv[at : at + len(words)] for at in range(len(argv))]
        assert FIRST not in argv


RESUMING = [
    "mini",
    "mini?dialect=messages",
    *(
        pytest.param(spec, marks=pytest.mark.harness)
        for spec in ("pi", "claude-code", "codex", "gemini-cli", "opencode?title=false", "qwen-code")
    ),
]


@pytest.mark.harness
def test_openclaw_goes_on_though_it_moves_its_own_context_behind_each_message() -> None:
    rollout, outcome = play("openclaw", Turn(text="Say two."))
    tree = rollout.tree
    assert [(call.kind, call.lineage_parent) for call in tree] == [("main", None), ("main", 0)]
    assert tree[1].drift_reason == "history_rewritten"
    assert tree.buckets()["trained"] == tree.num_completion_tokens
    assert [m.content for m in outcome.conversation if m.role == "assistant"] == ["One.", "Two."]
    assert outcome.response == "Two."


@pytest.mark.parametrize("spec", RESUMING)
def test_the_next_turn_goes_on_with_the_session_and_a_new_session_does_not(spec: str) -> None:
    turns = Turn(text="Say two."), Turn(text="Say three.", new_session=True), Turn(text="Say four.")
    rollout, outcome = play(spec, *turns)
    tree = rollout.tree
    assert [call.kind for call in tree] == ["main"] * 4, tree.outline()
    assert [call.lineage_parent for call in tree] == [None, 0, None, 2], tree.outline()
    for before, after in ((0, 1), (2, 3)):
        assert tree[after].drift_reason is None
        history = tree.history(before).tolist()
        assert tree.prompt(after)[: len(history)].tolist() == history
    assert [trajectory.calls for trajectory in tree.trajectories()] == [(0, 1), (2, 3)]
    assert tree.buckets()["trained"] == tree.num_completion_tokens

    assert (rollout.response, outcome.response) == ("Four.", "Four.")
    assert [m.content for m in outcome.conversation if m.role == "assistant"] == ["One.", "Two.", "Three.", "Four."]
    asked = [m.content for m in outcome.conversation if m.role == "user"]
    for words in ("Say one.", "Say two.", "Say three.", "Say four."):
        assert sum(words in text for text in asked) == 1, asked
