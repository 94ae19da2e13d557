"""Train a policy with tree-GRPO through an agent harness. With no arguments: the tiny policy, on a laptop's CPU.

python examples/train_grpo.py
python examples/train_grpo.py --harness pi --policy smollm2 --num-tasks 2 --num-updates 4
python examples/train_grpo.py --shuffle-rewards        # the control: must learn nothing
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro
from transformers.utils.logging import disable_progress_bar

import clawgym_env
from clawgym_env import Task, cache_dir
from clawgym_env.errors import PolicyNotBuilt
from clawgym_env.policy import Policy, build_policy, load_policy
from clawgym_env.tasks.loading import load_tasks
from learners.checkpoint import save_checkpoint
from learners.controls import shuffle_rewards
from learners.curve import draw_curve
from learners.grpo import TreeGRPO
from learners.metrics_log import MetricsLog, read_metrics
from learners.training_table import TrainingTable


@dataclasses.dataclass
class Args:
    harness: str = "mini"
    """mini, pi, claude-code or openclaw (`clawgym install NAME` for all but mini)."""
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
    """Updates between evaluations on held-out tasks; also before the first and after the last."""
    eval_tasks: int = 64
    learning_rate: float = 2.5e-4
    lora: bool = False
    """Train adapters of rank 16 instead of the weights."""
    shuffle_rewards: bool = False
    """Permute the rewards inside each group before the update, a control; the logged rewards stay the true ones."""
    max_concurrency: int = 16
    """Sandboxes alive at once."""
    checkpoint_every: int = 7
    seed: int = 0
    output_dir: Path | None = None
    """For metrics.jsonl, tensorboard/, checkpoint/, curve.png and rollouts.sqlite. Default: a new one under runs/."""


def main(args: Args) -> None:
    # Harness processes keep the cores busy while we sample: a second OpenMP thread would spin against them.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    disable_progress_bar()  # transformers' own, in the middle of ours
    rng = np.random.default_rng(args.seed)
    name = f"{args.harness}-{Path(args.policy).name}-seed{args.seed}{'-shuffled' * args.shuffle_rewards}"
    output_dir = args.output_dir or Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    if (written := output_dir / "metrics.jsonl").exists() and written.stat().st_size:
        raise SystemExit(f"Expected a new --output-dir, got {output_dir}, which holds another run.")

    learner = TreeGRPO(load(args.policy), learning_rate=args.learning_rate, lora=16 if args.lora else None)
    train_tasks, held_out = split(args.tasks, args.eval_tasks)
    env_id, num_rollouts = clawgym_env.env_id(args.harness), args.num_tasks * args.group_size
    shared = {"engine": learner.engine(), "max_concurrency": args.max_concurrency}
    envs = gym.make_vec(
        env_id, num_rollouts, group_size=args.group_size, tasks=train_tasks, run_dir=output_dir, **shared
    )
    eval_envs = gym.make_vec(env_id, len(held_out), tasks=held_out, run_dir=output_dir / "eval", **shared)

    def evaluate() -> dict[str, float]:
        eval_envs.reset(seed=args.seed)  # the same tasks and sampling seeds every time
        *_, infos = eval_envs.step(np.zeros(len(held_out), dtype=int))
        return {"eval/reward": float(np.mean([r.reward for r in clawgym_env.rollouts(infos) if r.graded]))}

    def save(update: int) -> None:
        save_checkpoint(output_dir / "checkpoint", policy=learner.policy, learner=learner, cursor={"update": update})

    done = 0
    with MetricsLog(output_dir) as log, TrainingTable(args.num_updates) as table, closing(envs), closing(eval_envs):
        with suppress(KeyboardInterrupt):
            table.doing("evaluating")
            log.write(0, first := evaluate())
            table.row(0, first)
            for update in range(1, args.num_updates + 1):
                table.doing(f"sampling {num_rollouts} rollouts")
                started = time.perf_counter()
                envs.reset(seed=args.seed if update == 1 else None)  # later ones go on through the tasks
                *_, infos = envs.step(np.zeros(num_rollouts, dtype=int))
                batch = clawgym_env.rollouts(infos)
                sample_s = time.perf_counter() - started

                table.doing("updating")
                envs.unwrapped.store.add_batch(update, [rollout.id for rollout in batch])
                metrics = learner.update(shuffle_rewards(batch, rng) if args.shuffle_rewards else batch)
                metrics["time/sample_s"] = sample_s
                done = update
                if update % args.eval_every == 0 or update == args.num_updates:
                    table.doing("evaluating")
                    metrics |= evaluate()
                log.write(update, metrics)
                table.row(update, metrics)
                if update % args.checkpoint_every == 0:
                    save(update)
        table.doing("done" if done == args.num_updates else f"interrupted after {done} updates")
        save(done)
        asyncio.run(learner.engine().close())
    draw_curve(read_metrics(output_dir), output_dir / "curve.png", title=name)
    print(f"Reward curve: {output_dir / 'curve.png'}\nCheckpoint, good for --policy too: {output_dir / 'checkpoint'}")


def load(spec: str) -> Policy:
    try:
        return load_policy(spec, cache=cache_dir())
    except PolicyNotBuilt:
        print(f"Policy {spec!r} is not built yet: building it once, into {cache_dir()}; a few minutes.")
        build_policy(spec, cache_dir())
        return load_policy(spec, cache=cache_dir())


def split(spec: str, num_eval: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """Return training and held-out tasks; bundled families make held-out instances of their own."""
    tasks = load_tasks(spec)
    name, _, options = spec.partition(":")
    if name == "bundled":
        kept = [option for option in options.split(",") if option.startswith(("level", "family", "seed"))]
        return tasks, load_tasks(f"{name}:{','.join([*kept, 'split=heldout', f'size={num_eval}'])}")
    if len(tasks) <= num_eval:
        raise SystemExit(f"Expected more tasks than --eval-tasks {num_eval}, got {len(tasks)} in {spec}.")
    return tasks[:-num_eval], tasks[-num_eval:]


if __name__ == "__main__":
    main(tyro.cli(Args))
