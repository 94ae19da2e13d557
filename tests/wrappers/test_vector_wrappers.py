from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from wrapper_fakes import keywords

import clawgym_env
from clawgym_env.wrappers import TaskFeatures as SingleTaskFeatures
from clawgym_env.wrappers.vector import HarnessAction, RewardComponents, TaskFeatures

MIX = "ClawGym-Mix-v0"
IDS = ["short", "long", "broken"]
Modes = pytest.mark.parametrize("mode", ["DISABLED", "SAME_STEP"])


@contextlib.contextmanager
def made(**changes: Any) -> Iterator[Any]:
    with contextlib.closing(gym.make_vec(MIX, **{"num_envs": 3, **keywords(**changes)})) as envs:
        yield envs


@Modes
def test_the_whole_stack_does_to_each_member_what_the_single_forms_do(mode: str) -> None:
    with made(autoreset_mode=mode) as bare:
        envs = TaskFeatures(RewardComponents(HarnessAction(bare), costs={"num_calls": 0.25}), size=16)
        assert envs.single_observation_space.shape == (16,)
        assert envs.observation_space.shape == (3, 16)
        assert envs.action_space == gym.spaces.MultiDiscrete([4, 4, 4])
        before, infos = envs.reset(seed=0, options={"task_ids": IDS})
        assert before in envs.observation_space
        assert before.dtype == np.float32
        assert {key for key in infos if "harness" in key} == set()
        after, rewards, terminations, truncations, infos = envs.step(np.array([0, 3, 2]))
        assert rewards.tolist() == [0.75, 0.25, 0.0]
        assert truncations.tolist() == (~terminations).tolist() == [False, False, True]
        found = clawgym_env.rollouts(infos)
        assert [(one.harness, one.policy) for one in found] == [("first", "yes"), ("second", "no"), ("second", "yes")]
        assert [one.task_id for one in found] == IDS
        if mode == "DISABLED":
            assert np.array_equal(after, before)
            assert infos["harness"].tolist() == ["first", "second", "second"]
        else:
            assert np.array_equal(np.stack(infos["final_obs"]), before)
            assert infos["final_info"]["harness"].tolist() == ["first", "second", "second"]
            assert "harness" not in infos
            again = envs.step(np.zeros(3, dtype=int))[4]["final_obs"]
            assert np.array_equal(np.stack(again), after)


@Modes
def test_members_without_the_harness_action_see_their_harness(mode: str) -> None:
    with made(autoreset_mode=mode) as bare:
        envs = TaskFeatures(bare, size=8)
        features, infos = envs.reset(options={"task_ids": IDS, "harnesses": ["second", None, "first"]})
        assert infos["harness"].tolist()[::2] == ["second", "first"]
        places = [["first", "second"].index(name) for name in infos["harness"]]
        assert features[:, 8:].argmax(axis=1).tolist() == places
        with contextlib.closing(SingleTaskFeatures(gym.make(MIX, **keywords()), size=8)) as single:
            alone, _ = single.reset(options={"task_id": "short", "harness": "second"})
            assert np.array_equal(alone, features[0])


def test_gymnasiums_own_vectorisation_takes_the_single_forms() -> None:
    def one() -> gym.Env[Any, Any]:
        return SingleTaskFeatures(gym.make(MIX, **keywords()), size=8)

    with contextlib.closing(gym.vector.SyncVectorEnv([one, one], autoreset_mode="SameStep")) as envs:
        features, _ = envs.reset(options={"task_id": "long"})
        *_, infos = envs.step(np.zeros(2, dtype=int))
        assert np.array_equal(np.stack(infos["final_obs"]), features)


def test_recorded_statistics_are_of_the_weighed_reward() -> None:
    with made() as bare:
        envs = RecordEpisodeStatistics(RewardComponents(bare, {"right": 4.0}))
        envs.reset(options={"task_ids": ["short", "long", "short"]})
        infos = envs.step(np.array([0, 1, 0]))[4]
        assert infos["episode"]["r"].tolist() == [4.0, 0.0, 4.0]


def test_groups_share_their_harness() -> None:
    with made(num_envs=4, group_size=2) as envs:
        with pytest.raises(ValueError, match="group_size=1, where each rollout has a harness, got 2"):
            HarnessAction(envs)
        envs.reset(seed=0, options={"harnesses": ["first", "first"], "task_ids": ["short", "long"]})
        with pytest.raises(ValueError, match=r"one harness for each group of 2, got \[0, 0, 0, 1\]"):
            envs.choose_harnesses([0, 0, 0, 1])
        with pytest.raises(ValueError, match="4 integers"):
            envs.choose_harnesses(1)
        with pytest.raises(ValueError, match=r"0 \(first\), 1 \(second\), got -1"):
            envs.choose_harnesses([0, 0, -1, -1])
        envs.choose_harnesses([0, 0, 1, 1])
        found = clawgym_env.rollouts(envs.step(np.zeros(4, dtype=int))[4])
        assert [one.harness for one in found] == ["first", "first", "second", "second"]
        assert len({one.seed for one in found}) == 4
        with pytest.raises(ValueError, match="harnesses for 2 groups, got 1"):
            envs.reset(options={"harnesses": ["first"]})


def test_other_vector_environments_have_no_harness_to_choose() -> None:
    with contextlib.closing(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")) as envs:
        with pytest.raises(TypeError, match="rollout clock"):
            HarnessAction(envs)
        with pytest.raises(TypeError, match="with an instruction"):
            TaskFeatures(envs)
