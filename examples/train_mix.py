"""Train one policy through several agent harnesses at once. With no arguments: tiny through mini and real pi, on a CPU.

tiny has never seen pi's prompt, so the run begins with a cold start: the solutions of a few tasks, flawed on purpose,
are played through every harness and imitated. Then tree-GRPO on pairs of task and harness.

clawgym install pi && python examples/train_mix.py
python examples/train_mix.py --harnesses pi            # one of them alone, to compare
python examples/train_mix.py --weights 1 2             # two groups through pi for each one through mini
python examples/train_mix.py --policy runs/NAME/cold_start --demonstrations 0      # from the same start
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from contextlib import closing, suppress
from pathlib import Path

import gymnasium as gym
import tyro

from clawgym_env.policy import Policy, save_policy
from clawgym_env.tasks.loading import load_tasks
from learners.controls import shuffle_rewards
from learners.curve import draw_curve
from learners.demonstrations import demonstrate
from learners.grpo import TreeGRPO
from learners.held_out import hold_out
from learners.metrics_log import read_metrics
from learners.scripts import errors_in_a_line, held_out_reward, load_or_build, prepare, run_folder
from learners.sft import finetune
from learners.tiny import Flaws, spoil
from learners.trainer import Trainer
from learners.training_table import COLUMNS, TrainingTable


@dataclasses.dataclass
class Args:
    harnesses: tuple[str, ...] = ("mini", "pi")
    """Names as of `clawgym install`, with options: "mini?dialect=messages"."""
    weights: tuple[float, ...] = ()
    """How often each harness's groups come; all alike by default."""
    policy: str = "tiny"
    """tiny, smollm2 or a Hugging Face folder."""
    tasks: str = "bundled:level=1"
    """A task set by name or path; the cold start needs one that knows its solutions."""
    demonstrations: int = 64
    """Played through each harness before the first update and imitated; 0: none."""
    epochs: int = 4  # over the demonstrations
    num_updates: int = 10
    num_pairs: int = 16
    """Groups per update, each of one task through one harness."""
    group_size: int = 4
    """Rollouts of each pair per update."""
    eval_every: int = 10
    """Updates between evaluations on held-out tasks; also before the first and after the last. 0: never."""
    eval_tasks: int = 32
    """Tasks held out; each is evaluated through every harness."""
    learning_rate: float = 2.5e-4
    shuffle_rewards: bool = False
    """Permute the rewards inside each group before the update, a control; the logged rewards stay the true ones."""
    max_concurrency: int = 8
    """Sandboxes alive at once."""
    seed: int = 0
    output_dir: Path | None = None
    """For everything the run leaves. Default: a new one under runs/."""


def main(args: Args) -> None:
    prepare(args.seed)
    name = f"mix-{Path(args.policy).name}-seed{args.seed}{'-shuffled' * args.shuffle_rewards}"
    output_dir = args.output_dir or run_folder(name)
    learner = TreeGRPO(load_or_build(args.policy), learning_rate=args.learning_rate)
    train_tasks, held_out = hold_out(args.tasks, args.eval_tasks)
    weights = args.weights or (1.0,) * len(args.harnesses)
    harness = dict(zip(args.harnesses, weights, strict=True))
    shared = {"harness": harness, "engine": learner.engine(), "max_concurrency": args.max_concurrency}
    grouped = {"num_envs": args.num_pairs * args.group_size, "group_size": args.group_size}
    envs = gym.make_vec("ClawGym-Mix-v0", tasks=train_tasks, run_dir=output_dir, **grouped, **shared)
    columns = {**COLUMNS, **{name: f"harness/{name.partition('?')[0]}/reward" for name in args.harnesses}}

    with closing(envs), TrainingTable(args.num_updates, columns=columns) as table:
        trainer = Trainer(
            learner,
            envs,
            num_updates=args.num_updates,
            seed=args.seed,
            transform=shuffle_rewards if args.shuffle_rewards else None,
            evaluate=held_out_reward(held_out, output_dir / "eval", seed=args.seed, **shared),
            evaluate_every=args.eval_every,
            callbacks=[table],
            checkpoint_every=args.eval_every,
        )
        with suppress(KeyboardInterrupt):  # the trainer has written a checkpoint
            if args.demonstrations:
                cold_start(learner.policy, args, output_dir, table)
            trainer.run()
        asyncio.run(learner.engine().close())
    records = read_metrics(output_dir)
    draw_curve(records, output_dir / "curve.png", title=name)
    evaluated = [record for record in records if "eval/reward" in record]
    for record in evaluated[:1] + evaluated[1:][-1:]:
        held_out_rewards = [f"{key} {value:.3f}" for key, value in record.items() if key.startswith("eval/")]
        print(f"After {record['update']} updates: {', '.join(held_out_rewards)}")
    print(f"Reward curve: {output_dir / 'curve.png'}\nCheckpoint, good for --policy too: {output_dir / 'checkpoint'}")


def cold_start(policy: Policy, args: Args, output_dir: Path, table: TrainingTable) -> None:
    tasks, rng = load_tasks(args.tasks), random.Random(args.seed)
    chosen = [tasks[index] for index in range(args.demonstrations)]
    flaws = Flaws(wrong_word=0.45, wrong_file=0.2, left_out=0.1)  # something is left to be gained by reward
    taught = []
    for harness in args.harnesses:
        table.doing(f"playing {len(chosen)} solutions through {harness}")
        taught += demonstrate(
            policy,
            chosen,
            lambda task: spoil(tasks.solution(task) or (), flaws, rng),
            harness=harness,
            run_dir=output_dir / "demonstrations" / harness.partition("?")[0],
            max_concurrency=args.max_concurrency,
        )
    table.doing(f"imitating {len(taught)} rollouts")
    loss = finetune(policy, taught, num_epochs=args.epochs, seed=args.seed)
    save_policy(policy, output_dir / "cold_start")
    table.say(f"Imitated {len(taught)} rollouts down to {loss:.3f} nats a token: {output_dir / 'cold_start'}")


if __name__ == "__main__":
    with errors_in_a_line():
        main(tyro.cli(Args))
