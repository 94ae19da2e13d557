"""What the policy is asked to do: an instruction, a starting workspace and how the result is judged.

Read by loaders, carried through the runner unchanged. Invariant: `files` are all the agent ever sees; `hidden_files`
enter a sandbox only after the harness has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, Union, overload

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from clawgym_env.grading.specs import CommandGrading, Grading
from clawgym_env.sandbox.base import WORKDIR, Image, Mount


class Limits(BaseModel):
    """Budgets of one rollout. A budget cut is graded and trainable; it is not a failure."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_calls: int = Field(default=50, ge=1)
    """Model calls."""
    max_total_tokens: int = Field(default=200_000, ge=1)
    """Sampled tokens over all calls."""
    wall_clock_s: float = Field(default=900.0, gt=0.0, allow_inf_nan=False)
    """From the harness's start to its end."""
    grader_s: float = Field(default=120.0, gt=0.0, allow_inf_nan=False)


class TaskFile(BaseModel):
    """A file of a task: inline bytes, in JSON as base64, or a host path that is read when the sandbox is filled."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    path: str
    """Relative to the workspace, no `..`; of a hidden file also absolute, inside one of the task's `folders`."""
    data: bytes | None = None
    source: Path | None = None
    executable: bool = False
    restored: bool = False
    """An input that a checker trusts: whatever the agent did to it, the grader finds it as it was given."""

    def read(self) -> bytes:
        """Return the file's bytes."""
        if self.data is not None:
            return self.data
        if self.source is None:
            raise ValueError(f"Expected data or source for {self.path!r}, got neither.")
        return self.source.read_bytes()


class McpServer(BaseModel):
    """A tool server of a task. The harness starts it inside the sandbox and speaks MCP to it over stdio."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")
    """Harnesses put it into the names of its tools, such as `mcp__docs__search`."""
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments, run in the workspace. `clawgym:NAME` as program is a bundled server."""
    env: Mapping[str, str] = Field(default_factory=dict)


class Turn(BaseModel):
    """What the user says once the harness has answered what was said before."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    text: str
    new_session: bool = False
    """The harness starts afresh on the same workspace and remembers nothing but what it wrote there."""


class Task(BaseModel):
    """One task. Compare and hash by `id`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    instruction: str
    """What the user says first."""
    turns: tuple[Turn, ...] = ()
    """What the user says after it."""
    files: tuple[TaskFile, ...] = ()
    keep_git_history: bool = False
    """Whether a repository among the files keeps its past and its other branches; see `tasks.git_history`."""
    hidden_files: tuple[TaskFile, ...] = ()
    """Brought in by the grader, relative to the workspace (`reward/…` for ClawGym tasks)."""
    grading: Grading = Field(default=CommandGrading(), discriminator="kind")
    """How the finished workspace becomes a score."""
    grade_in: Literal["fresh", "same"] = "fresh"
    """`fresh`: a copy of the workspace in a sandbox of its own. `same`: the agent's sandbox once every process in it is
    dead, only for tasks whose result is installed state; what the agent changed outside the workspace stays."""
    workdir: str = WORKDIR
    image: Image | None = None
    """None: the sandbox backend's own."""
    folders: tuple[str, ...] = ()
    """As in `SandboxSpec.folders`."""
    mounts: tuple[Mount, ...] = ()
    """Shown read-only to the agent and to the grader: what is too big to copy. Outside the workspace."""
    env: Mapping[str, str] = Field(default_factory=dict)
    """Of every command in the task's sandboxes."""
    memory_mb: int = 2048
    cpus: float = 2.0
    disk_mb: int = 512
    mcp_servers: tuple[McpServer, ...] = ()
    limits: Limits = Limits()
    metadata: Mapping[str, JsonValue] = Field(default_factory=dict)

    def with_limits(self, changes: Mapping[str, float]) -> Task:
        """Return the task with some of its limits, by name, set anew."""
        limits = Limits.model_validate({**self.limits.model_dump(), **changes})
        return self.model_copy(update={"limits": limits})


@dataclass(frozen=True, slots=True)
class SolutionStep:
    """One step of a known solution, in the words of the `oracle` harness."""

    tool: Literal["write", "read", "bash", "copy_in", "answer"]
    """`write` (path, content) a file, `read` (path) one, run a `bash` (command), `copy_in` a host folder (source, path)
    or give the `answer` (text) that the user sees. Paths are relative to the workspace or absolute."""
    arguments: Mapping[str, str]


Solve: TypeAlias = Callable[[Task], "Sequence[SolutionStep] | None"]
"""Finds the solution of a task, if one is known. It stays with the set: a policy might see what a task holds."""


class TaskSet(Sequence[Task]):
    """An ordered, finite collection of tasks with unique ids, made lazily by index.

    Any `Sequence[Task]` is accepted where a task set is expected; this class adds names, selection and solutions.
    """

    def __init__(
        self,
        name: str,
        size: int,
        make: Callable[[int], Task],
        *,
        solve: Solve | None = None,
        ids: Sequence[str] | None = None,
    ) -> None:
        """Make a set of `size` tasks.

        Args:
            make: called with an index whenever that task is asked for.
            ids: of all tasks, where they are known without making one: `by_id` then makes one task only.
        """
        self.name = name
        self._size = size
        self._make = make
        self._solve = solve
        self._ids = ids

    @classmethod
    def of(cls, tasks: Sequence[Task], name: str = "tasks", *, solve: Solve | None = None) -> TaskSet:
        """Wrap tasks already in memory."""
        return cls(name, len(tasks), tasks.__getitem__, solve=solve)

    def solution(self, task: Task) -> Sequence[SolutionStep] | None:
        """Return the steps that solve one of these tasks; None where no solution is known."""
        return None if self._solve is None else self._solve(task)

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> TaskSet: ...
    def __getitem__(self, index: int | slice) -> Task | TaskSet:
        if isinstance(index, slice):
            picked = range(self._size)[index]
            ids = None if self._ids is None else self._ids[index]
            return TaskSet(self.name, len(picked), lambda i: self._make(picked[i]), solve=self._solve, ids=ids)
        return self._make(range(self._size)[index])

    def __iter__(self) -> Iterator[Task]:
        return (self._make(i) for i in range(self._size))

    def by_id(self, task_id: str) -> Task:
        """Return one task.

        Raises:
            KeyError: no such id; the message names a few that exist.
        """
        if self._ids is not None and task_id in self._ids:
            return self._make(self._ids.index(task_id))
        for task in self if self._ids is None else ():
            if task.id == task_id:
                return task
        known = ", ".join(task.id for task in self[:5])
        raise KeyError(f"Expected a task id of {self.name!r}, got {task_id!r}. Known ids begin with: {known}.")


TasksLike = Union[str, Path, Sequence[Task]]
"""A folder, a name such as "bundled:level=1", or tasks."""
