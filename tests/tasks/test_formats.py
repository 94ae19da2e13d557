"""The table of formats: each is recognised by what lies there, and can be named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.tasks import Task, TaskFile, load_tasks, save_clawgym
from clawgym_env.tasks.bundled import bundled_tasks
from clawgym_env.tasks.formats import FORMATS, format_of


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def clawgym(root: Path) -> Path:
    save_clawgym(bundled_tasks(size=2), root / "set")
    return root / "set"


def jsonl(root: Path) -> Path:
    line = {"prompt": "Do it.", "hook_code": "echo 1"}
    return put(root / "syn.jsonl", f"{json.dumps(line)}\n" * 2)


def harbor(root: Path) -> Path:
    for name in ("a", "b"):
        put(root / "h" / name / "task.toml", 'version = "1.0"\n[environment]\ndocker_image = "debian"\n')
        put(root / "h" / name / "instruction.md", "Do it.")
        put(root / "h" / name / "tests" / "test.sh")
    return root / "h"


def jobbench(root: Path) -> Path:
    rubrics = {"rubrics": [{"rubric": "Good?", "weight": 1, "criterion": ["It is."]}]}
    for number in (1, 2):
        folder = root / "j" / "dataset" / "auditor" / f"task{number}"
        put(folder / "RUBRICS.json", json.dumps(rubrics))
        put(folder / "task_folder" / "TASK_INSTRUCTIONS.txt", "Do it.")
    return root / "j"


def officeqa(root: Path) -> Path:
    put(root / "o" / "texts" / "b_1941_01.txt")
    rows = "1,What?,5,b_1941_01.txt,easy\n2,Which?,6,b_1941_01.txt,hard\n"
    put(root / "o" / "officeqa_full.csv", f"uid,question,answer,source_files,difficulty\n{rows}")
    return root / "o"


def pinchbench(root: Path) -> Path:
    for name in ("a", "b"):
        text = (
            f"---\nid: task_{name}\nname: x\ngrading_type: automated\nworkspace_files: []\n---\n\n## Prompt\n\nDo it.\n"
        )
        checks = (
            "\n## Automated Checks\n\n```python\ndef grade(transcript, workspace_path):\n    return {'a': 1.0}\n```\n"
        )
        put(root / "p" / "tasks" / f"task_{name}.md", text + checks)
    return root / "p"


MAKERS: dict[str, Callable[[Path], Path]] = {
    "clawgym": clawgym,
    "clawgym-jsonl": jsonl,
    "harbor": harbor,
    "jobbench": jobbench,
    "officeqa": officeqa,
    "pinchbench": pinchbench,
}


def test_every_format_is_tried_here() -> None:
    assert {one.name for one in FORMATS} == MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_a_format_is_recognised_by_what_lies_there_and_can_be_named(name: str, tmp_path: Path) -> None:
    path = MAKERS[name](tmp_path)
    assert [one.name for one in FORMATS if one.found_at(path)] == [name]
    assert format_of(path).name == name
    for spec in (path, str(path), f"{name}:{path}"):
        assert len(load_tasks(spec)) == 2


@pytest.mark.parametrize("name", MAKERS)
def test_a_task_of_any_format_can_be_sent_as_json(name: str, tmp_path: Path) -> None:
    for task in load_tasks(MAKERS[name](tmp_path)):
        assert Task.model_validate_json(task.model_dump_json()) == task


def test_bytes_that_are_no_text_can_be_sent_as_json() -> None:
    task = Task(id="t", instruction="i", files=(TaskFile(path="a.bin", data=bytes(range(256))),))
    assert Task.model_validate_json(task.model_dump_json()).files == task.files


def test_options_stand_behind_the_path(tmp_path: Path) -> None:
    path = officeqa(tmp_path)
    for spec in (f"officeqa:{path},difficulty=hard,tolerance=0.01", f"{path}, difficulty = hard"):
        assert [task.id for task in load_tasks(spec)] == ["2"]


def test_a_path_may_look_like_options(tmp_path: Path) -> None:
    path = officeqa(tmp_path)
    odd = path.rename(tmp_path / "x,difficulty=hard")
    assert len(load_tasks(f"officeqa:{odd}")) == 2


def test_a_named_format_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Expected Harbor task folders with a task.toml"):
        load_tasks(f"harbor:{clawgym(tmp_path)}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("levle=1", "Expected options of officeqa out of texts, corpus, difficulty, tolerance, got 'levle'"),
        ("on_error=1", "got 'on_error'"),
        ("tolerance=much", "Expected tolerance to be float, got 'much'"),
        ("corpus=some", "Expected corpus to be .*'row', 'all'.*, got 'some'"),
        ("difficulty=hard,difficulty=easy", "difficulty once"),
        ("difficulty=", "Expected difficulty=VALUE"),
    ],
)
def test_a_wrong_option_is_said(options: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks(f"officeqa:{officeqa(tmp_path)},{options}")


def test_what_is_in_no_format_is_told_what_each_needs(tmp_path: Path) -> None:
    put(tmp_path / "stray.txt")
    with pytest.raises(TaskError) as caught:
        load_tasks(tmp_path)
    for one in FORMATS:
        assert f"{one.name} ({one.needs})" in str(caught.value)


def test_errors_are_told_and_the_others_loaded(tmp_path: Path) -> None:
    path = harbor(tmp_path)
    (path / "a" / "instruction.md").unlink()
    errors: list[TaskError] = []
    assert [task.id for task in load_tasks(path, on_error=errors.append)] == ["b"]
    assert [str(path / "a") in str(error) for error in errors] == [True]
