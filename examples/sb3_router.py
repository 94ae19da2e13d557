"""A router: PPO and DQN of stable-baselines3 learn which policy, in which harness, suits which task.

This does not train the language model; it learns the decision around it, on 192 rollouts. The two policies are
scripted, so nothing has to be built: one can only write files, the other only edit them, with a tool that only one of
the two harnesses has. Everything else (harnesses, sandboxes, proxy, grading) is real.

pip install 'clawgym[train,sb3]'
python examples/sb3_router.py
python examples/sb3_router.py --shuffle-rewards        # the control: must learn nothing
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.wrappers.vector import TransformReward
from stable_baselines3 import DQN, PPO
from stable_baselines3.common.base_class import BaseAlgorithm

import clawgym_env.wrappers.vector as wrappers
from clawgym_env import Task, TaskFile
from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from learners.sb3 import as_vec_env

NUM_ENVS = 16
HARNESSES = ("mini", "agent-loop")
PRICES = {"num_prompt_tokens": 5e-5}
"""Of the reward: agent-loop describes more tools, so its prompts cost more."""
WRITES = ('Write "{new}" to the file "{file}".', 'Put "{new}" into "{file}", a file to be made.')
EDITS = ('In "{file}", replace "{old}" by "{new}".', 'The file "{file}" says "{old}"; it should say "{new}".')
WORDS = ("amber", "birch", "cobalt", "delta", "ember", "fjord", "garnet", "hazel", "indigo", "juniper", "kelp", "lotus")


@dataclasses.dataclass
class Args:
    algorithms: tuple[Literal["ppo", "dqn"], ...] = ("ppo", "dqn")
    num_rollouts: int = 192
    """Of training, for each algorithm."""
    num_tasks: int = 16
    """Held out, on which all choices are compared."""
    max_concurrency: int = 4
    """Sandboxes alive at once."""
    shuffle_rewards: bool = False
    """Permute the rewards among the rollouts of a step, a control."""
    seed: int = 0


def make_tasks(prefix: str, count: int, seed: int) -> list[Task]:
    """Return tasks that want a file written and tasks that want one edited, by turns."""
    rng = random.Random(seed)
    tasks = []
    for i in range(count):
        old, new = rng.sample(WORDS, 2)
        file = f"{rng.choice(WORDS)}{rng.randrange(100)}.txt"
        instruction = rng.choice(EDITS if i % 2 else WRITES).format(old=old, new=new, file=file)
        files = (TaskFile(path=file, data=f"{old} and more\n".encode()),) if i % 2 else ()
        wanted = {"file": file, "text": f"{new} and more\n" if i % 2 else new}
        tasks.append(Task(id=f"{prefix}-{i}", instruction=instruction, files=files, metadata=wanted))
    return tasks


def grade(task: Task, workspace: Path) -> float:
    """Return 1 where the file is as wanted."""
    file = workspace / str(task.metadata["file"])
    return float(file.is_file() and file.read_text() == task.metadata["text"])


def scripted(tool: str, *arguments: str) -> ScriptedEngine:
    """Return a policy that can do one thing: call a tool with the quoted words of an instruction that has as many."""

    def reply(prompt: str, turn: int) -> str:
        quoted = re.findall(r'"([^"]+)"', prompt.rsplit("<|im_start|>user", 1)[-1])
        if turn or len(quoted) != len(arguments):
            return "That is all I can do."
        return tool_call(tool, **dict(zip(arguments, quoted, strict=True)))

    return ScriptedEngine(reply)


POLICIES = {"writer": ("write", "content", "path"), "editor": ("edit", "path", "old", "new")}
"""The tool that each can call; mini has no edit."""
PPO_SETTINGS = {"learning_rate": 3e-3, "n_steps": 2, "batch_size": 32, "ent_coef": 0.01}
DQN_SETTINGS = {"learning_rate": 1e-3, "learning_starts": 32, "gradient_steps": 32, "batch_size": 64}
MODELS = {"ppo": (PPO, PPO_SETTINGS), "dqn": (DQN, {**DQN_SETTINGS, "exploration_fraction": 0.6})}


def make_envs(tasks: list[Task], num_envs: int, args: Args) -> gym.vector.VectorEnv:
    """Return environments whose action picks harness and policy, and whose observation is the task in numbers."""
    envs = gym.make_vec(
        "ClawGym-Mix-v0",
        num_envs=num_envs,
        max_concurrency=args.max_concurrency,
        tasks=tasks,
        grader=grade,
        harness=HARNESSES,
        policies={name: scripted(*tool) for name, tool in POLICIES.items()},
        seed=args.seed,
    )
    return wrappers.TaskFeatures(wrappers.RewardComponents(wrappers.HarnessAction(envs), costs=PRICES), size=128)


def train(algorithm: str, args: Args) -> BaseAlgorithm:
    """Return a router trained on tasks of its own."""
    model, settings = MODELS[algorithm]
    with closing(make_envs(make_tasks("train", 4 * NUM_ENVS, args.seed), NUM_ENVS, args)) as envs:
        if args.shuffle_rewards:
            envs = TransformReward(envs, np.random.default_rng(args.seed).permutation)
        # Episodes are one step long: gamma weighs only rollouts that infrastructure left without a grade.
        shared = {"gamma": 1.0, "seed": args.seed, "device": "cpu", "policy_kwargs": {"net_arch": [64]}}
        return model("MlpPolicy", as_vec_env(envs), **shared, **settings).learn(args.num_rollouts)


def main(args: Args) -> dict[str, float]:
    """Return the mean reward on held-out tasks of every fixed choice, of choosing at random and of each router."""
    torch.set_num_threads(1)
    tasks = make_tasks("held-out", args.num_tasks, args.seed + 1)
    choices = [f"{policy} in {harness}" for harness, policy in itertools.product(HARNESSES, POLICIES)]
    with closing(make_envs(tasks, args.num_tasks, args)) as envs:

        def play(by: BaseAlgorithm | int) -> float:
            seen, _ = envs.reset(options={"task_ids": [task.id for task in tasks]})
            actions = np.full(len(tasks), by) if isinstance(by, int) else by.predict(seen, deterministic=True)[0]
            return float(np.mean(envs.step(actions)[1]))

        found = {f"always {choice}": play(action) for action, choice in enumerate(choices)}
        best = max(found.values())
        found["random"] = float(np.mean(list(found.values())))  # exactly: every choice was tried on every task
        print(*(f"{name:28} {reward:6.3f}" for name, reward in found.items()), sep="\n", flush=True)
        for algorithm in args.algorithms:
            started = time.perf_counter()
            found[algorithm] = reward = play(train(algorithm, args))
            seconds = time.perf_counter() - started
            print(f"{algorithm:28} {reward:6.3f}   {reward - best:+.3f} against the best fixed choice, {seconds:.0f} s")
    return found


if __name__ == "__main__":
    main(tyro.cli(Args))
