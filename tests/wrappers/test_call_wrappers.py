from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.scripted import ScriptedEngine, ScriptedReply
from clawgym_env.harness import HarnessContext
from clawgym_env.pool import ServedPolicy
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks.task import Task
from clawgym_env.testing import Ask, FakeBackend, InProcessHarness
from clawgym_env.tokenizer import byte_tokenizer
from clawgym_env.wrappers.calls import CallFeatures, RouteCalls

CALL = "ClawGym-Mini-Call-v0"
TASKS = [Task(id="sum", instruction="Add 2 and 3"), Task(id="rhyme", instruction="Rhyme on house")]


async def work(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    """Ask for a plan, then for the answer."""
    await ask(context.instruction)
    return await ask("Now answer.")


def made(**changes: Any) -> gym.Env[Any, Any]:
    given = {"tasks": TASKS, "harness": InProcessHarness(work), "sandbox": FakeBackend(), "grader": lambda *_: 0.5}
    return gym.make(CALL, **{**given, **changes})


def test_each_call_is_answered_by_the_chosen_policy_and_recorded_as_it_was_sampled() -> None:
    cool = ServedPolicy("cool", ScriptedEngine(["cool plan", "cool answer"]), SamplingParams(temperature=0.5))
    warm = ServedPolicy("warm", ScriptedEngine(["warm plan", "warm answer"]))
    warm.engine.update_weights(lambda: None)
    env = RouteCalls(made(), [cool, warm])
    assert env.action_space == gym.spaces.Discrete(2)
    assert env.policy_names == ("cool", "warm")
    env.reset(seed=0)
    prompt, _, _, _, info = env.step(1)
    assert "warm plan" in prompt
    assert info["policy"] == "warm"
    answer, reward, terminated, _, info = env.step(np.int64(0))
    assert (answer, reward, terminated) == ("cool answer", 0.5, True)
    assert info["calls_by_policy"] == {"cool": 1, "warm": 1}
    tree = info["rollout"].tree
    assert [call.sampling.temperature for call in tree] == [1.0, 0.5]
    assert [call.policy_version for call in tree] == [1, 0]
    assert all(call.sampling.trainable and (call.logprobs < 0.0).all() for call in tree)
    env.reset()
    with pytest.raises(ValueError, match="Discrete"):
        env.step(2)
    env.close()


def test_a_policy_that_fails_once_leaves_the_call_to_another_choice_and_twice_ends_the_episode() -> None:
    broken = ScriptedEngine([ScriptedReply("", error="no answer")])
    env = RouteCalls(made(), {"broken": broken, "sound": ScriptedEngine(["fine"])})
    _, info = env.reset()
    call = info["call_id"]
    *_, truncated, info = env.step(0)
    assert (truncated, info["call_id"]) == (False, call)
    env.step(1)
    assert env.step(1)[2]
    env.reset()
    env.step(0)
    _, reward, _, truncated, info = env.step(0)
    assert (reward, truncated, info["stop_reason"], info["graded"]) == (0.0, True, "engine_error", False)
    assert "no answer" in info["rollout"].error
    env.close()


def test_a_policy_of_other_tokens_or_of_a_smaller_window_is_refused_with_the_cure() -> None:
    other = ScriptedEngine(["x"], tokenizer=byte_tokenizer(extra_specials=["<extra>"]))
    narrow = ScriptedEngine(["x"], context_length=100)
    env = RouteCalls(made(), {"narrow": narrow, "same": other})
    env.reset()
    with pytest.raises(ValueError, match="context_length=100"):
        env.step(0)
    env.step(1)  # more words in the vocabulary, but conversations in the same ids
    env.close()
    stranger = ScriptedEngine(["x"])
    stranger.renderer._header = stranger.tokenizer.encode("helper\n")  # type: ignore[attr-defined]
    env = RouteCalls(made(), {"stranger": stranger})
    env.reset()
    with pytest.raises(ValueError, match="Make the environment with policy="):
        env.step(0)
    env.close()


def test_features_show_the_message_that_waits_and_where_the_conversation_is() -> None:
    env = CallFeatures(RouteCalls(made(), {"one": ScriptedEngine(["a", "b"])}), size=32)
    first, _ = env.reset(options={"task_id": "sum"})
    again, _ = env.reset(options={"task_id": "sum"})
    other, _ = env.reset(options={"task_id": "rhyme"})
    assert first.dtype == np.float32
    assert np.array_equal(first, again)
    assert not np.array_equal(first[:32], other[:32])
    answered, length, tool, opens, *kinds = first[32:].tolist()
    assert (answered, tool, opens, kinds) == (0.0, 0.0, 1.0, [1.0, 0.0, 0.0, 0.0])
    second = env.step(0)[0]
    assert second in env.observation_space
    assert second[32] > 0.0
    assert second[33] > length
    assert second[35] == 0.0
    last = env.step(0)[0]
    assert not last.any()
    env.close()


def test_check_env_is_clean_on_the_wrapped_stack() -> None:
    env = CallFeatures(RouteCalls(made(), {"one": ScriptedEngine(["a"])}), size=8)
    with pytest.warns(UserWarning, match="different from the unwrapped version"):
        check_env(env, skip_render_check=True, skip_close_check=True)
    env.close()


def test_wrappers_are_kept_in_the_spec_and_refuse_the_other_clock() -> None:
    env = CallFeatures(RouteCalls(made(), {"one": ScriptedEngine(["a", "b"])}), size=8)
    assert env.spec is not None
    again = gym.make(env.spec)
    again.reset()
    again.step(0)
    assert again.step(0)[4]["calls_by_policy"] == {"one": 2}
    env.close()
    again.close()
    for wrap in (CallFeatures, lambda one: RouteCalls(one, ["tiny"])):
        with pytest.raises(TypeError, match="call clock"):
            wrap(gym.make("ClawGym-Mini-v0"))
    with pytest.raises(ValueError, match="size"):
        CallFeatures(made(), size=0)
