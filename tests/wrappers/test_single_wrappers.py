from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from wrapper_fakes import SOUND, TASKS, First, fragile, keywords

from clawgym_env.wrappers import HarnessAction, RewardComponents, TaskFeatures
from clawgym_env.wrappers.hashing import hashed_text

MIX = "ClawGym-Mix-v0"


@pytest.fixture
def env() -> Iterator[gym.Env[Any, Any]]:
    with contextlib.closing(gym.make(MIX, **keywords())) as made:
        yield made


def test_features_are_the_hashed_instruction_and_the_harness_before_and_after_the_step(env: gym.Env[Any, Any]) -> None:
    wrapped = TaskFeatures(env, size=32)
    features, info = wrapped.reset(seed=0, options={"task_id": "long", "harness": "second"})
    assert wrapped.observation_space == gym.spaces.Box(-1.0, 1.0, (34,), np.float32)
    assert features in wrapped.observation_space
    assert np.array_equal(features[:32], hashed_text("Say fünf ☃ twice", 32))
    assert features[32:].tolist() == [0.0, 1.0]
    after, *_, info = wrapped.step(0)
    assert np.array_equal(after, features)
    assert info["rollout"].task_id == "long"


def test_features_need_an_instruction_and_a_size(env: gym.Env[Any, Any]) -> None:
    with pytest.raises(ValueError, match="size >= 1, got 0"):
        TaskFeatures(env, size=0)
    with pytest.raises(TypeError, match="with an instruction"):
        TaskFeatures(gym.wrappers.FilterObservation(env, ["harness"]))


def test_the_reward_is_a_weighted_sum_less_the_costs_and_the_grade_stays(env: gym.Env[Any, Any]) -> None:
    costs = {"num_calls": 0.1, "num_completion_tokens": 0.01, "num_prompt_tokens": 0.001, "seconds": 0.0}
    wrapped = RewardComponents(env, {"reward": 2.0, "length": -0.5, "right": 3.0}, costs=costs)
    wrapped.reset(seed=0, options={"task_id": "short"})
    *_, info = wrapped.step(0)
    rollout = info["rollout"]
    wrapped.reset(options={"task_id": "short"})
    _, reward, *_, info = wrapped.step(0)
    spent = 0.1 + 0.01 * info["num_completion_tokens"] + 0.001 * info["num_prompt_tokens"]
    assert reward == pytest.approx(2.0 * 1.0 - 0.5 * 3 + 3.0 * 1.0 - spent)
    assert info["rollout"].reward == rollout.reward == 1.0
    assert info["is_success"] is True


def test_without_weights_the_reward_is_the_grade_and_seconds_can_be_charged(env: gym.Env[Any, Any]) -> None:
    wrapped = RewardComponents(env, costs={"seconds": 1.0})
    wrapped.reset(options={"task_id": "short"})
    _, reward, *_, info = wrapped.step(1)
    assert reward == pytest.approx(0.5 - info["timing"]["total"])


def test_no_part_of_the_grade_is_a_choice_too(env: gym.Env[Any, Any]) -> None:
    wrapped = RewardComponents(env, {}, costs={"num_calls": 1.0})
    wrapped.reset(options={"task_id": "short"})
    _, reward, *_, info = wrapped.step(1)
    assert reward == -info["num_calls"]


def test_a_rollout_without_a_grade_costs_nothing(env: gym.Env[Any, Any]) -> None:
    wrapped = RewardComponents(env, {"nothing": 1.0}, costs={"num_calls": 5.0})
    wrapped.reset(options={"task_id": "broken"})
    _, reward, terminated, truncated, info = wrapped.step(0)
    assert (reward, terminated, truncated, info["graded"]) == (0.0, False, True, False)


def test_unknown_costs_and_parts_are_named_with_the_known_ones(env: gym.Env[Any, Any]) -> None:
    with pytest.raises(ValueError, match="num_calls, num_prompt_tokens, num_completion_tokens, seconds, got tokens"):
        RewardComponents(env, costs={"tokens": 1.0})
    wrapped = RewardComponents(env, {"wrong": 1.0})
    wrapped.reset(options={"task_id": "short"})
    with pytest.raises(ValueError, match="to have wrong, got length, reward, right"):
        wrapped.step(0)


def test_an_action_picks_harness_and_policy(env: gym.Env[Any, Any]) -> None:
    wrapped = HarnessAction(env)
    assert wrapped.choices == (("first", "yes"), ("first", "no"), ("second", "yes"), ("second", "no"))
    assert wrapped.action_space == gym.spaces.Discrete(4)
    for action, choice in enumerate(wrapped.choices):
        observation, info = wrapped.reset(options={"task_id": "short", "harness": "first"})
        assert observation in wrapped.observation_space
        assert set(observation) == {"instruction", "response", "trace"}
        assert set(info) == {"task_id", "group_id"}
        observation, _, _, _, info = wrapped.step(np.int64(action))
        assert observation in wrapped.observation_space
        assert (info["rollout"].harness, info["rollout"].policy) == choice
    wrapped.reset(options={"task_id": "short"})
    for action in (4, -1, 1.5):
        with pytest.raises(ValueError, match=r"Discrete\(4\), got"):
            wrapped.step(action)


def test_choosing_a_harness_keeps_task_and_group_and_gives_seeds_of_its_own(env: gym.Env[Any, Any]) -> None:
    base: Any = env.unwrapped
    seeds = []
    for harness in (0, 1, 1):
        _, info = env.reset(seed=3, options={"task_id": "short", "harness": "first"})
        base.choose_harness(harness)
        *_, final = env.step(0)
        assert (final["task_id"], final["group_id"]) == (info["task_id"], info["group_id"])
        seeds.append(final["rollout"].seed)
    assert seeds[0] != seeds[1] == seeds[2]
    with pytest.raises(ResetNeeded):
        base.choose_harness(0)
    env.reset()
    with pytest.raises(ValueError, match=r"0 \(first\), 1 \(second\), got 2"):
        base.choose_harness(2)


def test_the_harness_is_no_feature_where_the_action_picks_it(env: gym.Env[Any, Any]) -> None:
    wrapped = TaskFeatures(HarnessAction(env), size=16)
    features, _ = wrapped.reset(options={"task_id": "short"})
    assert features.shape == (16,)
    with pytest.raises(TypeError, match="with a harness"):
        HarnessAction(TaskFeatures(env))
    with pytest.raises(TypeError, match="rollout clock"):
        HarnessAction(gym.make("CartPole-v1"))


def test_wrapped_environments_pass_gymnasiums_checker_and_can_be_made_again() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = gym.make(MIX, **keywords(tasks=[TASKS.by_id(name) for name in SOUND]))
        env = TaskFeatures(RewardComponents(HarnessAction(made), costs={"num_calls": 0.1}), size=8)
        assert env.spec is not None
        again = gym.make(env.spec)
        assert again.observation_space == env.observation_space
        assert again.action_space == env.action_space
        again.close()
        with contextlib.closing(Unwrapped(env)) as whole:
            check_env(whole, skip_render_check=True)


class Unwrapped(gym.Env[Any, Any]):
    """A wrapped environment as one, for a checker that looks beneath wrappers."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        self.env, self.spec, self.metadata = env, env.spec, env.metadata
        self.observation_space, self.action_space = env.observation_space, env.action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        return self.env.step(action)

    def close(self) -> None:
        self.env.close()


def test_one_harness_makes_a_choice_of_policies() -> None:
    with contextlib.closing(HarnessAction(gym.make(MIX, **keywords(harness=First(fragile))))) as env:
        assert env.choices == (("first", "yes"), ("first", "no"))
