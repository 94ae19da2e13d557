from __future__ import annotations

import contextlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import TransformReward
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy

from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.errors import SandboxError
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks.task import Limits, Task
from clawgym_env.testing import Ask, FakeBackend, InProcessHarness, answer_once
from clawgym_env.wrappers import TaskFeatures as SingleTaskFeatures
from clawgym_env.wrappers.hashing import hashed_text
from clawgym_env.wrappers.vector import TaskFeatures
from learners.sb3 import as_vec_env

MINI = "ClawGym-Mini-v0"
ROOT = Path(__file__).parents[2]
TASKS = [Task(id=name, instruction=f"Say {name}") for name in ("fine", "endless", "broken")]
Modes = pytest.mark.parametrize("mode", ["DISABLED", "SAME_STEP"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


async def act(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    if "broken" in context.instruction:
        raise SandboxError("The machine is gone.")
    while "endless" in context.instruction:
        await ask("Go on.")
    return await answer_once(ask, sandbox, context)


def keywords(**changes: Any) -> dict[str, Any]:
    return {
        "tasks": TASKS,
        "harness": InProcessHarness(act),
        "policies": {"good": ScriptedEngine(["yes"]), "bad": ScriptedEngine(["no"])},
        "sandbox": FakeBackend(),
        "grader": lambda task, workspace: 0.75,
        "limits": Limits(max_calls=2),
        **changes,
    }


@Modes
def test_a_step_is_told_in_the_words_of_stable_baselines(mode: str) -> None:
    bare = gym.make_vec(MINI, num_envs=3, autoreset_mode=mode, **keywords())
    with contextlib.closing(as_vec_env(TaskFeatures(bare, size=8))) as envs:
        assert envs.observation_space == gym.spaces.Box(-1.0, 1.0, (9,), np.float32)
        assert envs.action_space == gym.spaces.Discrete(2)
        envs.set_options({"task_ids": ["fine", "endless", "broken"]})
        first = envs.reset()
        assert [info["task_id"] for info in envs.unwrapped.reset_infos] == ["fine", "endless", "broken"]
        after, rewards, dones, infos = envs.step(np.zeros(3, dtype=int))
    assert after.shape == first.shape == (3, 9)
    assert rewards.dtype == np.float32
    assert rewards.tolist() == [0.75, 0.75, 0.0]
    assert dones.all()
    # The budget's cut has a grade and is final; only what infrastructure cut off is left to the value function.
    assert [info["stop_reason"] for info in infos] == ["completed", "max_calls", "sandbox_error"]
    assert [info["TimeLimit.truncated"] for info in infos] == [False, False, True]
    assert np.array_equal(np.stack([info["terminal_observation"] for info in infos]), first)
    assert [info["is_success"] for info in infos] == [False] * 3
    assert [info["episode"]["r"] for info in infos] == [0.75, 0.75, 0.0]
    assert [info["episode"]["l"] for info in infos] == [1] * 3
    assert [info["rollout"].task_id for info in infos] == ["fine", "endless", "broken"]
    assert type(infos[0]["graded"]) is bool
    assert not any(key.startswith(("_", "final")) for info in infos for key in info)


@Modes
def test_the_next_observation_is_of_the_next_task(mode: str) -> None:
    bare = gym.make_vec(MINI, num_envs=2, autoreset_mode=mode, **keywords(tasks=TASKS[:1] + TASKS[1:2]))
    with contextlib.closing(as_vec_env(TaskFeatures(bare, size=64))) as envs:
        envs.seed(3)
        seen = envs.reset()
        for _ in range(2):
            for row, info in zip(seen, envs.unwrapped.reset_infos, strict=True):
                assert np.array_equal(row[:64], hashed_text(f"Say {info['task_id']}", 64))
            ids = [info["task_id"] for info in envs.unwrapped.reset_infos]
            seen, _, _, infos = envs.step(np.zeros(2, dtype=int))
            assert [info["task_id"] for info in infos] == ids


def test_a_seed_repeats_the_tasks() -> None:
    bare = gym.make_vec(MINI, num_envs=3, **keywords())
    with contextlib.closing(as_vec_env(TaskFeatures(bare, size=8))) as envs:
        drawn = []
        for seed in (5, 5, None):
            if seed is not None:
                envs.seed(seed)
            envs.reset()
            drawn.append([info["group_id"].partition("-")[2] + info["task_id"] for info in envs.unwrapped.reset_infos])
        assert drawn[0] == drawn[1] != drawn[2]
        envs.set_options([{}, {"task_ids": []}, {}])
        with pytest.raises(ValueError, match="same reset options"):
            envs.reset()


def test_what_stable_baselines_cannot_read_is_refused_with_the_wrapper_that_helps() -> None:
    envs = gym.make_vec(MINI, num_envs=2, **keywords())
    with pytest.raises(TypeError, match=r"Wrap the environments in clawgym_env\.wrappers\.vector\.TaskFeatures"):
        as_vec_env(envs)
    envs.close()
    envs = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync")
    with pytest.raises(ValueError, match=r"DISABLED or SAME_STEP, got AutoresetMode\.NEXT_STEP"):
        as_vec_env(envs)
    envs.close()


def test_episodes_of_several_steps_end_one_by_one() -> None:
    disabled = {"autoreset_mode": AutoresetMode.DISABLED}
    made = gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync", vector_kwargs=disabled)
    with contextlib.closing(as_vec_env(made)) as envs:
        envs.seed(0)
        envs.reset()
        ended = np.zeros(2, dtype=int)
        for _ in range(60):
            observations, _, dones, infos = envs.step(np.array([0, envs.num_envs % 2]))
            ended += dones
            for done, info, row in zip(dones, infos, observations, strict=True):
                assert ("terminal_observation" in info) == done
                if done:
                    assert np.abs(row).max() <= 0.05, "a fresh episode"
        assert (ended >= 3).all()


def test_it_answers_what_stable_baselines_asks_of_its_members() -> None:
    bare = gym.make_vec(MINI, num_envs=2, render_mode="ansi", **keywords())
    with contextlib.closing(as_vec_env(TaskFeatures(bare, size=8))) as envs:
        assert envs.render_mode == "ansi"
        assert envs.get_attr("group_size", [1]) == [1]
        assert envs.get_attr("policy_names") == [("good", "bad")] * 2
        assert not envs.has_attr("nothing")
        assert envs.env_is_wrapped(gym.Wrapper) == [False, False]
        envs.reset()
        assert envs.env_method("render", indices=0) == [("", "")]
        envs.set_attr("note", 3)
        assert bare.note == 3


def test_its_own_checker_passes_on_the_single_environment() -> None:
    with warnings.catch_warnings(), contextlib.closing(gym.make(MINI, **keywords(tasks=TASKS[:1]))) as env:
        warnings.simplefilter("error")
        check_env(SingleTaskFeatures(env, size=8))


def test_without_the_package_the_command_is_given_and_learners_do_not_import_it() -> None:
    code = """
import sys
import learners, learners.grpo, learners.registry
print("stable_baselines3" in sys.modules)
import importlib.util
find = importlib.util.find_spec
import clawgym_env.extras
clawgym_env.extras.find_spec = lambda name: None if name == "stable_baselines3" else find(name)
try:
    import learners.sb3
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    first, second = done.stdout.splitlines()
    assert first == "False"
    assert second.endswith("Run: pip install 'clawgym[sb3]'")


class Skills(VectorEnv[Any, Any, Any]):
    """What a router decides on, without the rollouts: which of four choices a task of two kinds is worth."""

    metadata = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012
    render_mode = None
    WORTH = np.array([[1.0, 0.0, 0.9, 0.0], [0.0, 0.0, 0.0, 0.9]])

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-1.0, 1.0, (64,), np.float32)
        self.single_action_space = gym.spaces.Discrete(4)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rng = np.random.default_rng(seed)
        self.kinds = np.zeros(num_envs, dtype=int)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
        self.kinds = self._rng.integers(0, 2, self.num_envs)
        numbers = self._rng.integers(0, 100, self.num_envs)
        verbs = ("Write a file named", "Edit what is in")
        texts = [f"{verbs[kind]} {number}.txt" for kind, number in zip(self.kinds, numbers, strict=True)]
        self._seen = np.stack([hashed_text(text, 64) for text in texts])
        return self._seen, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        done = np.ones(self.num_envs, dtype=bool)
        return self._seen, self.WORTH[self.kinds, actions], done, ~done, {}


def ppo(envs: Any) -> PPO:
    return PPO(
        "MlpPolicy",
        envs,
        n_steps=2,
        batch_size=32,
        n_epochs=10,
        learning_rate=3e-3,
        ent_coef=0.01,
        gamma=1.0,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [64]},
    )


def dqn(envs: Any) -> DQN:
    return DQN(
        "MlpPolicy",
        envs,
        learning_rate=1e-3,
        learning_starts=32,
        gradient_steps=16,
        batch_size=64,
        exploration_fraction=0.6,
        gamma=1.0,
        seed=0,
        device="cpu",
        policy_kwargs={"net_arch": [64]},
    )


@pytest.mark.parametrize("make", [ppo, dqn])
@pytest.mark.parametrize("shuffled", [False, True])
def test_a_router_learns_and_from_shuffled_rewards_it_does_not(make: Any, shuffled: bool) -> None:
    training: Any = Skills(16, seed=0)
    if shuffled:
        training = TransformReward(training, np.random.default_rng(0).permutation)
    model: BaseAlgorithm = make(as_vec_env(training))
    model.learn(384)
    mean, _ = evaluate_policy(model, as_vec_env(Skills(64, seed=1)), n_eval_episodes=64, deterministic=True)
    best_fixed = Skills.WORTH.mean(axis=0).max()
    if shuffled:
        assert mean < best_fixed + 0.1
    else:
        assert mean > best_fixed + 0.1
