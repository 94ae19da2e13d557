"""What Gymnasium's own tools expect of an environment, beside what the tests of single and vector face show."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from env_fakes import FINAL_KEYS, RESET_KEYS, SOUND_TASKS, Other, echo, fragile, keywords
from gymnasium import wrappers
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector as vector_wrappers

import clawgym_env
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.envs.rollout import RolloutEnv
from clawgym_env.envs.rollout_vector import RolloutVectorEnv
from clawgym_env.harness import HarnessAdapter
from clawgym_env.registration import IDS
from clawgym_env.registry import adapter
from clawgym_env.testing import InProcessHarness
from harness_adapters.command import CommandHarness

MINI = "ClawGym-Mini-v0"
STRINGS = {"tasks": "bundled:level=1", "engine": "scripted:x.json", "limits": {"max_calls": 3}}
CLIENT = """
import json, sys, urllib.request
body = {"model": "x", "messages": [{"role": "user", "content": sys.argv[2]}]}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode())
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""
COMMAND = CommandHarness(argv=["python3", "-I", "-S", "-c", CLIENT, "{base_url}", "{instruction}"], memory_mb=256)


@pytest.mark.parametrize("harness", IDS)
def test_every_id_is_made_and_reset_on_a_machine_without_installs(
    harness: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "nothing"))
    given = {"harness": COMMAND} if harness == "command" else {}
    spec = gym.spec(clawgym_env.env_id(harness))
    assert spec.max_episode_steps is None, "a limit of steps would cut before the grade"
    assert spec.nondeterministic
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            contextlib.closing(gym.make(spec, render_mode="ansi", **given)) as env,
            contextlib.closing(gym.make_vec(spec.id, num_envs=2, **given)) as envs,
        ):
            observation, info = env.reset(seed=0)
            assert observation in env.observation_space
            assert info["harness"] in env.unwrapped.harness_names
            assert env.render() == ""
            assert envs.single_observation_space == env.observation_space
            assert envs.single_action_space == env.action_space
            assert envs.reset(seed=0)[0] in envs.observation_space
    assert not list(tmp_path.iterdir())


def test_the_id_of_any_command_says_what_to_pass() -> None:
    with pytest.raises(clawgym_env.ClawGymError, match=r"harness=CommandHarness\(argv="):
        gym.make("ClawGym-Command-v0")


def checked(env_id: str, harness: HarnessAdapter | str, engine: ScriptedEngine) -> None:
    """Have Gymnasium check an environment over the real sandbox, with warnings as errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(env_id, harness=harness, engine=engine, tasks="bundled:family=write_word", render_mode="ansi")
        with contextlib.closing(env):
            check_env(env.unwrapped)
            env.reset(seed=1)
            assert env.step(0)[4]["stop_reason"] == "completed"


@pytest.mark.parametrize("harness", ["agent-loop", "command"])
def test_check_env_is_clean_on_what_needs_no_install(harness: str) -> None:
    checked(clawgym_env.env_id(harness), COMMAND if harness == "command" else harness, ScriptedEngine(["Done."]))


@pytest.mark.harness
def test_check_env_is_clean_on_a_real_harness() -> None:
    adapter("pi").install(clawgym_env.cache_dir())
    checked("ClawGym-Pi-v0", "pi", ScriptedEngine(["Done."]))


def test_actions_sampled_by_a_seeded_space_repeat() -> None:
    policies = {name: ScriptedEngine(echo) for name in "abcde"}
    with contextlib.closing(gym.make(MINI, **keywords(engine=None, policies=policies))) as env:
        drawn = []
        for _ in range(2):
            env.action_space.seed(5)
            drawn.append([int(env.action_space.sample()) for _ in range(12)])
        assert drawn[0] == drawn[1]
        assert len(set(drawn[0])) > 1
        assert env.unwrapped.policy_names == tuple("abcde")


def test_a_limit_of_steps_changes_nothing_but_the_flag_of_truncation() -> None:
    with contextlib.closing(gym.make(MINI, max_episode_steps=1, **keywords())) as env:
        env.reset()
        _, reward, terminated, truncated, info = env.step(0)
        assert (reward, terminated, truncated, info["graded"]) == (1.0, True, True, True)


def test_stock_wrappers_work() -> None:
    env = gym.make(MINI, render_mode="ansi", **keywords())
    env = wrappers.RecordEpisodeStatistics(wrappers.TransformReward(env, lambda reward: 10.0 * float(reward)))
    env = wrappers.RenderCollection(wrappers.FilterObservation(env, ["instruction", "harness"]))
    with contextlib.closing(env):
        observation, _ = env.reset(seed=0)
        assert set(observation) == {"instruction", "harness"}
        _, reward, _, _, info = env.step(0)
        assert reward == info["episode"]["r"] == 10.0
        assert info["rollout"].reward == 1.0
        frames = env.render()
        assert isinstance(frames, list)
        assert "reward 1.000" in str(frames[-1])


def test_stock_vector_wrappers_work() -> None:
    envs: Any = gym.make_vec(MINI, num_envs=2, **keywords())
    envs = vector_wrappers.RecordEpisodeStatistics(vector_wrappers.TransformReward(envs, lambda rewards: 10 * rewards))
    envs = vector_wrappers.DictInfoToList(vector_wrappers.FilterObservation(envs, ["instruction"]))
    with contextlib.closing(envs):
        observations, infos = envs.reset(seed=0)
        assert [set(info) for info in infos] == [RESET_KEYS] * 2
        assert observations in envs.observation_space
        _, rewards, _, _, infos = envs.step(np.zeros(2, dtype=int))
        assert rewards.tolist() == [info["episode"]["r"] for info in infos] == [10.0, 10.0]
        assert all(set(info) == FINAL_KEYS | {"episode"} for info in infos)
        assert infos[0]["rollout"].task_id == infos[0]["task_id"]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_gymnasiums_own_vectorisation_shows_finished_trees_in_either_mode(mode: AutoresetMode) -> None:
    made = gym.make_vec(
        MINI, num_envs=2, vectorization_mode="sync", vector_kwargs={"autoreset_mode": mode}, **keywords()
    )
    with contextlib.closing(made) as envs:
        before, _ = envs.reset(options={"task_id": "task-3"})
        assert before["instruction"] == ("Say fünf ☃",) * 2
        for _ in range(2):
            observations, rewards, _, _, infos = envs.step(np.zeros(2, dtype=int))
            assert observations in envs.observation_space
            found = clawgym_env.rollouts(infos)
            assert rewards.tolist() == [rollout.reward for rollout in found] == [1.0, 1.0]
            if mode is AutoresetMode.SAME_STEP:
                trees = [one["trace"] for one in infos["final_obs"]]
            else:
                trees = list(observations["trace"])
                envs.reset(options={"reset_mask": np.ones(2, dtype=bool)})
            assert trees == [rollout.tree for rollout in found]


def test_vectorisation_by_processes_is_refused_with_the_cure_and_works_with_it() -> None:
    with pytest.raises(ValueError, match="shared_memory=False"):
        gym.make_vec(MINI, num_envs=2, vectorization_mode="async", **keywords())
    cured = {"shared_memory": False, "autoreset_mode": AutoresetMode.SAME_STEP}
    made = gym.make_vec(MINI, num_envs=2, vectorization_mode="async", vector_kwargs=cured, **keywords())
    with contextlib.closing(made) as envs:
        observations, _ = envs.reset(seed=0, options={"task_id": "task-3"})
        assert observations["instruction"] == ("Say fünf ☃",) * 2
        _, rewards, _, _, infos = envs.step(np.zeros(2, dtype=int))
        assert rewards.tolist() == [1.0, 1.0]
        found = clawgym_env.rollouts(infos)
        assert [one["response"] for one in infos["final_obs"]] == ["fünf ☃"] * 2
        assert all(one["trace"] in envs.single_observation_space["trace"] for one in infos["final_obs"])
        assert [len(rollout.tree) for rollout in found] == [1, 1]
        assert found[0].seed != found[1].seed


def test_a_vector_spec_of_strings_survives_json() -> None:
    made = {"num_envs": 4, "group_size": 2, "autoreset_mode": "SAME_STEP"}
    with contextlib.closing(gym.make_vec(MINI, **made, **STRINGS)) as envs:
        assert envs.spec is not None
        text = envs.spec.to_json()
        assert json.loads(text)["kwargs"]["group_size"] == 2
        again = gym.make_vec(gym.envs.registration.EnvSpec.from_json(text))
        with contextlib.closing(again):
            assert again.observation_space == envs.observation_space
            assert again.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
            assert again.reset(seed=1)[1]["task_id"].tolist() == envs.reset(seed=1)[1]["task_id"].tolist()


def test_a_spec_with_live_keywords_says_why_it_cannot_be_json_and_what_to_do() -> None:
    with contextlib.closing(gym.make(MINI, **keywords())) as env:
        assert env.spec is not None
        with pytest.raises(TypeError, match=r"objects for harness, tasks, engine, sandbox, grader\. Give names or"):
            env.spec.to_json()


def test_a_pickled_environment_is_a_new_one_made_with_the_same_keywords() -> None:
    with contextlib.closing(gym.make(MINI, **STRINGS)) as env, contextlib.closing(copied(env)) as again:
        assert isinstance(again.unwrapped, RolloutEnv)
        assert again.spec == env.spec
        assert again.reset(seed=4)[1] == env.reset(seed=4)[1]
    made = gym.make_vec(MINI, num_envs=4, group_size=2, **STRINGS)
    with contextlib.closing(made) as envs, contextlib.closing(copied(envs)) as vector:
        assert isinstance(vector, RolloutVectorEnv)
        assert (vector.num_envs, vector.group_size) == (4, 2)
        assert vector.reset(seed=4)[1]["task_id"].tolist() == envs.reset(seed=4)[1]["task_id"].tolist()


def copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def test_a_deep_copy_has_the_live_engine_and_an_episode_of_its_own() -> None:
    engine = ScriptedEngine(echo)
    with contextlib.closing(gym.make(MINI, **keywords(engine=engine)).unwrapped) as env:
        env.reset(seed=0)
        with contextlib.closing(copy.deepcopy(env)) as again:
            with pytest.raises(ResetNeeded):
                again.step(0)
            engine.update_weights(lambda: None)
            again.reset(seed=0)
            assert again.step(0)[4]["policy_version"] == 1
        env.step(0)


def test_what_a_step_returns_can_be_pickled() -> None:
    with contextlib.closing(gym.make(MINI, **keywords())) as env:
        env.reset(options={"task_id": "task-3"})
        observation, *_, info = env.step(0)
        again, told = copied((observation, info))
        assert again in env.observation_space
        assert copied(env.observation_space) == env.observation_space
        assert again["response"] == "fünf ☃"
        assert (told["rollout"].id, told["rollout"].grade) == (info["rollout"].id, info["rollout"].grade)
        assert np.array_equal(again["trace"].history(0), observation["trace"].history(0))
        assert [json.loads(json.dumps(env.observation_space.to_jsonable([one]))) for one in (again, observation)] == [
            json.loads(json.dumps(env.observation_space.to_jsonable([observation])))
        ] * 2


def test_vector_options_choose_the_harnesses_of_groups() -> None:
    harnesses = [InProcessHarness(fragile), Other(fragile)]
    made = gym.make_vec(MINI, num_envs=4, group_size=2, **keywords(harness=harnesses, tasks=SOUND_TASKS))
    with contextlib.closing(made) as envs:
        _, infos = envs.reset(seed=0, options={"harnesses": ["other", "in-process"]})
        assert infos["harness"].tolist() == ["other", "other", "in-process", "in-process"]
        with pytest.raises(ValueError, match="in-process, other, got 'nothing'"):
            envs.reset(options={"harnesses": ["nothing", None]})
        with pytest.raises(ValueError, match="reset_mask, task_ids, harnesses, got harness"):
            envs.reset(options={"harness": ["other", "other"]})
