"""JobBench: office work with deliverables, judged rubric by rubric.

Read from its folders (`dataset/<occupation>/taskN/`) or from its parquet files with the reference files beside them.
Invariant: the task card and `files_required_to_search/` stay out of the task; a rubric earns its weight if every one of
its criteria holds, in a judge call of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field

from clawgym_env.errors import TaskError
from clawgym_env.extras import require_package
from clawgym_env.grading.specs import Criterion, RubricGrading
from clawgym_env.tasks.reading import (
    OnError,
    files_below,
    inside_path,
    load_each,
    naming,
    read_text,
    reported,
    task_file,
)
from clawgym_env.tasks.task import Limits, Task, TaskFile, TaskSet

RUBRICS, INPUTS, INSTRUCTIONS = "RUBRICS.json", "task_folder", "TASK_INSTRUCTIONS.txt"
SPLITS: Mapping[str, str] = {"main": "dataset", "easy": "dataset_easy"}
WORKSPACE, OUTPUT = "/workspace", "output"
WHERE = f"""
The files of this task are in {WORKSPACE}/{INPUTS}. Put everything that you hand in into {WORKSPACE}/{OUTPUT}."""
LIMITS = Limits(wall_clock_s=3600.0, grader_s=1800.0)
DISK_MB = 2048


class _Rubric(BaseModel):
    model_config = ConfigDict(extra="ignore")

    rubric: str = Field(min_length=1)
    weight: float = Field(gt=0.0)
    criterion: tuple[str, ...] = Field(min_length=1)


class _Row(BaseModel):
    """Of a parquet file."""

    model_config = ConfigDict(extra="ignore", strict=True)

    task_id: str = Field(min_length=1)
    prompt: str = Field(min_length=1)
    rubric_json: str
    occupation: str | None = None
    reference_files: list[str] | None = None


class _Rubrics(BaseModel):
    model_config = ConfigDict(extra="ignore")

    rubrics: tuple[_Rubric, ...] = Field(min_length=1)


def load_jobbench(
    path: str | Path, *, split: str = "main", files: str | Path | None = None, on_error: OnError | None = None
) -> TaskSet:
    """Load JobBench tasks.

    Args:
        path: the repository's folder, one of its data set folders, one task's folder, or a parquet file.
        split: "main" or "easy", of a repository's folder.
        files: the folder that a parquet file's `reference_files` are relative to; its own by default. Nothing is
            downloaded.
        on_error: told what is wrong with a task, which is then left out.

    Raises:
        TaskError: without `on_error` the first thing that is wrong; no task at all in any case.
    """
    root = Path(path)
    if split not in SPLITS:
        raise TaskError(f"Expected split=main or split=easy, got split={split!r}.")
    if root.is_file():
        return _from_parquet(root, Path(files).expanduser() if files else root.parent, on_error)
    if (root / SPLITS[split]).is_dir():
        root = root / SPLITS[split]
    folders = [root] if (root / RUBRICS).is_file() else sorted(_task_folders(root), key=_order)
    if not folders:
        raise TaskError(f"Expected <occupation>/taskN/{RUBRICS} in {root}, got none.")
    tasks = load_each(folders, _from_folder, on_error)
    return TaskSet.of(list(tasks.values()), name=f"jobbench-{split}")


def is_jobbench(path: Path) -> bool:
    """Whether JobBench folders, or one of its parquet files, lie there."""
    if path.is_file():
        return path.suffix == ".parquet"
    roots = [path, *(path / name for name in SPLITS.values())]
    return (path / RUBRICS).is_file() or any(any(_task_folders(root)) for root in roots)


def _task_folders(root: Path) -> Iterator[Path]:
    return (file.parent for file in root.glob(f"*/task*/{RUBRICS}"))


def _order(folder: Path) -> tuple[str, int, str]:
    number = folder.name.removeprefix("task")
    return folder.parent.name, int(number) if number.isdecimal() else 0, folder.name


def _from_folder(folder: Path) -> Task:
    occupation = folder.resolve().parent.name
    path = folder / RUBRICS
    with naming(path):
        return _task(
            id=f"{occupation}__{folder.resolve().name}",
            occupation=occupation,
            prompt=read_text(folder / INPUTS / INSTRUCTIONS),
            files=files_below(folder / INPUTS, PurePosixPath(INPUTS)),
            rubrics=read_text(path),
        )


def _from_parquet(path: Path, files: Path, on_error: OnError | None) -> TaskSet:
    require_package("pyarrow")
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except (ArrowException, OSError, ValueError) as error:
        raise TaskError(f"Expected a parquet file, got {path}: {error}") from error
    tasks: dict[str, Task] = {}
    for number, row in enumerate(rows, start=1):
        with reported(on_error), naming(f"row {number} of {path}"):
            told = _Row.model_validate(row)
            task = _task(
                id=told.task_id,
                occupation=told.occupation or told.task_id.partition("__")[0],
                prompt=told.prompt,
                files=[_reference(name, told.task_id, files) for name in told.reference_files or ()],
                rubrics=told.rubric_json,
            )
            if task.id in tasks:
                raise TaskError(f"Expected unique task ids, got {task.id!r} twice.")
            tasks[task.id] = task
    if not tasks and on_error is None:
        raise TaskError(f"Expected at least one row in {path}, got none.")
    return TaskSet.of(list(tasks.values()), name=f"jobbench-{path.stem}")


def _reference(name: str, task_id: str, files: Path) -> TaskFile:
    """Find a reference file on this machine, by the places in which the releases keep them."""
    name = inside_path(name, WORKSPACE)
    folder = task_id.replace("__", "/")
    below = name.partition(f"{INPUTS}/")[2] or name
    places = [files / name, files / folder / INPUTS / below, files / folder / below, files / task_id / below]
    places += [files / split / folder / INPUTS / below for split in SPLITS.values()]
    for place in places:
        if place.is_file():
            return task_file(place, files, f"{INPUTS}/{below}")
    raise TaskError(
        f"Expected the reference file {name!r} in {files}, got no {places[0]} or {places[1]}. "
        "Fetch the data set's files and name their folder: jobbench:tasks.parquet,files=FOLDER"
    )


def _task(*, id: str, occupation: str, prompt: str, files: Iterable[TaskFile], rubrics: str) -> Task:
    try:
        wanted = _Rubrics.model_validate(orjson.loads(rubrics))
    except orjson.JSONDecodeError as error:
        raise TaskError(f"Expected JSON as rubrics, got: {error}.") from error
    criteria = tuple(
        Criterion(name=f"rubric_{number}", question=rubric.rubric, weight=rubric.weight, checks=rubric.criterion)
        for number, rubric in enumerate(wanted.rubrics, start=1)
    )
    return Task(
        id=id,
        instruction=f"{prompt.rstrip()}\n{WHERE}",
        files=tuple(files),
        grading=RubricGrading(criteria=criteria, files=(f"{OUTPUT}/**",), separate_calls=True),
        workdir=WORKSPACE,
        disk_mb=DISK_MB,
        limits=LIMITS,
        metadata={"category": occupation},
    )
