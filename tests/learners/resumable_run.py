"""A training run without processes, for `test_resumed_training` to kill: `python resumable_run.py FOLDER MODE`."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import torch
from trainer_fakes import make_envs, make_learner

from clawgym_env import RolloutStore
from learners.async_trainer import AsyncTrainer
from learners.grpo import TreeGRPO
from learners.schedules import cosine, linear_warmup
from learners.trainer import Trainer

NUM_UPDATES = 8
SCHEDULE = linear_warmup(3, cosine(NUM_UPDATES))


def train(folder: Path, mode: str, *, latency_s: float = 0.0) -> TreeGRPO:
    learner = make_learner(latency_s=latency_s)
    made = AsyncTrainer if mode == "async" else Trainer
    with closing(make_envs(learner, folder)) as envs:
        made(learner, envs, num_updates=NUM_UPDATES, schedule=SCHEDULE, checkpoint_every=3, resume=True).run()
    return learner


def replay(folder: Path) -> TreeGRPO:
    """Take all stored batches of a run, in order, with a new learner."""
    learner = make_learner()
    with RolloutStore(folder, read_only=True) as store:
        for update, rollout_ids in sorted(store.batches().items()):
            learner.scale_learning_rate(SCHEDULE(update))
            learner.update([store.load(rollout_id) for rollout_id in rollout_ids])
    return learner


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(Path(sys.argv[1]), sys.argv[2], latency_s=0.05)
