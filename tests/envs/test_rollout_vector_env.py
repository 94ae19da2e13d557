from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from env_fakes import FINAL_KEYS, RESERVED, RESET_KEYS, TASKS, Other, echo, fragile, keywords
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

import clawgym_env
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.envs.rollout_vector import RolloutVectorEnv
from clawgym_env.errors import SandboxError
from clawgym_env.testing import FakeBackend, InProcessHarness, answer_once

MINI = "ClawGym-Mini-v0"
NOTHING = np.zeros(6, dtype=int)


def make(**changes: Any) -> RolloutVectorEnv:
    envs = gym.make_vec(MINI, **{"num_envs": 6, "group_size": 3, **keywords(**changes)})
    assert isinstance(envs, RolloutVectorEnv)
    return envs


def plain(keys: Any) -> set[str]:
    return {key for key in keys if not key.startswith("_")}


def test_its_single_spaces_equal_those_of_make() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env, envs = gym.make(MINI, **keywords()), make()
    assert envs.single_observation_space == env.observation_space
    assert envs.single_action_space == env.action_space
    observations, _ = envs.reset()
    assert observations in envs.observation_space
    assert envs.action_space.sample() in envs.action_space


def test_two_steps_with_autoreset_disabled() -> None:
    envs = make()
    assert envs.metadata["autoreset_mode"] is AutoresetMode.DISABLED
    for seed in (3, None):
        observations, infos = envs.reset(seed=seed)
        assert plain(infos) == RESET_KEYS
        assert all(len(tree) == 0 for tree in observations["trace"])
        observations, rewards, terminations, truncations, infos = envs.step(NOTHING)
        assert observations in envs.observation_space
        assert rewards.tolist() == [1.0] * 6
        assert terminations.all()
        assert not truncations.any()
        assert plain(infos) == FINAL_KEYS
        assert not RESERVED & set(infos)
        assert all(infos[f"_{key}"].all() for key in FINAL_KEYS)
        found = clawgym_env.rollouts(infos)
        assert [rollout.tree for rollout in found] == list(observations["trace"])
        assert [rollout.task_id for rollout in found] == infos["task_id"].tolist()
    with pytest.raises(ResetNeeded):
        envs.step(NOTHING)
    envs.close()


def test_two_steps_with_same_step_autoreset() -> None:
    envs = make(autoreset_mode="SAME_STEP")
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    observations, before = envs.reset(seed=3)
    for _ in range(2):
        observations, rewards, terminations, _, infos = envs.step(NOTHING)
        assert observations in envs.observation_space
        assert rewards.tolist() == [1.0] * 6
        assert terminations.all()
        assert plain(infos) == RESET_KEYS | {"final_obs", "final_info"}
        assert plain(infos["final_info"]) == FINAL_KEYS
        assert all(len(tree) == 0 for tree in observations["trace"])
        found = clawgym_env.rollouts(infos)
        assert [one["trace"] for one in infos["final_obs"]] == [rollout.tree for rollout in found]
        assert all(one in envs.single_observation_space for one in infos["final_obs"])
        assert [rollout.group_id for rollout in found] == before["group_id"].tolist()
        assert not set(before["group_id"]) & set(infos["group_id"])
        before = infos
    envs.close()


def test_both_autoreset_modes_draw_and_score_the_same() -> None:
    def two_steps(mode: str) -> list[tuple[str, str, int, float]]:
        envs = make(autoreset_mode=mode)
        envs.reset(seed=11)
        found = clawgym_env.rollouts(envs.step(NOTHING)[4])
        if mode == "DISABLED":
            envs.reset()
        found += clawgym_env.rollouts(envs.step(NOTHING)[4])
        envs.close()
        return [(rollout.id, rollout.task_id, rollout.seed, rollout.reward) for rollout in found]

    assert two_steps("DISABLED") == two_steps("SAME_STEP")


@pytest.mark.parametrize("mode", ["NEXT_STEP", "NextStep", AutoresetMode.NEXT_STEP, "sometimes"])
def test_next_step_autoreset_is_refused(mode: AutoresetMode | str) -> None:
    with pytest.raises(ValueError, match="DISABLED or SAME_STEP"):
        make(autoreset_mode=mode)


def test_groups_share_task_harness_and_id_but_not_seeds() -> None:
    envs = make(harness=[InProcessHarness(fragile), Other(fragile)])
    envs.reset(seed=0)
    found = clawgym_env.rollouts(envs.step(NOTHING)[4])
    envs.close()
    for group in (found[:3], found[3:]):
        assert len({(one.task_id, one.harness, one.group_id) for one in group}) == 1
        assert [one.index for one in group] == [0, 1, 2]
    assert found[0].group_id != found[3].group_id
    assert len({one.seed for one in found}) == 6


def test_num_envs_must_be_a_multiple_of_group_size() -> None:
    with pytest.raises(ValueError, match="num_envs=6, group_size=4"):
        make(group_size=4)


@pytest.mark.parametrize("mode", ["DISABLED", "SAME_STEP"])
def test_episode_statistics_see_one_step_and_the_reward(mode: str) -> None:
    envs = RecordEpisodeStatistics(make(autoreset_mode=mode, engine=ScriptedEngine(["fünf ☃"])))
    envs.reset(seed=0)
    for _ in range(2):
        infos = envs.step(NOTHING)[4]
        found = clawgym_env.rollouts(infos)
        assert infos["episode"]["r"].tolist() == [one.reward for one in found]
        assert infos["episode"]["l"].tolist() == [1] * 6
        if mode == "DISABLED":
            envs.reset()
    envs.close()


def test_one_infrastructure_failure_leaves_its_siblings_alone() -> None:
    backend = FakeBackend()
    envs = make(tasks=TASKS, group_size=1, sandbox=backend)
    envs.reset(seed=0, options={"task_ids": ["task-0", "task-4", "task-1", "task-4", "task-2", "task-3"]})
    _, rewards, terminations, truncations, infos = envs.step(NOTHING)
    envs.close()
    bad = np.array([False, True, False, True, False, False])
    assert rewards.tolist() == (~bad).astype(float).tolist()
    assert truncations.tolist() == bad.tolist()
    assert terminations.tolist() == (~bad).tolist()
    assert infos["graded"].tolist() == (~bad).tolist()
    assert infos["reward_components"]["_right"].tolist() == (~bad).tolist()
    assert not backend.alive


def test_a_reset_mask_resets_whole_groups_only() -> None:
    envs = make()
    envs.reset(seed=0)
    envs.step(NOTHING)
    mask = np.array([True] * 3 + [False] * 3)
    observations, infos = envs.reset(options={"reset_mask": mask})
    assert infos["_task_id"].tolist() == mask.tolist()
    assert [len(tree) for tree in observations["trace"]] == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ResetNeeded):
        envs.step(NOTHING)
    _, infos = envs.reset(options={"reset_mask": ~mask, "task_ids": [None, "task-1"]})
    assert infos["task_id"].tolist()[3:] == ["task-1"] * 3
    envs.step(NOTHING)
    with pytest.raises(ValueError, match="whole groups"):
        envs.reset(options={"reset_mask": np.array([True] + [False] * 5)})
    with pytest.raises(ValueError, match="6 booleans"):
        envs.reset(options={"reset_mask": np.zeros(6, dtype=bool)})
    with pytest.raises(ValueError, match="2 groups, got 1"):
        envs.reset(options={"task_ids": ["task-1"]})
    envs.close()


def test_no_more_than_max_concurrency_sandboxes_are_alive() -> None:
    backend = FakeBackend()
    envs = make(max_concurrency=2, sandbox=backend)
    envs.reset()
    envs.step(NOTHING)
    envs.close()
    assert backend.most_alive == 2
    assert not backend.alive


def test_as_completed_yields_whole_groups_and_takes_new_weights_in_between() -> None:
    backend, engine = FakeBackend(), ScriptedEngine(echo, latency_s=0.01)
    envs = make(max_concurrency=2, sandbox=backend, engine=engine)
    found = []
    for rollout in envs.as_completed(12):
        engine.update_weights(lambda: None)
        found.append(rollout)
    envs.close()
    assert len({rollout.id for rollout in found}) == 12
    assert sorted(rollout.index for rollout in found) == sorted([0, 1, 2] * 4)
    assert len({rollout.group_id for rollout in found}) == 4
    assert backend.most_alive == 2
    versions = [rollout.tree[0].policy_version for rollout in found]
    assert versions[0] == 0
    assert versions[-1] > versions[0]
    with pytest.raises(ValueError, match="total=4, group_size=3"):
        envs.as_completed(4)


def test_leaving_as_completed_early_closes_every_sandbox() -> None:
    backend = FakeBackend()
    envs = make(max_concurrency=3, sandbox=backend, engine=ScriptedEngine(echo, latency_s=0.05))
    stream = envs.as_completed(12)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not backend.alive
    envs.reset()
    envs.step(NOTHING)
    envs.close()


def test_actions_choose_policies_one_by_one() -> None:
    policies = {"parrot": ScriptedEngine(echo), "mute": ScriptedEngine(["no"])}
    envs = make(engine=None, policies=policies)
    envs.reset()
    _, rewards, *_ = envs.step(np.array([0, 1, 0, 1, 0, 1]))
    assert rewards.tolist() == [1.0, 0.25] * 3
    envs.reset()
    with pytest.raises(ValueError, match="MultiDiscrete"):
        envs.step(np.array([0, 1]))
    with pytest.raises(ValueError, match="MultiDiscrete"):
        envs.step(np.full(6, 2))
    envs.close()


def test_a_copied_spec_makes_the_same_vector_environment_with_the_same_engine() -> None:
    engine = ScriptedEngine(echo)
    envs = make(engine=engine, autoreset_mode="SAME_STEP")
    again = gym.make_vec(copy.deepcopy(envs.spec))
    assert isinstance(again, RolloutVectorEnv)
    assert (again.num_envs, again.group_size) == (6, 3)
    assert again.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert again.observation_space == envs.observation_space
    engine.update_weights(lambda: None)
    again.reset(seed=0)
    assert again.step(NOTHING)[4]["final_info"]["policy_version"].tolist() == [1] * 6
    again.close()


def test_it_renders_every_rollout() -> None:
    envs = make(render_mode="ansi")
    envs.reset()
    assert envs.render() == ("",) * 6
    envs.step(NOTHING)
    drawn = envs.render()
    assert drawn is not None
    assert all("reward" in text for text in drawn)
    envs.close()


def test_step_before_reset_is_refused() -> None:
    with pytest.raises(ResetNeeded):
        make().step(NOTHING)


def test_non_ascii_instructions_come_through_gymnasiums_own_vectorisation() -> None:
    envs = gym.make_vec(MINI, num_envs=2, vectorization_mode="sync", **keywords())
    observations, _ = envs.reset(options={"task_id": "task-3"})
    assert observations["instruction"] == ("Say fünf ☃",) * 2
    _, rewards, *_ = envs.step(np.zeros(2, dtype=int))
    assert rewards.tolist() == [1.0, 1.0]
    envs.close()


def test_rollouts_reads_the_info_of_a_single_step_too() -> None:
    env = gym.make(MINI, **keywords())
    _, info = env.reset()
    assert clawgym_env.rollouts(info) == []
    info = env.step(0)[4]
    assert clawgym_env.rollouts(info) == [info["rollout"]]
    env.close()


def drawn(envs: RolloutVectorEnv) -> list[str]:
    _, infos = envs.reset()
    return [str(group) for group in infos["group_id"]]


def test_a_restored_environment_draws_what_would_have_come_under_the_same_ids() -> None:
    first, second = make(), make()
    first.reset(seed=4)
    state = first.state_dict()
    second.load_state_dict(state)
    assert drawn(first) == drawn(second)
    assert first.state_dict() == second.state_dict() != state


def test_what_a_run_had_finished_is_loaded_when_it_goes_on_and_run_otherwise(tmp_path: Any) -> None:
    first = make(run_dir=tmp_path)
    first.reset(seed=4)
    state = first.state_dict()
    first.reset()
    found = clawgym_env.rollouts(first.step(NOTHING)[-1])
    first.close()
    second = make(run_dir=tmp_path, engine=ScriptedEngine(["something else"]))
    second.load_state_dict(state)
    second.reset()
    again = clawgym_env.rollouts(second.step(NOTHING)[-1])
    assert [(one.id, one.tree) for one in again] == [(one.id, one.tree) for one in found]
    second.reset()
    assert {one.response for one in clawgym_env.rollouts(second.step(NOTHING)[-1])} == {"something else"}
    with pytest.raises(RuntimeError, match="ran already"):
        second.load_state_dict(state)
    second.close()


def test_a_finished_second_attempt_is_found_too(tmp_path: Any) -> None:
    attempts: list[str] = []

    async def breaks_once(ask: Any, sandbox: Any, context: Any) -> str:
        attempts.append(context.instruction)
        if len(attempts) == 1:
            raise SandboxError("The machine is gone.")
        return await answer_once(ask, sandbox, context)

    changes = {"run_dir": tmp_path, "num_envs": 1, "group_size": 1, "harness": InProcessHarness(breaks_once)}
    first = make(**changes)
    first.reset(seed=1)
    [rollout] = clawgym_env.rollouts(first.step(np.zeros(1, dtype=int))[-1])
    first.close()
    assert rollout.id.endswith("/0~1")
    second = make(**changes)
    second.load_state_dict({"seed": 1, "position": 0})
    second.reset()
    [again] = clawgym_env.rollouts(second.step(np.zeros(1, dtype=int))[-1])
    second.close()
    assert (again.id, len(attempts)) == (rollout.id, 2)


def test_as_completed_without_an_end_skips_the_groups_it_is_told_to() -> None:
    with contextlib.closing(make()) as envs:
        envs.reset(seed=1)
        stream = envs.as_completed(None, skip={"1-000002", "1-000004"})
        with contextlib.closing(stream):
            groups = {next(stream).group_id for _ in range(6)}
        assert groups <= {"1-000003", "1-000005", "1-000006", "1-000007", "1-000008", "1-000009"}
