"""The asynchronous training loop: rollouts go on while the learner updates, within a bound on how old they may be.

The environments keep all their sandboxes busy across groups and updates; the learner takes complete groups as they
come. Invariant: no token that was sampled more than `max_staleness` weight updates ago is trained. An update waits for
groups that it would make too old: to drop them would drop the long rollouts, which are the bad ones, and teach a policy
to ramble. What is too old all the same ends in the bucket `stale`, in the store too, and is counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import numpy.typing as npt

from clawgym_env.messages import Json
from clawgym_env.rollout import Rollout
from clawgym_env.runner import group_of
from clawgym_env.trace.prefix_tree import Selection
from learners.base import TrainsCalls
from learners.rows import exclusion_under
from learners.run_state import TrainingError
from learners.trainer import Trainer


@dataclass(eq=False)
class AsyncTrainer(Trainer):
    """Trains on groups as they complete; settings beyond these as of `Trainer`.

    A batch is as many groups as a step of the environments would be, and those that the update had to wait for. A run
    that goes on repeats the stored batches as they were composed; what comes after depends on which rollouts end first,
    as in any asynchronous run.
    """

    _: KW_ONLY
    max_staleness: int = 2
    """Weight updates (`Engine.policy_version` counts them) between a token's sampling and its training. With 0 an
    update waits for nothing: all that runs meanwhile becomes stale."""
    selection: Selection | None = None
    """Which calls' tokens count for that. None: those that the learner trains; only one of your own needs telling."""
    _stream: Generator[Rollout, None, None] | None = field(default=None, init=False)
    _start: dict[str, Json] | None = field(default=None, init=False)
    """Where the environments stood before the first group: all groups that no batch has taken come after it."""
    _open: dict[str, list[Rollout]] = field(default_factory=dict, init=False)
    """Finished rollouts whose siblings still run, by group."""
    _begun: dict[str, int] = field(default_factory=dict, init=False)
    """The policy version at which each group began that is not complete."""
    _complete: list[list[Rollout]] = field(default_factory=list, init=False)
    _rise: int = field(default=1, init=False)
    """Weight updates per batch: what the learner says, or the most it has taken."""
    _version: int | None = field(default=None, init=False)
    """Of the policy at the batch before."""
    _selection: Selection = field(default=Selection(), init=False)

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise TrainingError(f"Expected max_staleness of at least 0, got {self.max_staleness}.")
        if isinstance(self.learner, TrainsCalls):
            self._rise, self._selection = self.learner.updates_per_batch, self.learner.selection
            if self.selection not in (None, self._selection):
                raise TrainingError(f"Expected the learner's selection, {self._selection}, got {self.selection}.")
            self._require_room()
        self._selection = self.selection or self._selection
        super().__post_init__()
        start = self._envs.state_dict()
        if self._state.update and start["seed"] is not None:
            self._start = start

    def run(self) -> list[dict[str, float]]:
        """Train as `Trainer.run` does; rollouts that still run at the end are cancelled and their sandboxes closed."""
        try:
            return super().run()
        finally:
            if self._stream is not None:
                self._stream.close()

    def _sample(self, update: int) -> tuple[Sequence[Rollout], dict[str, float]]:
        if self._start is None:  # before stored batches are repeated, too: a checkpoint says where those began
            self.envs.reset(seed=self.seed)
            self._start = self._envs.state_dict()
        version = self.learner.engine().policy_version
        if self._version is not None and not isinstance(self.learner, TrainsCalls):
            self._rise = max(self._rise, version - self._version)
            self._require_room()
        self._version = version
        if (recorded := self._state.recorded.get(update)) is not None:
            batch = [self._state.store.load(rollout_id) for rollout_id in recorded]
        else:
            batch = sorted(self._gather(), key=lambda rollout: (rollout.group_id, rollout.index))
        return batch, self._staleness(batch)

    def _gather(self) -> list[Rollout]:
        """Wait for enough groups that are not stale, and for all that would be too old after the next update.

        Those that are stale go along, to be counted and not trained.
        """
        wanted = self._envs.num_envs // self._envs.group_size
        stream = self._stream = self._stream or self._begin()
        self._complete = [self._dated(group) for group in self._complete]
        while sum(map(_fresh, self._complete)) < wanted or self._next_would_be_stale():
            rollout = next(stream, None)
            if rollout is None:
                raise TrainingError("Expected more rollouts, got the end of them. Were the environments closed?")
            group = self._open.setdefault(rollout.group_id, [])
            group.append(rollout)
            if len(group) == self._envs.group_size:
                self._complete.append(self._dated(self._open.pop(rollout.group_id)))
                self._begun.pop(rollout.group_id, None)
        batch, self._complete = self._complete, []
        return [rollout for group in batch for rollout in group]

    def _begin(self) -> Generator[Rollout, None, None]:
        taken = {group_of(rollout_id) for batch in self._state.store.batches().values() for rollout_id in batch}
        return self._envs.as_completed(None, skip=taken, begun=self._begin_group)

    def _begin_group(self, group_id: str) -> None:
        self._begun[group_id] = self.learner.engine().policy_version

    def _require_room(self) -> None:
        if 0 < self.max_staleness < self._rise:
            raise TrainingError(
                f"Expected max_staleness of 0, or of at least {self._rise}, the weight updates of one batch "
                f"(updates_per_batch), got {self.max_staleness}: what runs during an update would be too old after it."
            )

    def _next_would_be_stale(self) -> bool:
        """Whether a group that runs could be trained now and not after the next update."""
        oldest = self.learner.engine().policy_version - self.max_staleness
        lost = range(oldest, oldest + self._rise)
        return self.max_staleness > 0 and any(begun in lost for begun in list(self._begun.values()))

    def _dated(self, group: Sequence[Rollout]) -> list[Rollout]:
        oldest = self.learner.engine().policy_version - self.max_staleness
        return [
            dataclasses.replace(rollout, exclusion="stale")
            if self._counts(rollout) and (self._versions(rollout) < oldest).any()
            else rollout
            for rollout in group
        ]

    def _counts(self, rollout: Rollout) -> bool:
        return exclusion_under(rollout, self._selection) is None

    def _versions(self, rollout: Rollout) -> npt.NDArray[np.int64]:
        """Return the policy version of every trained token of a rollout."""
        spans = [
            np.full(span.end - span.start, span.version)
            for call in rollout.tree
            if self._selection.bucket(call) == "trained"
            for span in call.policy_versions
        ]
        return np.concatenate(spans) if spans else np.empty(0, dtype=np.int64)

    def _staleness(self, batch: Sequence[Rollout]) -> dict[str, float]:
        versions = [self._versions(rollout) for rollout in batch if self._counts(rollout)]
        ages = self.learner.engine().policy_version - np.concatenate([np.empty(0, dtype=np.int64), *versions])
        return {
            "staleness/mean": float(ages.mean()) if ages.size else 0.0,
            "staleness/max": float(ages.max()) if ages.size else 0.0,
            "staleness/stale_fraction": sum(rollout.exclusion == "stale" for rollout in batch) / len(batch),
            "queue/rollouts_waiting": float(sum(map(len, self._open.values()))),
            "queue/groups_open": float(len(self._open)),
        }

    def _where(self) -> dict[str, Json]:
        return self._start or self._envs.state_dict()


def _fresh(group: Sequence[Rollout]) -> bool:
    return any(rollout.exclusion != "stale" for rollout in group)
