from __future__ import annotations

import contextlib
import copy
import warnings
from collections import Counter
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from env_fakes import FINAL_KEYS, RESERVED, RESET_KEYS, SOUND_TASKS, TASKS, Other, echo, fragile, keywords
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

import clawgym_env
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.errors import HarnessNotInstalled, PolicyNotBuilt
from clawgym_env.sandbox.base import Mount
from clawgym_env.testing import FakeBackend, InProcessHarness
from clawgym_env.trace.store import RolloutStore

MINI = "ClawGym-Mini-v0"


def test_one_step_is_one_graded_rollout_with_its_tree() -> None:
    env = gym.make(MINI, **keywords())
    observation, info = env.reset(seed=7)
    assert set(info) == RESET_KEYS
    assert observation["response"] == ""
    assert len(observation["trace"]) == 0
    observation, reward, terminated, truncated, info = env.step(env.action_space.sample())
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert observation in env.observation_space
    assert observation["response"] in observation["instruction"]
    assert observation["trace"] is info["rollout"].tree
    assert info["num_calls"] == len(observation["trace"]) == 1
    env.close()


def test_the_info_keys_are_exactly_the_documented_ones() -> None:
    env = gym.make(MINI, **keywords())
    env.reset()
    info = env.step(0)[4]
    env.close()
    assert set(info) == FINAL_KEYS
    assert not RESERVED & set(info)
    assert not any(key.startswith("_") for key in info)
    assert info["stop_reason"] == "completed"
    assert info["graded"] is True
    assert info["is_success"] is True
    assert info["reward_components"]["right"] == 1.0
    assert info["num_completion_tokens"] == info["rollout"].tree.num_completion_tokens > 0
    assert set(info["timing"]) >= {"open", "harness", "grade", "total"}


def test_check_env_is_clean_with_warnings_as_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(MINI, render_mode="ansi", **keywords())
        check_env(env.unwrapped)
        env.close()


def test_the_passive_checker_is_clean_over_a_whole_episode() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(MINI, disable_env_checker=False, **keywords())
        for seed in (None, 3):
            env.reset(seed=seed)
            env.step(0)
        env.close()


def test_stepping_a_finished_episode_needs_a_reset() -> None:
    env = gym.make(MINI, **keywords())
    with pytest.raises(ResetNeeded):
        env.unwrapped.step(0)
    env.reset()
    env.step(0)
    with pytest.raises(ResetNeeded):
        env.step(0)
    env.reset()
    env.step(0)
    env.close()


def test_the_same_seed_draws_the_same_tasks_and_sampling_seeds() -> None:
    def draws(seed: int) -> list[tuple[str, int, float]]:
        env = gym.make(MINI, **keywords())
        drawn = []
        for i in range(6):
            env.reset(seed=seed if i == 0 else None)
            rollout = env.step(0)[4]["rollout"]
            drawn.append((rollout.task_id, rollout.seed, rollout.reward))
        env.close()
        return drawn

    assert draws(7) == draws(7)
    assert draws(7) != draws(8)
    assert len({task_id for task_id, _, _ in draws(7)[:4]}) == 4, "an epoch shows every task once"
    assert len({seed for _, seed, _ in draws(7)}) == 6


def test_the_constructor_seed_is_used_by_the_first_reset_only() -> None:
    first, second = (gym.make(MINI, **keywords(seed=5)) for _ in range(2))
    order = [first.reset()[1]["task_id"] for _ in range(4)]
    assert order == [second.reset(seed=5 if i == 0 else None)[1]["task_id"] for i in range(4)]
    assert len(set(order)) == 4


def test_a_repeated_seed_repeats_the_draw_under_a_new_group_id() -> None:
    env = gym.make(MINI, **keywords())
    _, one = env.reset(seed=1)
    _, two = env.reset(seed=1)
    assert one["task_id"] == two["task_id"]
    assert one["group_id"] != two["group_id"]


def test_options_choose_task_and_harness() -> None:
    env = gym.make(MINI, **keywords(harness=[InProcessHarness(fragile), Other(fragile)]))
    observation, info = env.reset(options={"task_id": "task-2", "harness": "other"})
    assert (info["task_id"], info["harness"], observation["harness"]) == ("task-2", "other", 1)
    with pytest.raises(KeyError, match="task-0"):
        env.reset(options={"task_id": "nothing"})
    with pytest.raises(ValueError, match="in-process, other"):
        env.reset(options={"harness": "nothing"})
    with pytest.raises(ValueError, match="task_id, harness"):
        env.reset(options={"taskid": "task-2"})


def test_several_harnesses_are_drawn_in_pairs_with_tasks() -> None:
    env = gym.make(MINI, **keywords(harness=[InProcessHarness(fragile), Other(fragile)]))
    pairs = []
    for i in range(8):
        _, info = env.reset(seed=0 if i == 0 else None)
        pairs.append((info["task_id"], info["harness"]))
    assert len(set(pairs)) == 8, "an epoch shows every pair once"


def test_a_non_ascii_instruction_comes_through() -> None:
    env = gym.make(MINI, **keywords())
    observation, _ = env.reset(options={"task_id": "task-3"})
    assert observation["instruction"] == "Say fünf ☃"
    observation, reward, *_ = env.step(0)
    assert reward == 1.0
    assert observation["response"] == "fünf ☃"
    env.close()


def test_the_action_chooses_the_policy() -> None:
    policies = {"parrot": ScriptedEngine(echo), "mute": ScriptedEngine(["no"])}
    env = gym.make(MINI, **keywords(engine=None, policies=policies))
    assert env.action_space == gym.spaces.Discrete(2)
    rewards, names = [], []
    for action in (0, 1, np.int64(0)):
        env.reset()
        _, reward, _, _, info = env.step(action)
        rewards.append(reward)
        names.append(info["rollout"].policy)
    assert rewards == [1.0, 0.25, 1.0]
    assert names == ["parrot", "mute", "parrot"]
    env.reset()
    with pytest.raises(ValueError, match="Discrete"):
        env.step(2)
    env.close()


def test_only_one_kind_of_policy_may_be_given() -> None:
    with pytest.raises(ValueError, match="one of policy, engine and policies"):
        gym.make(MINI, **keywords(policy="tiny"))


def test_an_infrastructure_failure_is_a_truncation_without_a_grade() -> None:
    env = gym.make(MINI, **keywords(tasks=TASKS))
    env.reset(options={"task_id": "task-4"})
    _, reward, terminated, truncated, info = env.step(0)
    assert (reward, terminated, truncated) == (0.0, False, True)
    assert (info["graded"], info["is_success"], info["stop_reason"]) == (False, False, "sandbox_error")
    assert info["rollout"].exclusion == "ungraded"
    assert set(info) == FINAL_KEYS
    env.close()


def test_rendering_shows_nothing_before_a_rollout_and_tree_and_grade_after() -> None:
    env = gym.make(MINI, render_mode="ansi", **keywords())
    env.reset()
    assert env.render() == ""
    info = env.step(0)[4]
    drawn = env.render()
    assert isinstance(drawn, str)
    assert info["rollout"].tree.outline() in drawn
    assert "reward 1.000" in drawn
    env.close()


def test_a_spec_of_strings_survives_json_and_makes_the_same_environment() -> None:
    strings = {"harness": "mini", "tasks": "bundled:level=1", "engine": "scripted:x.json", "limits": {"max_calls": 3}}
    env = gym.make(MINI, **strings)
    assert env.spec is not None
    again = gym.make(gym.envs.registration.EnvSpec.from_json(env.spec.to_json()))
    assert again.spec is not None
    assert again.spec.kwargs == strings
    assert again.observation_space == env.observation_space
    assert again.reset(seed=2)[1] == env.reset(seed=2)[1]


class Uncopyable(ScriptedEngine):
    def __deepcopy__(self, memo: dict[int, object]) -> Uncopyable:
        raise RuntimeError("An engine with threads cannot be copied.")


def test_a_live_engine_survives_copies_of_the_spec() -> None:
    engine = Uncopyable(echo)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(MINI, **keywords(engine=engine)))
    spec = copy.deepcopy(env.spec)
    assert spec is not None
    again = gym.make(spec)
    again.reset()
    assert again.step(0)[4]["rollout"].tree[0].policy_version == 0
    engine.update_weights(lambda: None)
    again.reset()
    assert again.step(0)[4]["policy_version"] == 1, "the copy shares the engine"
    env.close()
    again.close()


def test_episode_statistics_see_one_step_and_the_reward() -> None:
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(MINI, **keywords()))
    env.reset()
    info = env.step(0)[4]
    assert info["episode"]["r"] == 1.0
    assert info["episode"]["l"] == 1
    env.close()


class Absent(InProcessHarness):
    name = "absent"

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        raise HarnessNotInstalled("absent")


def test_what_is_missing_shows_at_the_first_step_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path))
    env = gym.make(MINI, **keywords(harness=Absent()))
    env.reset()
    with pytest.raises(HarnessNotInstalled, match="clawgym install absent"):
        env.step(0)
    env.close()
    env = gym.make(MINI, **keywords(engine=None))
    env.reset()
    with pytest.raises(PolicyNotBuilt, match="clawgym policy build tiny"):
        env.step(0)
    with pytest.raises(PolicyNotBuilt):
        env.step(0)
    env.close()


def test_a_run_directory_holds_every_rollout(tmp_path: Path) -> None:
    env = gym.make(MINI, **keywords(run_dir=str(tmp_path)))
    seen = []
    for i in range(3):
        env.reset(seed=4 if i == 0 else None)
        seen.append(env.step(0)[4]["rollout"])
    env.close()
    with RolloutStore(tmp_path, read_only=True) as store:
        stored = list(store.rollouts())
    assert [rollout.id for rollout in stored] == [rollout.id for rollout in seen]
    for one, other in zip(stored, seen, strict=True):
        assert np.array_equal(one.tree.history(0), other.tree.history(0))
        assert np.array_equal(one.tree[0].logprobs, other.tree[0].logprobs)
        assert one.tree[0].state == other.tree[0].state == "live"


def test_closing_twice_and_without_a_step_is_fine() -> None:
    backend = FakeBackend()
    env = gym.make(MINI, **keywords(sandbox=backend))
    env.close()
    env.close()
    env = gym.make(MINI, **keywords(sandbox=backend))
    env.reset()
    env.step(0)
    env.close()
    env.close()
    assert not backend.alive
    assert backend.most_alive >= 1
    env.reset()
    with pytest.raises(RuntimeError, match="closed"):
        env.step(0)


def test_ids_are_registered_once_and_found_by_harness_name() -> None:
    assert clawgym_env.env_id("claude-code") == "ClawGym-ClaudeCode-v0"
    assert clawgym_env.env_id("claude-code?bare") == "ClawGym-ClaudeCode-v0"
    for harness in ("mini", "pi", "claude-code", "openclaw"):
        spec = gym.spec(clawgym_env.env_id(harness))
        assert spec.nondeterministic
        assert spec.kwargs == {"harness": harness}
    assert gym.spec(clawgym_env.env_id("mix")).kwargs == {"harness": ["mini", "pi"]}
    with pytest.raises(ValueError, match="Did you mean 'openclaw'"):
        clawgym_env.env_id("openclau")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clawgym_env.registration.register_all()


def test_harnesses_come_by_weight() -> None:
    with contextlib.closing(gym.make(MINI, **keywords(harness={InProcessHarness(): 1.0, Other(): 3}))) as env:
        seen = Counter(env.reset(seed=0 if i == 0 else None)[1]["harness"] for i in range(64))
    assert seen == {"in-process": 16, "other": 48}


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(clawgym_env.ClawGymError, match="Did you mean 'mini'"):
        gym.make(MINI, harness="minni", tasks=SOUND_TASKS)
