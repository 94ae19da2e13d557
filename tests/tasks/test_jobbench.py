"""JobBench: folders and parquet files, what the agent sees and what it must not see."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from clawgym_env.errors import MissingPackage, TaskError
from clawgym_env.grading.specs import RubricGrading
from clawgym_env.tasks.jobbench import is_jobbench, load_jobbench

RUBRICS = {
    "rubrics": [
        {"rubric": "Is the sum right?", "weight": 3, "criterion": ["It is 12.", "It has a unit."]},
        {"rubric": "Is there a memo?", "weight": 1, "criterion": ["It names the client."]},
    ]
}


def make_task(dataset: Path, occupation: str = "auditor", name: str = "task1") -> Path:
    folder = dataset / occupation / name
    (folder / "task_folder" / "books").mkdir(parents=True)
    (folder / "files_required_to_search").mkdir()
    (folder / "files_required_to_search" / "secret.txt").write_text("answer")
    (folder / "task_card.md").write_text("The answer is 12.")
    (folder / "RUBRICS.json").write_text(json.dumps(RUBRICS))
    (folder / "task_folder" / "TASK_INSTRUCTIONS.txt").write_text("Sum up the books.\n")
    (folder / "task_folder" / "books" / "a b.csv").write_bytes(b"5\n7\n")
    return folder


def test_a_folder_becomes_a_task_without_card_and_search_files(tmp_path: Path) -> None:
    make_task(tmp_path / "dataset")
    (task,) = load_jobbench(tmp_path)
    assert task.id == "auditor__task1"
    assert [file.path for file in task.files] == ["task_folder/TASK_INSTRUCTIONS.txt", "task_folder/books/a b.csv"]
    assert task.hidden_files == ()
    assert task.instruction.startswith("Sum up the books.\n")
    assert "/workspace/task_folder" in task.instruction
    assert "/workspace/output" in task.instruction
    assert (task.workdir, task.metadata) == ("/workspace", {"category": "auditor"})
    assert task.limits.wall_clock_s == 3600.0
    assert isinstance(task.grading, RubricGrading)
    assert task.grading.separate_calls
    assert task.grading.files == ("output/**",)
    assert [(one.question, one.weight, one.checks) for one in task.grading.criteria] == [
        ("Is the sum right?", 3.0, ("It is 12.", "It has a unit.")),
        ("Is there a memo?", 1.0, ("It names the client.",)),
    ]


def test_tasks_come_by_occupation_and_number_and_splits_apart(tmp_path: Path) -> None:
    for name in ("task10", "task2"):
        make_task(tmp_path / "dataset", name=name)
    make_task(tmp_path / "dataset_easy", occupation="nurse")
    assert [task.id for task in load_jobbench(tmp_path)] == ["auditor__task2", "auditor__task10"]
    assert [task.id for task in load_jobbench(tmp_path, split="easy")] == ["nurse__task1"]
    assert [task.id for task in load_jobbench(tmp_path / "dataset_easy")] == ["nurse__task1"]
    assert [task.id for task in load_jobbench(tmp_path / "dataset" / "auditor" / "task2")] == ["auditor__task2"]


def test_it_is_recognised_by_its_rubrics(tmp_path: Path) -> None:
    assert not is_jobbench(tmp_path)
    folder = make_task(tmp_path / "dataset")
    assert all(map(is_jobbench, (tmp_path, tmp_path / "dataset", folder)))


def write_rubrics(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "RUBRICS.json").write_text(text)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no JSON": (write_rubrics("{"), "task3/RUBRICS.json: Expected JSON as rubrics"),
    "deep JSON": (write_rubrics("[" * 10**6), "task3/RUBRICS.json: Expected JSON as rubrics"),
    "no rubrics": (write_rubrics('{"rubrics": []}'), "task3/RUBRICS.json, got rubrics: "),
    "no weight": (write_rubrics('{"rubrics": [{"rubric": "a", "criterion": ["b"]}]}'), r"rubrics.0.weight: field req"),
    "no criterion": (write_rubrics('{"rubrics": [{"rubric": "a", "weight": 1, "criterion": []}]}'), r"0.criterion: "),
    "no instructions": (lambda folder: (folder / "task_folder" / "TASK_INSTRUCTIONS.txt").unlink(), "No such file"),
    "a link out": (lambda folder: (folder / "task_folder" / "x").symlink_to("../task_card.md"), "links to stay in"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_is_named_and_costs_no_other(fault: str, tmp_path: Path) -> None:
    spoil, message = BAD[fault]
    make_task(tmp_path / "dataset")
    spoil(make_task(tmp_path / "dataset", name="task3"))
    with pytest.raises(TaskError, match=message):
        load_jobbench(tmp_path)
    errors: list[TaskError] = []
    assert [task.id for task in load_jobbench(tmp_path, on_error=errors.append)] == ["auditor__task1"]
    assert len(errors) == 1


ROW: dict[str, Any] = {
    "task_id": "auditor__task1",
    "occupation": "auditor",
    "task_num": 1,
    "prompt": "Sum up the books.",
    "reference_files": ["books/a b.csv"],
    "rubric_json": json.dumps(RUBRICS),
    "task_card": "The answer is 12.",
}


def write_parquet(path: Path, *rows: dict[str, Any]) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


@pytest.mark.parametrize(
    ("listed", "place"),
    [
        ("books/a b.csv", "books/a b.csv"),
        ("books/a b.csv", "auditor/task1/task_folder/books/a b.csv"),
        ("books/a b.csv", "auditor__task1/books/a b.csv"),
        ("dataset/auditor/task1/task_folder/books/a b.csv", "dataset/auditor/task1/task_folder/books/a b.csv"),
        ("books/a b.csv", "dataset_easy/auditor/task1/task_folder/books/a b.csv"),
    ],
)
def test_a_parquet_row_finds_its_files_where_releases_keep_them(listed: str, place: str, tmp_path: Path) -> None:
    file = tmp_path / "files" / place
    file.parent.mkdir(parents=True)
    file.write_bytes(b"5\n7\n")
    path = write_parquet(tmp_path / "tasks.parquet", {**ROW, "reference_files": [listed]})
    assert is_jobbench(path)
    (task,) = load_jobbench(path, files=tmp_path / "files")
    assert task.id == "auditor__task1"
    assert [(one.path, one.read()) for one in task.files] == [("task_folder/books/a b.csv", b"5\n7\n")]
    assert isinstance(task.grading, RubricGrading)
    assert len(task.grading.criteria) == 2
    assert "12" not in task.instruction
    assert "answer" not in json.dumps(dict(task.metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reference_files": ["gone.csv"]}, r"row 2 of .*: Expected the reference file 'gone.csv' .*files=FOLDER"),
        ({"reference_files": ["../gone.csv"]}, "inside the workspace"),
        ({"rubric_json": "{"}, "Expected JSON as rubrics"),
        ({"rubric_json": None}, "rubric_json: input should be a valid string"),
        ({"prompt": None}, "prompt: input should be a valid string"),
        ({"prompt": ""}, "prompt: string should have at least 1"),
        ({"task_id": None}, "task_id: input should be a valid string"),
        ({"reference_files": [None]}, "reference_files.0: input should be a valid string"),
        ({"task_id": "../../outside", "reference_files": ["key.txt"]}, "links to stay in|the reference file 'key.txt'"),
        ({"task_id": "other"}, "unique task ids, got 'other' twice"),
    ],
)
def test_a_bad_row_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    plain = {**ROW, "task_id": "other", "reference_files": []}
    folder = tmp_path / "a" / "b"
    folder.mkdir(parents=True)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "key.txt").write_text("of the host")
    path = write_parquet(folder / "tasks.parquet", plain, {**plain, "task_id": "b", **change})
    with pytest.raises(TaskError, match=message):
        load_jobbench(path)
    errors: list[TaskError] = []
    assert len(load_jobbench(path, on_error=errors.append)) == 1
    assert len(errors) == 1


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(99) + b"PAR1"])
def test_a_file_that_is_no_parquet_is_named(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "tasks.parquet").write_bytes(data)
    with pytest.raises(TaskError, match=r"Expected a parquet file, got .*tasks.parquet"):
        load_jobbench(tmp_path / "tasks.parquet")


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "tasks.parquet", {"task_id": "a", "prompt": "b"})
    with pytest.raises(TaskError, match="rubric_json: field required"):
        load_jobbench(path)


def test_without_pyarrow_the_command_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_parquet(tmp_path / "tasks.parquet", ROW)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingPackage, match=r"Run: pip install 'clawgym\[parquet\]'"):
        load_jobbench(path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Expected <occupation>/taskN/RUBRICS.json"):
        load_jobbench(tmp_path)
    with pytest.raises(TaskError, match="split='hard'"):
        load_jobbench(tmp_path, split="hard")
