"""Which task and harness the next group gets, and every seed below it.

Invariant: everything drawn is a function of (seed, position) alone, so that a run repeats its data order, and going
on from a stored `position` gives what an uninterrupted run would have drawn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clawgym_env.harness import HarnessAdapter
from clawgym_env.tasks.task import Task, TaskSet

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Draw:
    """What one group of rollouts shares."""

    task: Task
    harness: int
    """Index into the environment's harnesses."""
    group_id: str
    """Unique in the life of an environment."""
    seed: int
    """Of the group; `rollout_seed` makes one for each member."""

    def rollout_seed(self, index: int) -> int:
        """Return the sampling seed of member `index`, in [0, 2**48)."""
        return derived_seed(self.seed, index)

    def with_harness(self, harness: int) -> Draw:
        """Return the same task for another harness, under seeds of its own."""
        if harness == self.harness:
            return self
        return dataclasses.replace(self, harness=harness, seed=derived_seed(self.seed, harness))


class GroupSampler:
    """Walks the (task, harness) pairs in a shuffled order, epoch after epoch.

    An epoch holds every pair of the harness of the largest weight once, and of another harness the share that its
    weight comes to, in each epoch another part: over many epochs a pair comes in proportion to its harness's weight,
    within one. Of a task that only some of the harnesses can do, their pairs come and the others are passed over; one
    that none can do is drawn all the same, so that its step says why.
    """

    def __init__(
        self, tasks: Sequence[Task], harnesses: Sequence[HarnessAdapter], *, weights: Sequence[float] | None = None
    ) -> None:
        """Make a sampler.

        Args:
            weights: of each harness, how often its pairs come; all equal by default. Only their ratios count.

        Raises:
            ValueError: no tasks or harnesses, or weights that are not one positive number for each harness.
        """
        if not len(tasks) or not harnesses:
            raise ValueError(f"Expected tasks and harnesses, got {len(tasks)} and {len(harnesses)}.")
        weights = [1.0] * len(harnesses) if weights is None else list(weights)
        if len(weights) != len(harnesses) or not all(0.0 < weight < math.inf for weight in weights):
            raise ValueError(f"Expected a positive weight for each of {len(harnesses)} harnesses, got {weights}.")
        self._tasks = tasks if isinstance(tasks, TaskSet) else TaskSet.of(tasks)
        self._harnesses = harnesses
        self._shares = [weight / max(weights) for weight in weights]
        self._seedings: Counter[int] = Counter()
        self._epoch: _Epoch | None = None
        self._warned: set[int] = set()
        self.seed: int | None = None
        self.position = 0
        """Number of pairs drawn or passed over since the last seeding."""

    def reseed(self, seed: int) -> None:
        """Start over; the same seed repeats the draws (under group ids of their own)."""
        self.seed, self.position, self._epoch = seed, 0, None
        self._seedings[seed] += 1

    def draw(self, task_id: str | None = None, harness: str | None = None) -> Draw:
        """Return the next group; a given task or harness replaces the drawn one.

        Raises:
            KeyError: no such task.
            ValueError: no such harness.
        """
        if self.seed is None:
            raise RuntimeError("Expected a seeded sampler. Call reseed first.")
        task, harness_index = self._next_pair() if task_id is None else self._next_for(self._tasks.by_id(task_id))
        if harness is not None:
            names = [adapter.name for adapter in self._harnesses]
            if harness not in names:
                raise ValueError(f"Expected a harness out of {', '.join(names)}, got {harness!r}.")
            harness_index = names.index(harness)
        repeat = self._seedings[self.seed] - 1
        group_id = f"{self.seed}{f'+{repeat}' if repeat else ''}-{self.position:06d}"
        seed = derived_seed(self.seed, task.id, self._harnesses[harness_index].name, self.position)
        self.position += 1
        return Draw(task, harness_index, group_id, seed)

    def _next_pair(self) -> tuple[Task, int]:
        while True:
            task_index, harness = self._pair(self.position)
            task = self._tasks[task_index]
            if harness in (able := self._able(task)) or not able:
                return task, harness
            self.position += 1

    def _next_for(self, task: Task) -> tuple[Task, int]:
        _, harness = self._pair(self.position)
        able = self._able(task)
        return task, harness if harness in able or not able else able[harness % len(able)]

    def _able(self, task: Task) -> list[int]:
        """Return the harnesses that can do a task, and warn of one that cannot, once."""
        refusals = [adapter.refusal(task) for adapter in self._harnesses]
        able = [index for index, refusal in enumerate(refusals) if not refusal]
        for index, refusal in enumerate(refusals):
            if refusal and able and index not in self._warned:
                self._warned.add(index)
                name = self._harnesses[index].name
                logger.warning("Tasks like %r are not drawn with %s, only with others: %s", task.id, name, refusal)
        return able

    def _pair(self, position: int) -> tuple[int, int]:
        """Return task and harness of a position. Epochs differ in length, so they are counted from the first on."""
        if self._epoch is None or position < self._epoch.first:
            self._epoch = self._make_epoch(0, 0)
        while position >= self._epoch.first + len(self._epoch.pairs):
            self._epoch = self._make_epoch(self._epoch.number + 1, self._epoch.first + len(self._epoch.pairs))
        return divmod(int(self._epoch.pairs[position - self._epoch.first]), len(self._harnesses))

    def _make_epoch(self, number: int, first: int) -> _Epoch:
        assert self.seed is not None
        num_tasks, num_harnesses = len(self._tasks), len(self._harnesses)
        due = np.empty((num_tasks, num_harnesses), dtype=np.bool_)
        for harness, share in enumerate(self._shares):
            # A pair is due whenever its running total passes a whole number; the tasks start at different fractions.
            phases = np.random.default_rng([self.seed, harness, num_tasks]).permutation(num_tasks) / num_tasks
            due[:, harness] = np.floor((number + 1) * share + phases) > np.floor(number * share + phases)
        pairs = np.flatnonzero(due)
        return _Epoch(number, first, pairs[np.random.default_rng([self.seed, number]).permutation(len(pairs))])


@dataclass(frozen=True, slots=True)
class _Epoch:
    number: int
    first: int
    """Position of its first pair."""
    pairs: npt.NDArray[np.int64]
    """Task index times the number of harnesses, plus the harness's."""


def derived_seed(*parts: object) -> int:
    """Return a seed in [0, 2**48) that depends on all parts and nothing else."""
    # 48 bits: exact in a JSON number, whatever a harness does with its seed.
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big")
