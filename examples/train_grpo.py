"""Train a policy with tree-GRPO through an agent harness. With no arguments: the tiny policy, on a laptop's CPU.

python examples/train_grpo.py
python examples/train_grpo.py --harness pi --policy smollm2 --num-tasks 2 --num-updates 4
python examples/train_grpo.py --shuffle-rewards        # the control: must learn nothing
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import time
from collections import Counter
from contextlib import closing, suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from transformers.utils.logging import disable_progress_bar

import clawgym_env
from clawgym_env import cache_dir
from clawgym_env.errors import PolicyNotBuilt
from clawgym_env.policy import Policy, build_policy, load_policy
from learners.checkpoint import save_checkpoint
from learners.controls import shuffle_rewards
from learners.curve import draw_curve
from learners.grpo import TreeGRPO
from learners.held_out import hold_out
from learners.interrupts import deferred_interrupt
from learners.metrics_log import MetricsLog, read_metrics
from learners.training_table import TrainingTable


@dataclasses.dataclass
class Args:
    harness: str = "mini"
    """mini, pi, claude-code or openclaw (`clawgym install NAME` for all but mini), with options: claude-code?bare."""
    policy: str = "tiny"
    """tiny, smollm2 or a Hugging Face folder."""
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
    # Harness processes keep the cores busy while we sample: a second OpenMP thread would spin against them.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    disable_progress_bar()  # transformers' own, in the middle of ours
    rng = np.random.default_rng(args.seed)
    harness = re.sub(r"[^\w.-]+", "-", args.harness)
    name = f"{harness}-{Path(args.policy).name}-seed{args.seed}{'-shuffled' * args.shuffle_rewards}"
    output_dir = args.output_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    if (written := output_dir / "metrics.jsonl").exists() and written.stat().st_size:
        raise SystemExit(f"Expected a new --output-dir, got {output_dir}, which holds another run.")

    learner = TreeGRPO(load(args.policy), learning_rate=args.learning_rate, lora=16 if args.lora else None)
    train_tasks, held_out = hold_out(args.tasks, args.eval_tasks)
    evaluating, num_rollouts = bool(args.eval_every and held_out), args.num_tasks * args.group_size
    shared = {"harness": args.harness, "engine": learner.engine(), "max_concurrency": args.max_concurrency}
    grouped = {"num_envs": num_rollouts, "group_size": args.group_size}
    envs = gym.make_vec(clawgym_env.env_id(args.harness), tasks=train_tasks, run_dir=output_dir, **grouped, **shared)
    save = functools.partial(save_checkpoint, output_dir / "checkpoint", policy=learner.policy, learner=learner)

    def evaluate(update: int) -> dict[str, float]:
        if not evaluating or (update % args.eval_every and update != args.num_updates):
            return {}
        table.doing("evaluating")
        out = output_dir / "eval" / f"{update:06d}"  # the same tasks and sampling seeds every time
        result = clawgym_env.evaluate(held_out, out=out, seed=args.seed, **shared)
        return {} if result.pass_at_1 is None else {"eval/reward": result.pass_at_1}

    done, failure = 0, ""
    with MetricsLog(output_dir) as log, TrainingTable(args.num_updates) as table, closing(envs):
        with suppress(KeyboardInterrupt):
            if first := evaluate(0):
                log.write(0, first)
                table.row(0, first)
            for update in range(1, args.num_updates + 1):
                table.doing(f"sampling {num_rollouts} rollouts")
                started = time.perf_counter()
                envs.reset(seed=args.seed if update == 1 else None)  # later ones go on through the tasks
                *_, infos = envs.step(np.zeros(num_rollouts, dtype=int))
                batch = clawgym_env.rollouts(infos)
                sample_s = time.perf_counter() - started
                if not any(rollout.graded for rollout in batch):
                    reasons = dict(Counter(str(rollout.stop_reason) for rollout in batch))
                    failure = f"Expected graded rollouts, got none in update {update}: {reasons}. {batch[0].error}"
                    break
                table.doing("updating")
                envs.unwrapped.store.add_batch(update, [rollout.id for rollout in batch])
                try:
                    with deferred_interrupt():  # what the checkpoint says was done is what the weights have seen
                        metrics = learner.update(shuffle_rewards(batch, rng) if args.shuffle_rewards else batch)
                        metrics["time/sample_s"] = sample_s
                        done = update
                    metrics |= evaluate(update)
                finally:
                    if done == update:
                        log.write(update, metrics)
                table.row(update, metrics)
                if args.checkpoint_every and update % args.checkpoint_every == 0:
                    save(cursor={"update": update})
        table.doing("done" if done == args.num_updates else f"ended after {done} updates")
        save(cursor={"update": done})
        asyncio.run(learner.engine().close())
    if failure:
        raise SystemExit(failure)
    draw_curve(read_metrics(output_dir), output_dir / "curve.png", title=name)
    print(f"Reward curve: {output_dir / 'curve.png'}\nCheckpoint, good for --policy too: {output_dir / 'checkpoint'}")


def load(spec: str) -> Policy:
    with suppress(PolicyNotBuilt):
        return load_policy(spec, cache=cache_dir())
    print(f"Policy {spec!r} is not built yet: building it once, into {cache_dir()}; a few minutes.")
    build_policy(spec, cache_dir())
    return load_policy(spec, cache=cache_dir())


if __name__ == "__main__":
    main(tyro.cli(Args))
