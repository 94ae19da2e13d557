"""Train a policy with tree-PPO through an agent harness. With no arguments: the tiny policy, on a laptop's CPU.

One rollout a task: a critic, trained before the policy is, says what to expect of each state.

python examples/train_ppo.py
python examples/train_ppo.py --harness pi --policy smollm2 --num-tasks 16 --num-updates 4
python examples/train_ppo.py --critic separate         # with a trunk of its own
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
from contextlib import closing, suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro

import clawgym_env
from learners.controls import shuffle_rewards
from learners.curve import draw_curve
from learners.held_out import hold_out
from learners.metrics_log import read_metrics
from learners.ppo import TreePPO
from learners.scripts import errors_in_a_line, held_out_reward, load_or_build, prepare, run_folder
from learners.trainer import Trainer
from learners.training_table import COLUMNS, TrainingTable
from learners.value_head import CriticKind


@dataclasses.dataclass
class Args:
    harness: str = "mini"
    """mini, pi, claude-code or openclaw (`clawgym install NAME` for all but mini), with options: claude-code?bare."""
    policy: str = "tiny"
    """tiny, smollm2 or a Hugging Face folder."""
    tasks: str = "bundled:level=1"
    """A task set by name, or a folder in the ClawGym format, whose last `eval_tasks` tasks are then held out."""
    num_updates: int = 16
    num_tasks: int = 64
    """Groups per update."""
    group_size: int = 1
    """Rollouts of each task per update."""
    pretrain_batches: int = 2
    """Batches that the critic learns from before the first update, of the policy as it is."""
    critic: CriticKind = "head"
    """A value head on the policy's trunk, or one with a trunk of its own."""
    eval_every: int = 8
    """Updates between evaluations on held-out tasks; also before the first and after the last. 0: never."""
    eval_tasks: int = 64
    """Tasks held out; 0: none, and no evaluation."""
    learning_rate: float = 2.5e-4
    value_learning_rate: float = 1e-3
    shuffle_rewards: bool = False
    """Permute the rewards of a batch before the update, a control; the logged mean stays the true one."""
    max_concurrency: int = 16
    """Sandboxes alive at once."""
    checkpoint_every: int = 8
    """Updates between checkpoints; 0: only when the run ends, as any run does."""
    seed: int = 0
    output_dir: Path | None = None
    """For metrics.jsonl, tensorboard/, checkpoint/, curve.png and rollouts.sqlite. Default: a new one under runs/."""


def main(args: Args) -> None:
    prepare(args.seed)
    harness = re.sub(r"[^\w.-]+", "-", args.harness)
    name = f"ppo-{harness}-{Path(args.policy).name}-seed{args.seed}{'-shuffled' * args.shuffle_rewards}"
    output_dir = args.output_dir or run_folder(name)

    learner = TreePPO(
        load_or_build(args.policy),
        critic=args.critic,
        learning_rate=args.learning_rate,
        value_learning_rate=args.value_learning_rate,
        normalize_advantages=True,  # a critic that lags behind a policy which gets better would praise all it does
    )
    train_tasks, held_out = hold_out(args.tasks, args.eval_tasks)
    shared = {"harness": args.harness, "engine": learner.engine(), "max_concurrency": args.max_concurrency}
    num_rollouts = args.num_tasks * args.group_size
    grouped = {"num_envs": num_rollouts, "group_size": args.group_size}
    envs = gym.make_vec(clawgym_env.env_id(args.harness), tasks=train_tasks, run_dir=output_dir, **grouped, **shared)
    columns = {name: metric for name, metric in COLUMNS.items() if name != "no signal"}  # groups of one have none
    columns["explained"] = "value/explained_variance"

    with closing(envs), TrainingTable(args.num_updates, columns=columns) as table:
        trainer = Trainer(
            learner,
            envs,
            num_updates=args.num_updates,
            seed=args.seed,
            transform=functools.partial(shuffle_rewards, within_groups=False) if args.shuffle_rewards else None,
            evaluate=held_out_reward(held_out, output_dir / "eval", seed=args.seed, **shared),
            evaluate_every=args.eval_every,
            callbacks=[table],
            checkpoint_every=args.checkpoint_every,
        )
        with suppress(KeyboardInterrupt):  # the trainer has written a checkpoint
            for batch in range(args.pretrain_batches):
                table.doing(f"sampling {num_rollouts} rollouts for the critic")
                envs.reset(seed=None if batch else args.seed + 1_000_000)  # not those of the first updates
                *_, infos = envs.step(np.zeros(num_rollouts, dtype=int))
                table.row(0, learner.pretrain_value(clawgym_env.rollouts(infos)))
            trainer.run()
        asyncio.run(learner.engine().close())
    draw_curve(read_metrics(output_dir), output_dir / "curve.png", title=name)
    print(f"Reward curve: {output_dir / 'curve.png'}\nCheckpoint, good for --policy too: {output_dir / 'checkpoint'}")


if __name__ == "__main__":
    with errors_in_a_line():
        main(tyro.cli(Args))
