"""What a training script does around its `Trainer`: used by the examples, of use to yours."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

import clawgym_env
from clawgym_env import cache_dir
from clawgym_env.engine.base import Engine
from clawgym_env.envs.service import HarnessLike
from clawgym_env.errors import ClawGymError, PolicyNotBuilt
from clawgym_env.policy import Policy, build_policy, load_policy
from clawgym_env.tasks.task import Task
from learners.trainer import Evaluate

logger = logging.getLogger(__name__)


@contextmanager
def errors_in_a_line() -> Iterator[None]:
    """End the script, where something goes wrong that is raised on purpose, with what it says and exit code 1."""
    try:
        yield
    except ClawGymError as error:
        raise SystemExit(str(error)) from error


def prepare(seed: int) -> None:
    """Seed torch and make it a good neighbour, for the whole process."""
    from transformers.utils.logging import disable_progress_bar

    # Harness processes keep the cores busy while we sample: a second OpenMP thread would spin against them.
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    disable_progress_bar()  # type: ignore[no-untyped-call]


def run_folder(name: str) -> Path:
    """Return a new folder's path under runs/, with the time in its name."""
    return Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"


def load_or_build(spec: str) -> Policy:
    """Load a policy; one of our own that is missing is built first, which takes minutes."""
    with suppress(PolicyNotBuilt):
        return load_policy(spec, cache=cache_dir())
    logger.warning("Policy %r is not built yet: building it once, into %s; a few minutes.", spec, cache_dir())
    build_policy(spec, cache_dir())
    return load_policy(spec, cache=cache_dir())


def held_out_reward(
    tasks: Sequence[Task], folder: Path, *, harness: HarnessLike, engine: Engine, max_concurrency: int, seed: int
) -> Evaluate | None:
    """Return what measures the mean reward on held-out tasks, the same tasks and sampling seeds every time.

    Args:
        tasks: without any there is nothing to measure, None.
        folder: a subfolder is made for each evaluation.
        harness: of several each one's own mean is given too, as `eval/NAME`.
    """

    def evaluate(update: int) -> Mapping[str, float]:
        result = clawgym_env.evaluate(
            tasks,
            harness=harness,
            engine=engine,
            max_concurrency=max_concurrency,
            out=folder / f"{update:06d}",
            seed=seed,
        )
        several = result.by_harness if len(result.by_harness) > 1 else {}
        rewards = {"eval/reward": result.pass_at_1, **{f"eval/{name}": own.pass_at_1 for name, own in several.items()}}
        return {name: reward for name, reward in rewards.items() if reward is not None}

    return evaluate if tasks else None
