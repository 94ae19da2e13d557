"""The call clock over the fake borders: the caller of `step` is the model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import pickle
import time
import warnings
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import httpx
import numpy as np
import pytest
from env_fakes import FINAL_KEYS, RESERVED, RESET_KEYS, SOUND_TASKS, WordGrader
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import SyncVectorEnv

import clawgym_env
from clawgym_env._loop import BackgroundLoop
from clawgym_env.engine import base
from clawgym_env.engine.base import Generation, SamplingParams, call_in_hand
from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.envs.call import CallEnv
from clawgym_env.errors import HarnessNotInstalled, PolicyNotBuilt, SandboxError
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import Mount, Sandbox
from clawgym_env.spaces import TokenIds, Unicode
from clawgym_env.testing import ANSWER_FILE, Act, Ask, FakeBackend, InProcessHarness, chat_url
from clawgym_env.trace.prefix_tree import Selection
from clawgym_env.trace.store import RolloutStore
from learners.rows import trained_rows

CALL = "ClawGym-Mini-Call-v0"
CALL_KEYS = RESET_KEYS | {"call_id", "parent_id", "kind"}


async def twice(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    """Ask for a draft, then for the answer."""
    await ask(context.instruction)
    answer = await ask("And finally?")
    await sandbox.write_file(f"{context.workdir}/{ANSWER_FILE}", answer.encode())
    return answer


def keywords(act: Act = twice, **changes: Any) -> dict[str, Any]:
    return {
        "tasks": SOUND_TASKS,
        "harness": InProcessHarness(act),
        "sandbox": FakeBackend(),
        "grader": WordGrader(),
        **changes,
    }


@contextlib.contextmanager
def made(act: Act = twice, **changes: Any) -> Iterator[gym.Env[Any, Any]]:
    """An environment that leaves nothing behind."""
    given = keywords(act, **changes)
    env = gym.make(CALL, **given)
    try:
        yield env
    finally:
        env.close()
    assert not given["sandbox"].alive


def test_a_step_answers_one_call_and_the_last_one_is_graded() -> None:
    with made() as env:
        prompt, info = env.reset(seed=7, options={"task_id": "task-3"})
        assert prompt == "<|im_start|>user\nSay fünf ☃<|im_end|>\n<|im_start|>assistant\n"
        assert set(info) == CALL_KEYS
        assert (info["parent_id"], info["kind"]) == (None, "main")
        first = info["call_id"]
        prompt, reward, terminated, truncated, info = env.step("A draft.")
        assert prompt.endswith(
            "assistant\nA draft.<|im_end|>\n<|im_start|>user\nAnd finally?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert set(info) == CALL_KEYS
        assert info["parent_id"] == first != info["call_id"]
        observation, reward, terminated, truncated, final = env.step("fünf ☃<|im_end|>")
        assert (observation, reward, terminated, truncated) == ("fünf ☃", 1.0, True, False)
        assert set(final) == FINAL_KEYS
        assert not RESERVED & set(final)
        tree = final["rollout"].tree
        assert [call.id for call in tree] == [first, info["call_id"]]
        assert [call.finish_reason for call in tree] == ["stop", "stop"]


def test_given_tokens_are_marked_and_are_refused_by_what_trains_on_samples() -> None:
    with made() as env:
        env.reset()
        env.step("one")
        rollout = env.step("two")[4]["rollout"]
    tree = rollout.tree
    assert all(call.sampling.given and not call.sampling.trainable for call in tree)
    assert tree.from_json(tree.to_json())[0].sampling.given
    with pytest.raises(ValueError, match="given by the caller"):
        trained_rows(rollout, Selection())


def test_check_env_is_clean_with_warnings_as_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for mode in ("text", "token_ids"):
            with made(action_mode=mode, observation_mode=mode, render_mode="ansi") as env:
                check_env(env.unwrapped)


def test_token_ids_go_in_and_out_as_they_are() -> None:
    with made(action_mode="token_ids", observation_mode="token_ids") as env:
        assert isinstance(env.action_space, TokenIds)
        text = env.unwrapped._engine.text.tokenizer  # type: ignore[attr-defined]
        close = text.convert_tokens_to_ids("<|im_end|>")
        prompt, _ = env.reset(options={"task_id": "task-0"})
        assert prompt.dtype == np.int32
        assert text.decode(prompt).endswith("Say one<|im_end|>\n<|im_start|>assistant\n")
        cut = np.array(text.encode("no close"), dtype=np.int32)
        env.step(cut)
        whole = np.array([*text.encode("one"), close, *text.encode("too much")], dtype=np.int32)
        observation, reward, *_, info = env.step(whole)
        tree = info["rollout"].tree
        assert tree[0].token_ids.tolist() == cut.tolist()
        assert tree[0].finish_reason == "length"
        assert tree[1].token_ids.tolist() == whole[:4].tolist()
        assert (text.decode(observation), reward) == ("one", 1.0)
        env.reset()
        with pytest.raises(ValueError, match="shape"):
            env.unwrapped.step(np.zeros(3))
        with pytest.raises(ValueError, match="int32"):
            env.unwrapped.step(np.array([100_000], dtype=np.int32))


def test_modes_of_action_and_observation_are_chosen_apart() -> None:
    with made(observation_mode="token_ids") as env:
        assert (type(env.observation_space), type(env.action_space)) == (TokenIds, Unicode)
    with pytest.raises(ValueError, match="action_mode to be 'text' or 'token_ids', got 'ids'"):
        gym.make(CALL, **keywords(action_mode="ids"))


def test_tool_calls_are_read_out_of_the_text() -> None:
    seen: list[dict[str, Any]] = []

    async def with_a_tool(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        url = chat_url(sandbox, context)
        tool = {"type": "function", "function": {"name": "write", "description": "", "parameters": {}}}
        body = {"model": "m", "messages": [{"role": "user", "content": context.instruction}], "tools": [tool]}
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            seen.append((await client.post(url, json=body)).json()["choices"][0])
        return "done"

    with made(with_a_tool, grader=lambda task, workspace: 0.5) as env:
        env.reset()
        observation, reward, *_ = env.step("I write." + tool_call("write", path="a", content="b"))
    assert (observation, reward) == ("done", 0.5)
    assert seen[0]["message"]["content"] == "I write."
    call = seen[0]["message"]["tool_calls"][0]["function"]
    assert (call["name"], json.loads(call["arguments"])) == ("write", {"path": "a", "content": "b"})
    assert seen[0]["finish_reason"] == "tool_calls"


def test_parallel_calls_come_one_at_a_time_in_the_order_of_their_arrival() -> None:
    async def team(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        url = chat_url(sandbox, context)
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:

            async def one(name: str) -> str:
                body = {"model": "m", "messages": [{"role": "user", "content": f"You are {name}"}]}
                return str((await client.post(url, json=body)).json()["choices"][0]["message"]["content"])

            answers = []
            async with asyncio.TaskGroup() as group:
                for name in ("Ada", "Bob", "Cyd"):
                    answers.append(group.create_task(one(name)))
                    await asyncio.sleep(0.05)
            return ",".join(task.result() for task in answers)

    with made(team, grader=lambda task, workspace: 1.0) as env:
        prompt, _ = env.reset()
        asked, replies = [], []
        for number in range(3):
            asked.append(prompt.split("You are ")[1][:3])
            replies.append(str(number))
            prompt, *_, info = env.step(str(number))
    assert sorted(asked) == ["Ada", "Bob", "Cyd"]
    assert prompt == ",".join(replies[asked.index(name)] for name in ("Ada", "Bob", "Cyd"))
    assert info["num_calls"] == 3


def test_the_kind_of_a_call_is_told_before_it_is_answered() -> None:
    async def leader(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        url = chat_url(sandbox, context)
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            for role, tool in (("lead", "delegate"), ("search", "fetch"), ("title", None)):
                messages = [{"role": "system", "content": role}, {"role": "user", "content": context.instruction}]
                body: dict[str, Any] = {"model": "m", "messages": messages}
                if tool is not None:
                    function = {"name": tool, "description": "", "parameters": {}}
                    body["tools"] = [{"type": "function", "function": function}]
                await client.post(url, json=body)
        return ""

    with made(leader, grader=lambda task, workspace: 1.0) as env:
        _, info = env.reset()
        kinds = [info["kind"]]
        for _ in range(3):
            *_, info = env.step("fine")
            kinds.append(info.get("kind"))
    assert kinds[:3] == ["main", "subagent", "auxiliary"] == [call.kind for call in info["rollout"].tree]


def test_a_spent_budget_ends_the_episode_truncated_and_graded() -> None:
    async def for_ever(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await sandbox.write_file(f"{context.workdir}/{ANSWER_FILE}", b"one")
        while True:
            await ask("Go on.")

    with made(for_ever, limits={"max_calls": 2}) as env:
        env.reset(options={"task_id": "task-0"})
        assert env.step("a")[2:4] == (False, False)
        _, reward, terminated, truncated, info = env.step("b")
        assert (reward, terminated, truncated) == (1.0, False, True)
        assert (info["stop_reason"], info["graded"], info["num_calls"]) == ("max_calls", True, 2)


def test_a_caller_that_thinks_too_long_finds_the_episode_over() -> None:
    with made(limits={"wall_clock_s": 2.0}) as env:
        env.reset()
        running = env.unwrapped._episode._running  # type: ignore[attr-defined]
        while not running.done():
            time.sleep(0.05)
        _, reward, terminated, truncated, info = env.step("too late")
        assert (reward, terminated, truncated, info["stop_reason"]) == (0.0, False, True, "wall_clock")
        assert (info["num_calls"], info["graded"], info["rollout"].id[-2:]) == (0, False, "/0")


def test_a_harness_that_never_asks_ends_at_the_first_step_with_its_stop_reason() -> None:
    async def mute(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        return "I need no model."

    with made(mute, render_mode="ansi") as env:
        observation, info = env.reset()
        assert observation == ""
        assert info["call_id"] is None
        assert env.render() == ""
        _, reward, terminated, truncated, info = env.step("anything")
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert (info["stop_reason"], info["graded"], info["num_calls"]) == ("harness_error", False, 0)


def test_a_harness_that_dies_ends_the_episode_with_what_it_left() -> None:
    async def dies(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await sandbox.write_file(f"{context.workdir}/{ANSWER_FILE}", b"one")
        await ask(context.instruction)
        raise RuntimeError("a bug of the product")

    with made(dies) as env:
        env.reset(options={"task_id": "task-0"})
        _, reward, terminated, truncated, info = env.step("hello")
        assert (reward, terminated, truncated, info["stop_reason"]) == (1.0, True, False, "harness_error")


def test_lost_infrastructure_is_tried_again_only_before_the_caller_was_asked() -> None:
    starts: list[str] = []

    async def lost(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        starts.append(context.instruction)
        if len(starts) < 3:
            raise SandboxError("The machine is gone.")
        await ask(context.instruction)
        raise SandboxError("And gone again.")

    with made(lost) as env:
        prompt, _ = env.reset()
        assert len(starts) == 3
        assert prompt
        _, reward, terminated, truncated, info = env.step("hello")
        assert (reward, terminated, truncated) == (0.0, False, True)
        assert (info["stop_reason"], info["graded"], info["rollout"].id[-2:]) == ("sandbox_error", False, "~2")
        assert len(starts) == 3


def test_a_reset_in_mid_episode_ends_what_runs() -> None:
    ended: list[str] = []

    async def noted(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        try:
            return await twice(ask, sandbox, context)
        finally:
            ended.append(context.instruction)

    backend = FakeBackend()
    with made(noted, sandbox=backend) as env:
        _, first = env.reset(seed=3)
        env.step("a draft")
        assert len(backend.alive) == 1
        _, second = env.reset()
        assert len(ended) == 1
        assert len(backend.alive) == 1
        assert first["group_id"] != second["group_id"]
        env.step("a draft")
    assert len(ended) == 2
    env.close()
    with pytest.raises(RuntimeError, match="closed"):
        env.reset()


def test_the_order_of_calls_is_enforced_and_a_wrong_action_changes_nothing() -> None:
    with made() as env:
        with pytest.raises(ResetNeeded):
            env.unwrapped.step("too early")
        env.reset(options={"task_id": "task-0"})
        with pytest.raises(ValueError, match="Unicode"):
            env.unwrapped.step(3)
        env.step("a draft")
        assert env.step("one")[1] == 1.0
        with pytest.raises(ResetNeeded):
            env.step("once more")


def test_seeds_and_options_choose_the_draw() -> None:
    def order(**changes: Any) -> list[str]:
        with made(**changes) as env:
            return [env.reset(seed=5 if "seed" not in changes and i == 0 else None)[1]["task_id"] for i in range(4)]

    assert order() == order(seed=5)
    assert len(set(order())) == 4
    with made() as env:
        with pytest.raises(KeyError, match="task-0"):
            env.reset(options={"task_id": "nothing"})
        with pytest.raises(ValueError, match="task_id, harness"):
            env.reset(options={"taskid": "task-2"})
        assert env.reset(options={"task_id": "task-2", "harness": "in-process"})[1]["task_id"] == "task-2"


def test_rendering_draws_the_tree_so_far() -> None:
    with made(render_mode="ansi") as env:
        assert env.unwrapped.render() == ""  # type: ignore[func-returns-value]
        env.reset(options={"task_id": "task-0"})
        assert env.render() == "#0 main waits"
        env.step("a draft")
        drawn = env.render()
        assert isinstance(drawn, str)
        assert [line.split()[:2] for line in drawn.splitlines()] == [["#0", "main"], ["#1", "main"]]
        assert drawn.endswith("waits")
        rollout = env.step("one")[4]["rollout"]
        assert env.render() == f"{rollout.tree.outline()}\ncompleted, reward 1.000 (right 1, length 3)"


def test_episode_statistics_count_calls() -> None:
    with made() as inner:
        env = gym.wrappers.RecordEpisodeStatistics(inner)
        env.reset(options={"task_id": "task-0"})
        env.step("a draft")
        episode = env.step("one")[4]["episode"]
        assert (episode["r"], episode["l"]) == (1.0, 2)


def test_a_time_limit_cuts_before_the_grade_and_leaves_nothing_running() -> None:
    backend = FakeBackend()
    with made(sandbox=backend) as inner:
        env = gym.wrappers.TimeLimit(inner, 1)
        env.reset()
        _, reward, _, truncated, info = env.step("a draft")
        assert (reward, truncated) == (0.0, True)
        assert "rollout" not in info
        env.reset()
        assert len(backend.alive) == 1


def test_what_is_missing_shows_at_reset_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Absent(InProcessHarness):
        def mounts(self, cache: Path) -> tuple[Mount, ...]:
            raise HarnessNotInstalled("absent")

    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path))
    with made(harness=Absent()) as env, pytest.raises(HarnessNotInstalled, match="clawgym install absent"):
        env.reset()
    with made(policy="tiny") as env:
        with pytest.raises(PolicyNotBuilt, match="clawgym policy build tiny"):
            env.reset()
        with pytest.raises(ResetNeeded):
            env.unwrapped.step("no episode")
    with pytest.raises(PolicyNotBuilt):
        gym.make(CALL, **keywords(policy="tiny", action_mode="token_ids"))


def test_a_run_directory_holds_the_episode(tmp_path: Path) -> None:
    with made(run_dir=str(tmp_path)) as env:
        env.reset()
        env.step("a draft")
        rollout = env.step("one")[4]["rollout"]
    with RolloutStore(tmp_path, read_only=True) as store:
        (stored,) = store.rollouts()
    assert stored.tree == rollout.tree
    assert stored.policy == "caller"


def test_a_synchronous_vector_steps_each_and_resets_what_is_over() -> None:
    backend = FakeBackend()
    envs = SyncVectorEnv([lambda: gym.make(CALL, **keywords(sandbox=backend))] * 2)
    prompts, infos = envs.reset(seed=1)
    assert prompts in envs.observation_space
    assert all(prompt.startswith("<|im_start|>user\nSay ") for prompt in prompts)
    envs.step(("a draft", "☃"))
    _, _, terminations, _, infos = envs.step(("one", "two"))
    assert terminations.all()
    assert [rollout.tree.num_completion_tokens for rollout in clawgym_env.rollouts(infos)] == [7 + 1 + 4, 3 + 1 + 4]
    prompts, rewards, terminations, *_ = envs.step(("ignored", "ignored"))
    assert not terminations.any()
    assert rewards.tolist() == [0.0, 0.0]
    assert len(backend.alive) == 2
    envs.close()
    assert not backend.alive


def test_a_spec_of_strings_survives_json_and_pickling_makes_the_same_environment_again() -> None:
    strings = {"harness": "mini", "tasks": "bundled:level=1", "limits": {"max_calls": 3}, "max_tokens": 99}
    env = gym.make(CALL, **strings)
    assert env.spec is not None
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.spec is not None
    assert again.spec.kwargs == strings
    copied = pickle.loads(pickle.dumps(env))
    assert isinstance(copied.unwrapped, CallEnv)
    assert copied.spec == env.spec
    assert copied.observation_space == again.observation_space == env.observation_space


def test_every_single_harness_has_a_twin() -> None:
    for harness in clawgym_env.registration.IDS:
        if harness != "mix":
            assert gym.spec(clawgym_env.env_id(harness, call=True)).kwargs == {"harness": harness}
    assert clawgym_env.env_id("claude-code?bare", call=True) == "ClawGym-ClaudeCode-Call-v0"
    with pytest.raises(ValueError, match="one harness"):
        clawgym_env.env_id("mix", call=True)


def test_an_engine_may_sample_for_the_caller_with_its_exact_tokens() -> None:
    engine = ScriptedEngine(["a draft", "one"])
    engine.update_weights(lambda: None)
    with made() as env:
        caller = env.unwrapped
        assert isinstance(caller, CallEnv)
        with pytest.raises(ResetNeeded):
            caller.sample(engine)
        env.reset(options={"task_id": "task-0"})
        done = False
        while not done:
            action = caller.sample(engine)
            assert action in env.action_space
            *_, terminated, truncated, info = env.step(action)
            done = terminated or truncated
    tree = info["rollout"].tree
    assert all(call.sampling.trainable for call in tree)
    assert all((call.logprobs < 0.0).all() for call in tree)
    assert info["policy_version"] == 1
    assert tree[0].sampling.max_tokens == 1024
    assert tree[0].sampling.seed is not None


class Knowing(ScriptedEngine):
    """An engine that must know more of a call than its prompt, as one that relays conversations."""

    knew: str = ""

    async def generate(self, prompt_token_ids: Sequence[int] | base.TokenIds, sampling: SamplingParams) -> Generation:
        self.knew = call_in_hand().id
        return await super().generate(prompt_token_ids, sampling)


class Quoting(ScriptedEngine):
    """An engine that draws nothing and says so."""

    async def generate(self, prompt_token_ids: Sequence[int] | base.TokenIds, sampling: SamplingParams) -> Generation:
        generation = await super().generate(prompt_token_ids, sampling)
        return dataclasses.replace(generation, sampling=sampling.model_copy(update={"given": True}))


def test_what_an_engine_says_it_did_not_draw_stays_marked() -> None:
    with made() as env:
        env.reset()
        for _ in range(2):
            *_, info = env.step(env.unwrapped.sample(Quoting(["a draft"])))  # type: ignore[attr-defined]
    assert [call.sampling.given for call in info["rollout"].tree] == [True, True]


def test_ctrl_c_before_a_step_has_begun_ends_the_episode_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(loop: BackgroundLoop, coroutine: Coroutine[Any, Any, Any]) -> None:
        monkeypatch.undo()
        coroutine.close()
        raise KeyboardInterrupt

    with made() as env:
        env.reset()
        running = env.unwrapped._episode._running  # type: ignore[attr-defined]
        monkeypatch.setattr(BackgroundLoop, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            env.step("one")
        assert running.done()
        with pytest.raises(ResetNeeded):
            env.step("one")


def test_an_engine_that_samples_for_the_caller_knows_the_call_and_a_changed_action_is_a_given_one() -> None:
    engine = Knowing(["a draft"])
    with made() as env:
        _, info = env.reset()
        sampled = env.unwrapped.sample(engine)  # type: ignore[attr-defined]
        assert engine.knew == info["call_id"]
        env.step(f"{sampled} More.")
        tree = env.step("one")[4]["rollout"].tree
    assert tree[0].sampling.given
