"""A task family: one kind of small job of which any number of instances can be made.

The levels declare families at module level, `bundled_tasks` strings their instances together. Invariant: an instance
is a pure function of (family, split, index); playing its oracle scores 1.0 and doing nothing scores at most 0.1.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files

from clawgym_env.tasks.bundled.expectation import Expectation, expected_json
from clawgym_env.tasks.bundled.vocabulary import Split, Vocabulary
from clawgym_env.tasks.task import Limits, SolutionStep, Task, TaskFile

LIMITS: Mapping[int, Limits] = {
    1: Limits(max_calls=12, grader_s=30.0),
    2: Limits(max_calls=12, grader_s=30.0),
    3: Limits(max_calls=30, grader_s=30.0),
    4: Limits(max_calls=30, grader_s=30.0),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """What a family's function returns: a task without its bookkeeping."""

    instruction: str
    oracle: Sequence[SolutionStep]
    expectations: Sequence[Expectation]
    inputs: Mapping[str, str] = field(default_factory=dict)
    """Text of the files the task starts with, by path."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A task with its solution."""

    task: Task
    oracle: tuple[SolutionStep, ...]


@dataclass(frozen=True, slots=True)
class TaskFamily:
    """One kind of job. Instances are numbered from 0 without end."""

    name: str
    level: int
    """1 (write a word) to 4 (read a CSV and a JSON, write three files)."""
    draft: Callable[[random.Random, Vocabulary], Draft]

    def instance(self, index: int, *, split: Split = "train") -> Instance:
        """Make instance number `index`. Train and held-out instances share no words, names or numbers."""
        if index < 0:
            raise ValueError(f"Expected an index of at least 0, got {index}.")
        rng = random.Random(f"{self.name}/{split}/{index}")
        draft = self.draft(rng, Vocabulary(rng, split))
        expected = expected_json(draft.expectations, tuple(draft.inputs))
        task = Task(
            id=f"{self.name}-{split}-{index:06d}",
            instruction=draft.instruction,
            files=tuple(TaskFile(path=path, data=text.encode()) for path, text in draft.inputs.items()),
            hidden_files=(*checker_files(), TaskFile(path="reward/expected.json", data=expected)),
            limits=LIMITS[self.level],
            metadata={
                "category": "bundled",
                "grading_type": "automated",
                "family": self.name,
                "level": self.level,
                "split": split,
            },
        )
        return Instance(task, tuple(draft.oracle))


@functools.cache
def checker_files() -> tuple[TaskFile, TaskFile]:
    """Return the two hidden files that every bundled task shares."""
    here = files(__package__)
    return (
        TaskFile(path="reward/reward.sh", data=here.joinpath("reward.sh").read_bytes(), executable=True),
        TaskFile(path="reward/check.py", data=here.joinpath("check.py").read_bytes()),
    )


def write(path: str, content: str) -> SolutionStep:
    """Return the step that writes `content` to `path`."""
    return SolutionStep("write", {"path": path, "content": content})


def read(path: str) -> SolutionStep:
    """Return the step that reads `path`."""
    return SolutionStep("read", {"path": path})
