"""Does a long run stay where it got to? 200 updates of one learner on `tiny`, and the curves that would show why not.

`python benchmarks/stability.py --learner grpo` trains asynchronously through mini, so that some tokens are older than
the weights that train on them, with the learning rate of the examples, which never falls. It prints the mean reward of
the last 20 updates beside the best 20 in a row, and draws reward, entropy, importance weight, dead and stale fraction.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gymnasium as gym
import numpy as np
import tyro

import clawgym_env
from learners.async_trainer import AsyncTrainer
from learners.curve import draw_panels
from learners.grpo import TreeGRPO
from learners.held_out import hold_out
from learners.metrics_log import read_metrics
from learners.policy_gradient import PolicyGradientLearner
from learners.ppo import TreePPO
from learners.scripts import load_or_build, prepare, run_folder
from learners.training_table import TrainingTable

WINDOW = 20
PANELS = {
    "reward": ("reward/mean",),
    "entropy (nats)": ("entropy",),
    "TIS weight": ("tis/mean_abs_w_minus_1", "tis/clip_fraction"),
    "fraction": ("harness/mini/dead_fraction", "staleness/stale_fraction"),
    "gradient norm": ("grad/norm",),
}


@dataclass
class Config:
    """What to train."""

    learner: Literal["grpo", "ppo"] = "grpo"
    num_updates: int = 200
    batch: int = 32
    """Rollouts per update: groups of 8 (GRPO), or each of a task of its own (PPO)."""
    learning_rate: float = 2.5e-4
    max_tokens: int = 256
    """Of one reply. Those of the tasks are short, and updates wait for a policy that rambles."""
    max_concurrency: int = 16
    seed: int = 0
    output_dir: Path | None = None


def main(config: Config) -> None:
    prepare(config.seed)
    output_dir = config.output_dir or run_folder(f"stability-{config.learner}")
    policy = load_or_build("tiny")
    learner: PolicyGradientLearner
    if config.learner == "grpo":
        learner, spec, group_size = TreeGRPO(policy, learning_rate=config.learning_rate), "bundled:level=1-2", 8
    else:
        learner = TreePPO(
            policy,
            learning_rate=config.learning_rate,
            value_learning_rate=1e-3,
            normalize_advantages=True,
            # A mean of each rollout's own mean blames a long reply's tokens less, and in a hundred updates it rambles.
            loss_weight="token",
        )
        spec, group_size = "bundled:level=1", 1
    tasks, _ = hold_out(spec, 1)
    envs = gym.make_vec(
        "ClawGym-Mini-v0",
        num_envs=config.batch,
        group_size=group_size,
        tasks=tasks,
        engine=learner.engine(),
        sampling={"max_tokens": config.max_tokens},
        max_concurrency=config.max_concurrency,
        run_dir=output_dir,
    )
    with closing(envs), TrainingTable(config.num_updates) as table:
        if isinstance(learner, TreePPO):
            for batch in range(4):
                envs.reset(seed=None if batch else config.seed + 1_000_000)
                *_, infos = envs.step(np.zeros(config.batch, dtype=int))
                learner.pretrain_value(clawgym_env.rollouts(infos))
        trainer = AsyncTrainer(
            learner, envs, num_updates=config.num_updates, seed=config.seed, callbacks=[table], checkpoint_every=50
        )
        with suppress(KeyboardInterrupt):  # what there is so far is drawn
            trainer.run()
        asyncio.run(learner.engine().close())
    records = read_metrics(output_dir)
    draw_panels(records, output_dir / "stability.png", PANELS, title=f"{config.learner}, seed {config.seed}")
    rewards = np.array([record["reward/mean"] for record in records if "reward/mean" in record])
    window = min(WINDOW, len(rewards))
    means = np.convolve(rewards, np.full(window, 1 / window), mode="valid")
    figures = {"updates": len(rewards), "first": means[0], "best": means.max(), "last": means[-1]}
    print(json.dumps(figures | {"fell_by": means.max() - means[-1], "curves": str(output_dir / "stability.png")}))


if __name__ == "__main__":
    main(tyro.cli(Config))
