"""What is wrong with a set of tasks, as far as reading tells; every error of it, not only the first.

Behind `clawgym tasks check`. Nothing is run: `proving` does that. Invariant: whatever a loader or a task's files hold
ends as a line of the report.
"""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading, HybridGrading, RubricGrading
from clawgym_env.tasks.loading import load_tasks
from clawgym_env.tasks.task import Task, TaskFile, TaskSet, TasksLike

_INTERPRETERS = frozenset(("bash", "sh", "python3", "python"))


@dataclass(frozen=True, slots=True)
class TaskCheck:
    """What one task consists of, and what is wrong with it."""

    id: str
    num_files: int
    num_hidden: int
    size: int
    """Bytes of both."""
    needs: tuple[str, ...]
    """Of a machine, a harness or a grader, beside the ordinary: "judge", "image", "mcp", …"""
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetCheck:
    """What a set of tasks consists of, and what is wrong with it."""

    tasks: tuple[TaskCheck, ...]
    """Those that could be loaded."""
    load_errors: tuple[str, ...]
    """Of the others, one each."""

    @property
    def problems(self) -> Sequence[str]:
        """Everything that is wrong, with the task's id where there is one."""
        return [*self.load_errors, *(f"{task.id}: {problem}" for task in self.tasks for problem in task.problems)]

    @property
    def needs(self) -> Counter[str]:
        """How many tasks have each need."""
        return Counter(need for task in self.tasks for need in task.needs)


def check_tasks(spec: TasksLike) -> tuple[TaskSet, SetCheck]:
    """Load tasks as `load_tasks` does and examine each one; return those that could be loaded, and the report.

    Raises:
        TaskError: there is nothing in a known format.
    """
    errors: list[TaskError] = []
    loaded = load_tasks(spec, on_error=errors.append)
    tasks = loaded if isinstance(loaded, TaskSet) else TaskSet.of(loaded)
    checks = tuple(map(check_task, tasks))
    twice = [id for id, count in Counter(check.id for check in checks).items() if count > 1]
    repeated = [f"Expected unique task ids, got {id!r} more than once." for id in twice]
    return tasks, SetCheck(checks, (*map(str, errors), *repeated))


def check_task(task: Task) -> TaskCheck:
    """Examine one task; every file of it is read."""
    sizes: dict[str, int] = {}
    problems = [*_blank(task), *_bad_paths(task), *_unreadable(task, sizes), *_bad_grading(task)]
    visible = sum(sizes.get(file.path, 0) for file in task.files)
    if visible > task.disk_mb << 20:
        problems.append(f"Expected files of at most disk_mb={task.disk_mb}, got {visible >> 20} MB.")
    if task.image is not None and task.image.build is not None and not (task.image.build / "Dockerfile").is_file():
        problems.append(f"Expected a Dockerfile in {task.image.build}, got none.")
    problems += [f"Expected the mount {m.source} to exist, got nothing." for m in task.mounts if not m.source.exists()]
    return TaskCheck(
        id=task.id,
        num_files=len(task.files),
        num_hidden=len(task.hidden_files),
        size=sum(sizes.values()),
        needs=tuple(_needs(task)),
        problems=tuple(problems),
    )


def _needs(task: Task) -> Iterator[str]:
    if isinstance(task.grading, RubricGrading | HybridGrading):
        yield "judge"
    if task.image is not None:
        yield "image"
    if task.mcp_servers:
        yield "mcp"
    if any(turn.new_session for turn in task.turns):
        yield "several sessions"
    if any(not turn.new_session for turn in task.turns):
        yield "several turns"
    if task.metadata.get("internet"):
        yield "internet"


def _blank(task: Task) -> Iterator[str]:
    for place, text in (("instruction", task.instruction), *((f"turn {n}", t.text) for n, t in enumerate(task.turns))):
        if not text.strip():
            yield f"Expected words in the {place}, got none."


def _bad_paths(task: Task) -> Iterator[str]:
    for files, may_be_absolute in ((task.files, False), (task.hidden_files, True)):
        paths = [PurePosixPath(file.path) for file in files]
        for path in paths:
            if ".." in path.parts or not path.parts:
                yield f"Expected a path that stays in its folder, got {str(path)!r}."
            elif path.is_absolute() and not (may_be_absolute and any(path.is_relative_to(f) for f in task.folders)):
                yield f"Expected a path in the workspace or in {list(task.folders)}, got {str(path)!r}."
        for path, count in Counter(paths).items():
            if count > 1:
                yield f"Expected each file once, got {str(path)!r} {count} times."
        folders = {parent for path in paths for parent in path.parents}
        yield from (f"Expected a file or a folder at {str(path)!r}, got both." for path in set(paths) & folders)


def _unreadable(task: Task, sizes: dict[str, int]) -> Iterator[str]:
    """Read every file and note its size; yield those that cannot be read."""
    for file in (*task.files, *task.hidden_files):
        try:
            sizes[file.path] = len(file.read())
        except (OSError, ValueError) as error:
            yield f"Expected to read {file.path!r}, got: {error}"


def _bad_grading(task: Task) -> Iterator[str]:
    """Yield a script that the grading runs and that is not there, or is no Python."""
    grading = task.grading.automated if isinstance(task.grading, HybridGrading) else task.grading
    if not isinstance(grading, CommandGrading):
        return
    arguments = [argument for argument in grading.command if "=" not in argument and argument != "env"]
    if len(arguments) < 2 or arguments[0] not in _INTERPRETERS or arguments[1].startswith("-"):
        return
    script = _find(arguments[1], task)
    if script is None:
        yield f"Expected the grading's {arguments[1]!r} among the hidden files, got no such file."
    elif arguments[0].startswith("python"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of escapes in strings
                ast.parse(script.read())
        except (SyntaxError, ValueError, OSError, RecursionError) as error:
            yield f"Expected Python in {script.path!r}, got: {error}"


def _find(path: str, task: Task) -> TaskFile | None:
    wanted = PurePosixPath(task.workdir) / path
    files = (*task.hidden_files, *task.files)
    return next((file for file in files if PurePosixPath(task.workdir) / file.path == wanted), None)
