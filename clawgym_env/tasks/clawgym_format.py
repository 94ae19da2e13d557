"""The ClawGym folder format, read and written.

One folder per task: `data_entry.json`, `input_files/` (copied to `input_mount_dir`), `reward/reward.sh` and whatever
that needs. Everything is checked when a set is loaded; the files' bytes are read when a sandbox is filled. Invariant:
a set that loads has no path that leaves its folder on the host or the workspace inside.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading, Grading
from clawgym_env.sandbox.base import WORKDIR
from clawgym_env.tasks.clawgym_rubric import combine, take_rubric
from clawgym_env.tasks.reading import (
    MAX_FILE_BYTES,
    OnError,
    check_file,
    explain,
    files_below,
    load_each,
    naming,
    reported,
)
from clawgym_env.tasks.task import Task, TaskFile, TaskSet

ENTRY, INPUTS, REWARD = "data_entry.json", "input_files", "reward"
GRADE_SCRIPT = f"{REWARD}/{REWARD}.sh"
GRADING = CommandGrading(command=("bash", GRADE_SCRIPT))
STOCK_SCRIPT_SHA256 = "2c892af9d8248934e5e67646a02524d9da0f5a1fcc5fadadd077e485238d6e65"
"""Of the `reward.sh` of all released tasks: it prints the mean of what `check.py` prints, and hides the parts."""
STOCK_GRADING = CommandGrading(
    command=("python3", f"{WORKDIR}/{REWARD}/check.py", WORKDIR),
    score="mean_of_json",
)
"""The same mean with its parts; what is neither an object nor a number is an error here and 0 there."""
ADDITIONS = ("turns", "limits", "memory_mb", "cpus", "disk_mb", "env", "mcp_servers")
"""What of a `Task` the format has no place for: we keep it in the metadata."""
UNSAYABLE = ("grade_in", "workdir", "image", "folders", "mounts")
"""What of a `Task` is always as by default in this format, since it names places of one machine or sandbox."""


class DataEntry(BaseModel):
    """The content of `data_entry.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    task_id: str = Field(min_length=1)
    user_query: str = Field(min_length=1)
    input_mount_dir: str | None = None
    """Absolute, the workspace or a folder in it; where `input_files/` goes."""
    metadata: dict[str, JsonValue]
    """May hold `ADDITIONS` and a rubric, under one of `clawgym_rubric.RUBRIC_KEYS`."""


def load_clawgym(path: str | Path, *, max_file_bytes: int = MAX_FILE_BYTES, on_error: OnError | None = None) -> TaskSet:
    """Load a folder of task folders, in the order of their names, or one task folder.

    Args:
        on_error: told what is wrong with a task, which is then left out.

    Raises:
        TaskError: without `on_error` the first thing that is wrong, with the file's path; nothing to load in any case.
    """
    root = Path(path)
    if not root.is_dir():
        raise TaskError(f"Expected a folder of ClawGym tasks, got {root}: {'a file' if root.exists() else 'nothing'}.")
    folders = [root] if (root / ENTRY).exists() else sorted(root.iterdir())
    if not folders:
        raise TaskError(f"Expected at least one task folder in {root}, got an empty folder.")
    for stray in [entry for entry in folders if not entry.is_dir()]:
        with reported(on_error):
            raise TaskError(f"Expected only task folders in {root}, got a stray file: {stray}. Move it elsewhere.")
        folders.remove(stray)
    found = load_each(folders, lambda folder: _load_task(folder, max_file_bytes), on_error)
    return TaskSet.of(list(found.values()), name=root.resolve().name)


def save_clawgym(tasks: Sequence[Task], folder: Path) -> None:
    """Write tasks as ClawGym folders named by task id into `folder`, which must be new or empty.

    Raises:
        TaskError: a task that the format cannot say (a grader of its own, files in another place).
    """
    if folder.exists() and any(folder.iterdir()):
        raise TaskError(f"Expected a new or empty folder, got {folder} with files in it.")
    for task in tasks:
        _save_task(task, folder / _folder_name(task.id))


def _load_task(folder: Path, max_file_bytes: int) -> Task:
    if not (folder / ENTRY).is_file():
        raise TaskError(f"Expected {folder / ENTRY}, got no such file.")
    for path in sorted(folder.iterdir()):
        if path.name not in (ENTRY, INPUTS, REWARD):
            raise TaskError(f"Expected only {ENTRY}, {INPUTS}/ and {REWARD}/ in a task folder, got {path}.")
    entry = _read_entry(folder / ENTRY, max_file_bytes)
    mount = _mount(entry.input_mount_dir, folder)
    hidden = tuple(files_below(folder / REWARD, PurePosixPath(REWARD), max_bytes=max_file_bytes))
    if GRADE_SCRIPT not in (file.path for file in hidden):
        raise TaskError(f"Expected {folder / GRADE_SCRIPT}, got no such file.")
    inputs = () if mount is None else tuple(files_below(folder / INPUTS, mount, max_bytes=max_file_bytes))
    for file in inputs:
        if PurePosixPath(file.path).parts[0] == REWARD:
            raise TaskError(f"Expected no input in the workspace's {REWARD}/, the grader's own, got {file.source}.")
    with naming(folder / ENTRY):
        return Task.model_validate(
            {
                "id": entry.task_id,
                "instruction": entry.user_query,
                "files": inputs,
                "hidden_files": hidden,
                "grading": _grading(hidden, entry.metadata),
                "metadata": {name: part for name, part in entry.metadata.items() if name not in ADDITIONS},
                **{name: part for name, part in entry.metadata.items() if name in ADDITIONS},
            }
        )


def _grading(hidden: Sequence[TaskFile], metadata: Mapping[str, JsonValue]) -> Grading:
    script = next(file for file in hidden if file.path == GRADE_SCRIPT)
    stock = hashlib.sha256(script.read()).hexdigest() == STOCK_SCRIPT_SHA256
    mode = metadata.get("validation_mode")
    return combine(
        STOCK_GRADING if stock else GRADING, take_rubric(metadata), mode=mode if isinstance(mode, str) else None
    )


def _read_entry(path: Path, max_file_bytes: int) -> DataEntry:
    check_file(path, path.parent, max_file_bytes)
    try:
        return DataEntry.model_validate(orjson.loads(path.read_bytes()))
    except ValidationError as error:
        raise TaskError(f"Expected a task in {path}, got {explain(error)}.") from error
    except ValueError as error:
        raise TaskError(f"Expected JSON in {path}, got: {error}.") from error


def _mount(mount_dir: str | None, folder: Path) -> PurePosixPath | None:
    """Return the inputs' place relative to the workspace; None for a task without inputs."""
    if mount_dir is None:
        if (folder / INPUTS).exists():
            raise TaskError(
                f"Expected input_mount_dir in {folder / ENTRY}, since there is {folder / INPUTS}, got none."
            )
        return None
    place = PurePosixPath(mount_dir)
    if ".." in place.parts or not place.is_relative_to(WORKDIR):
        raise TaskError(f"Expected input_mount_dir in {folder / ENTRY} to be in {WORKDIR}, got {mount_dir!r}.")
    if not (folder / INPUTS).is_dir():
        raise TaskError(f"Expected the folder {folder / INPUTS}, since input_mount_dir is given, got none.")
    return place.relative_to(WORKDIR)


def _folder_name(task_id: str) -> str:
    if PurePosixPath(task_id).name != task_id or task_id == "..":
        raise TaskError(f"Expected a task id that can name a folder, got {task_id!r}.")
    return task_id


def _save_task(task: Task, folder: Path) -> None:
    paths = [file.path for file in task.hidden_files]
    if GRADE_SCRIPT not in paths or any(PurePosixPath(path).parts[0] != REWARD for path in paths):
        raise TaskError(f"Expected the hidden files of {task.id!r} in {REWARD}/, with {GRADE_SCRIPT}, got {paths}.")
    if task.grading != _grading(task.hidden_files, task.metadata):
        raise TaskError(
            f"Expected a task graded by {' '.join(GRADING.command)}, and by the rubric in its metadata, "
            f"got {task.id!r} with {type(task.grading).__name__}."
        )
    if odd := [name for name in UNSAYABLE if getattr(task, name) != Task.model_fields[name].default]:
        raise TaskError(f"Expected nothing but a workspace and a checker, got {task.id!r} with {', '.join(odd)}.")
    metadata: dict[str, JsonValue] = dict(task.metadata)
    metadata |= task.model_dump(mode="json", include=set(ADDITIONS), exclude_defaults=True)
    entry: Mapping[str, JsonValue] = {
        "task_id": task.id,
        "user_query": task.instruction,
        **({"input_mount_dir": WORKDIR} if task.files else {}),
        "metadata": metadata,
    }
    folder.mkdir(parents=True)
    (folder / ENTRY).write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n", "utf-8")
    for file in task.files:
        _write(folder / INPUTS / file.path, file)
    for file in task.hidden_files:
        _write(folder / file.path, file)


def _write(path: Path, file: TaskFile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(file.read())
    path.chmod(0o755 if file.executable else 0o644)
