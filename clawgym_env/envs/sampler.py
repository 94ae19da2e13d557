"""Which task and harness the next group gets, and every seed below it.

Invariant: everything drawn is a function of (seed, position) alone, so that a run repeats its data order, and going
on from a stored `position` gives what an uninterrupted run would have drawn.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clawgym_env.harness import HarnessAdapter
from clawgym_env.tasks.task import Task, TaskSet


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


class GroupSampler:
    """Walks all (task, harness) pairs in a shuffled order, epoch after epoch."""

    def __init__(self, tasks: Sequence[Task], harnesses: Sequence[HarnessAdapter]) -> None:
        if not len(tasks) or not harnesses:
            raise ValueError(f"Expected tasks and harnesses, got {len(tasks)} and {len(harnesses)}.")
        self._tasks = tasks if isinstance(tasks, TaskSet) else TaskSet.of(tasks)
        self._harnesses = harnesses
        self._seedings: Counter[int] = Counter()
        self._order: tuple[int, npt.NDArray[np.int64]] | None = None
        self.seed: int | None = None
        self.position = 0
        """Number of groups drawn since the last seeding."""

    def reseed(self, seed: int) -> None:
        """Start over; the same seed repeats the draws (under group ids of their own)."""
        self.seed, self.position, self._order = seed, 0, None
        self._seedings[seed] += 1

    def draw(self, task_id: str | None = None, harness: str | None = None) -> Draw:
        """Return the next group; a given task or harness replaces the drawn one.

        Raises:
            KeyError: no such task.
            ValueError: no such harness.
        """
        if self.seed is None:
            raise RuntimeError("Expected a seeded sampler. Call reseed first.")
        task_index, harness_index = divmod(self._pair(self.position), len(self._harnesses))
        task = self._tasks[task_index] if task_id is None else self._tasks.by_id(task_id)
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

    def _pair(self, position: int) -> int:
        size = len(self._tasks) * len(self._harnesses)
        epoch, offset = divmod(position, size)
        if self._order is None or self._order[0] != epoch:
            assert self.seed is not None
            self._order = epoch, np.random.default_rng([self.seed, epoch]).permutation(size)
        return int(self._order[1][offset])


def derived_seed(*parts: object) -> int:
    """Return a seed in [0, 2**48) that depends on all parts and nothing else."""
    # 48 bits: exact in a JSON number, whatever a harness does with its seed.
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "big")
