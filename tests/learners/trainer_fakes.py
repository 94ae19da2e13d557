"""A whole training run without processes: scripted answers whose worth depends on the rollout's seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import torch

import clawgym_env
from clawgym_env.envs.rollout_vector import RolloutVectorEnv
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks.task import Task, TaskSet
from clawgym_env.testing import ANSWER_FILE, Ask, FakeBackend, InProcessHarness
from learners.grpo import TreeGRPO
from learners.testing import ScriptedPolicy, small_policy

TASKS = TaskSet.of([Task(id=f"task-{i}", instruction=f"Say something about {i}") for i in range(5)])


async def say_a_digit(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    answer = await ask(f"{context.instruction}: {context.seed % 10}")
    await sandbox.write_file(f"{context.workdir}/{ANSWER_FILE}", answer.encode())
    return answer


def last_digit(prompt: str, turn: int) -> str:
    return next(letter for letter in reversed(prompt) if letter.isdigit())


def digit(task: Task, workspace: Path) -> float:
    return int((workspace / ANSWER_FILE).read_text()) / 9


def make_learner(*, seed: int = 0, latency_s: float = 0.0, **settings: Any) -> TreeGRPO:
    policy = small_policy(seed)
    engine = ScriptedPolicy(policy, last_digit, latency_s=latency_s)
    return TreeGRPO(policy, engine=engine, **{"learning_rate": 0.01, **settings})


def make_envs(learner: Any, run_dir: Path | None, **changes: Any) -> RolloutVectorEnv:
    settings = {
        "num_envs": 6,
        "group_size": 3,
        "tasks": TASKS,
        "harness": InProcessHarness(say_a_digit),
        "engine": learner.engine(),
        "sandbox": FakeBackend(),
        "grader": digit,
        "run_dir": run_dir,
    }
    envs = gym.make_vec(clawgym_env.env_id("mini"), **(settings | changes))
    assert isinstance(envs, RolloutVectorEnv)
    return envs


def weights(learner: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.policy.module.parameters()]


def equal_weights(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))
