"""Train a policy with tree-GRPO through an agent harness. With no arguments: the tiny policy, on a laptop's CPU.

python examples/train_grpo.py
python examples/train_grpo.py --harness pi --policy smollm2 --num-tasks 2 --num-updates 4
python examples/train_grpo.py --engine vllm:http://127.0.0.1:8000     # after: clawgym serve --model tiny
torchrun --nproc-per-node 2 examples/train_grpo.py     # sharded over two processes; rank 0 samples
python examples/train_grpo.py --shuffle-rewards        # the control: must learn nothing
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
from contextlib import closing, suppress
from pathlib import Path

import gymnasium as gym
import tyro

import clawgym_env
from clawgym_env import registry
from learners.controls import shuffle_rewards
from learners.curve import draw_curve
from learners.distributed import lead, torchrun_mesh
from learners.grpo import TreeGRPO
from learners.held_out import hold_out
from learners.metrics_log import read_metrics
from learners.scripts import errors_in_a_line, held_out_reward, load_or_build, prepare, run_folder
from learners.trainer import Trainer
from learners.training_table import TrainingTable


@dataclasses.dataclass
class Args:
    harness: str = "mini"
    """mini, pi, claude-code or openclaw (`clawgym install NAME` for all but mini), with options: claude-code?bare."""
    policy: str = "tiny"
    """tiny, smollm2 or a Hugging Face folder."""
    engine: str | None = None
    """vllm:URL[,URL...] samples the policy at servers of yours, which get its weights after every update."""
    tasks: str = "bundled:level=1-2"
    """A task set by name, or a folder in the ClawGym format, whose last `eval_tasks` tasks are then held out."""
    num_updates: int = 28
    num_tasks: int = 8
    """Groups per update."""
    group_size: int = 8
    """Rollouts of each task per update."""
    eval_every: int = 7
    """Updates between evaluations on held-out tasks; also before the first and after the last. 0: never."""
    eval_tasks: int = 64
    """Tasks held out; 0: none, and no evaluation."""
    learning_rate: float = 2.5e-4
    lora: bool = False
    """Train adapters of rank 16 instead of the weights."""
    shuffle_rewards: bool = False
    """Permute the rewards inside each group before the update, a control; the logged rewards stay the true ones."""
    max_concurrency: int = 16
    """Sandboxes alive at once."""
    checkpoint_every: int = 7
    """Updates between checkpoints; 0: only when the run ends, as any run does."""
    seed: int = 0
    output_dir: Path | None = None
    """For metrics.jsonl, tensorboard/, checkpoint/, curve.png and rollouts.sqlite. Default: a new one under runs/."""


def main(args: Args) -> None:
    prepare(args.seed)
    with torchrun_mesh() as mesh:  # None where torchrun did not start several processes
        policy = load_or_build(args.policy)
        samples = mesh is None or mesh.get_local_rank() == 0
        engine = registry.engine(args.engine, policy=policy) if args.engine and samples else None
        lora = 16 if args.lora else None
        learner = TreeGRPO(policy, learning_rate=args.learning_rate, lora=lora, engine=engine, mesh=mesh)
        lead(learner, functools.partial(train, args))


def train(args: Args, learner: TreeGRPO) -> None:
    harness = re.sub(r"[^\w.-]+", "-", args.harness)
    name = f"{harness}-{Path(args.policy).name}-seed{args.seed}{'-shuffled' * args.shuffle_rewards}"
    output_dir = args.output_dir or run_folder(name)
    train_tasks, held_out = hold_out(args.tasks, args.eval_tasks)
    shared = {"harness": args.harness, "engine": learner.engine(), "max_concurrency": args.max_concurrency}
    grouped = {"num_envs": args.num_tasks * args.group_size, "group_size": args.group_size}
    envs = gym.make_vec(clawgym_env.env_id(args.harness), tasks=train_tasks, run_dir=output_dir, **grouped, **shared)

    with closing(envs), TrainingTable(args.num_updates) as table:
        trainer = Trainer(
            learner,
            envs,
            num_updates=args.num_updates,
            seed=args.seed,
            transform=shuffle_rewards if args.shuffle_rewards else None,
            evaluate=held_out_reward(held_out, output_dir / "eval", seed=args.seed, **shared),
            evaluate_every=args.eval_every,
            callbacks=[table],
            checkpoint_every=args.checkpoint_every,
        )
        with suppress(KeyboardInterrupt):  # the trainer has written a checkpoint
            trainer.run()
        asyncio.run(learner.engine().close())
    draw_curve(read_metrics(output_dir), output_dir / "curve.png", title=name)
    print(f"Reward curve: {output_dir / 'curve.png'}\nCheckpoint, good for --policy too: {output_dir / 'checkpoint'}")


if __name__ == "__main__":
    with errors_in_a_line():
        main(tyro.cli(Args))
