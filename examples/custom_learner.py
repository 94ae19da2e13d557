"""A learner of one's own: in each group, imitate the best rollout. With no arguments: the tiny policy, on a CPU.

python examples/custom_learner.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro

from clawgym_env import Rollout
from learners.advantages import Floats, group_key, group_members
from learners.policy_gradient import PolicyGradientLearner
from learners.registry import make_learner
from learners.scripts import errors_in_a_line, load_or_build, prepare
from learners.trainer import Trainer


class BestOfGroup(PolicyGradientLearner):
    """All a learner has to say is what each rollout is worth; rows, packing, loss and updates are the base's."""

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        """Return 1 for the rollouts that beat another of their group and are beaten by none, 0 for the rest."""
        rewards = np.array([rollout.reward for rollout in rollouts])
        advantages = np.zeros(len(rollouts))
        for members in group_members([group_key(rollout) for rollout in rollouts]).values():
            group = rewards[members]
            advantages[members] = (group == group.max()) & (group > group.min())
        return advantages


@dataclasses.dataclass
class Args:
    learner: str = f"{__name__}:BestOfGroup"
    """Any learner by name (grpo, rloo, reinforce, ppo) or import path."""
    num_updates: int = 12
    num_tasks: int = 8
    group_size: int = 8
    learning_rate: float = 1e-4
    seed: int = 0
    output_dir: Path = Path("runs/custom-learner")
    resume: bool = False
    """Go on with the run in `output_dir`."""


def main(args: Args) -> list[dict[str, float]]:
    prepare(args.seed)
    learner = make_learner(args.learner, load_or_build("tiny"), learning_rate=args.learning_rate)
    envs = gym.make_vec(
        "ClawGym-Mini-v0",
        num_envs=args.num_tasks * args.group_size,
        group_size=args.group_size,
        tasks="bundled:level=1-2",
        engine=learner.engine(),
        run_dir=args.output_dir,
    )
    with closing(envs):
        return Trainer(learner, envs, num_updates=args.num_updates, seed=args.seed, resume=args.resume).run()


if __name__ == "__main__":
    with errors_in_a_line():
        records = main(tyro.cli(Args))
    for record in records:
        print(f"update {record['update']:3.0f}   reward {record['reward/mean']:.3f}")
