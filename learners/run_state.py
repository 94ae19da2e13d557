"""What a training run keeps in its run directory, and how it is found again after `kill -9`.

Between a `Trainer` and the disk: `checkpoint/`, the batches in the rollout store, and the metrics. Invariant: the
folder at any moment holds a checkpoint of some update and every batch since, so the last update can be reached again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gymnasium.vector import AutoresetMode, VectorEnv

from clawgym_env.envs.rollout_vector import RolloutVectorEnv
from clawgym_env.errors import ClawGymError
from clawgym_env.messages import Json
from clawgym_env.rollout import Rollout
from learners.base import Learner, TrainsPolicy
from learners.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from learners.metrics_log import FILE, MetricsLog

CHECKPOINT = "checkpoint"
"""In the run directory: good for `--policy` too."""


class TrainingError(ClawGymError):
    """A run cannot begin or go on; the message says what to change."""


class RunState:
    """A run, new or found again; puts learner and environments where its last checkpoint was.

    Raises:
        TrainingError: the directory holds a run and `resume` is not asked for, it holds one that no trainer wrote, or
            there is no directory.
    """

    def __init__(self, learner: Learner, envs: RolloutVectorEnv, *, resume: bool) -> None:
        store = envs.open_store()
        if store is None or envs.run_dir is None:
            raise TrainingError("Expected environments with a run directory, got none. Make them with run_dir=...")
        self.folder = envs.run_dir
        found = has_checkpoint(self.folder / CHECKPOINT)
        if not resume and (found or (self.folder / FILE).exists()):
            raise TrainingError(f"Expected a new run_dir, got {self.folder}, which holds a run. Or say resume=True.")
        self._learner = learner
        self._cursor: Mapping[str, Json] = {"update": 0, "envs": envs.state_dict()}
        if found:
            self._cursor = load_checkpoint(self.folder / CHECKPOINT, learner=learner)
            if "envs" not in self._cursor:
                raise TrainingError(f"Expected a checkpoint that a Trainer wrote, got another in {self.folder}.")
            envs.load_state_dict(cast(dict[str, Json], self._cursor["envs"]))
        self.store = store
        self.recorded = {update: ids for update, ids in store.batches().items() if update > self.update}
        """Batches that were stored after the checkpoint, by update: they are taken again."""
        self._found = found

    @property
    def update(self) -> int:
        """How many updates are taken."""
        return cast(int, self._cursor["update"])

    def open_log(self) -> MetricsLog:
        """Open the metrics; what they hold of updates after the checkpoint is forgotten."""
        self.log = MetricsLog(self.folder, after=self.update if self._found else None)
        return self.log

    def begin(self, update: int, batch: Sequence[Rollout]) -> None:
        """Store what an update is about to be taken on."""
        stale = [rollout.id for rollout in batch if rollout.exclusion == "stale"]
        self.store.add_batch(update, [rollout.id for rollout in batch], stale=stale)

    def end(self, update: int, envs: dict[str, Json]) -> None:
        """Remember that an update is whole, and the state of the environments from which the next one is drawn."""
        self._cursor = {"update": update, "envs": envs}

    def save(self) -> None:
        """Write a checkpoint of where the run stood after the last whole update."""
        policy = self._learner.policy if isinstance(self._learner, TrainsPolicy) else None
        save_checkpoint(self.folder / CHECKPOINT, policy=policy, learner=self._learner, cursor=self._cursor)


def rollout_envs(envs: VectorEnv[Any, Any, Any]) -> RolloutVectorEnv:
    """Return the environments under any wrappers.

    Raises:
        TrainingError: they are not ours, or draw groups that no batch would hold.
    """
    if not isinstance(envs.unwrapped, RolloutVectorEnv):
        raise TrainingError(f"Expected environments of gym.make_vec('ClawGym-...'), got {envs.unwrapped!r}.")
    if (mode := envs.unwrapped.metadata["autoreset_mode"]) is not AutoresetMode.DISABLED:
        raise TrainingError(f"Expected autoreset_mode DISABLED, since a trainer resets before each step, got {mode}.")
    return envs.unwrapped
