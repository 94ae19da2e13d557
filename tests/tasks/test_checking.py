"""What reading tells of a set of tasks: every error of it, and what its tasks need."""

import re
from pathlib import Path
from typing import Any

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading, Criterion, HybridGrading, RubricGrading
from clawgym_env.sandbox.base import Image, Mount
from clawgym_env.tasks import McpServer, Task, TaskFile, Turn, save_clawgym
from clawgym_env.tasks.bundled import bundled_tasks
from clawgym_env.tasks.checking import check_task, check_tasks

RUBRIC = RubricGrading(criteria=(Criterion(name="a", question="b"),))
CHECKER = CommandGrading(command=("python3", "reward/check.py"), score="mean_of_json")


def make(**changes: Any) -> Task:
    good: dict[str, Any] = {
        "id": "one",
        "instruction": "Do it.",
        "files": (TaskFile(path="a/b.txt", data=b"12345"),),
        "hidden_files": (TaskFile(path="reward/check.py", data=b"print('{}')"),),
        "grading": CHECKER,
    }
    return Task.model_validate({**good, **changes})


def test_a_good_task_has_its_files_counted_and_no_problem() -> None:
    check = check_task(make())
    assert (check.num_files, check.num_hidden, check.size) == (1, 1, 16)
    assert (check.needs, check.problems) == ((), ())


def test_needs_are_named() -> None:
    task = make(
        grading=HybridGrading(automated=CHECKER, rubric=RUBRIC),
        image=Image(name="debian"),
        mcp_servers=(McpServer(name="docs", command=("x",)),),
        turns=(Turn(text="more"), Turn(text="again", new_session=True)),
        metadata={"internet": True},
    )
    assert check_task(task).needs == ("judge", "image", "mcp", "several sessions", "several turns", "internet")


HIDDEN = TaskFile(path="/tests/check.py", data=b"")
PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "no instruction": ({"instruction": " \n"}, "Expected words in the instruction"),
    "an empty turn": ({"turns": (Turn(text=""),)}, "Expected words in the turn 0"),
    "a way out": ({"files": (TaskFile(path="../x", data=b""),)}, "stays in its folder, got '../x'"),
    "an absolute file": ({"files": (TaskFile(path="/etc/x", data=b""),)}, "got '/etc/x'"),
    "a hidden file in no folder": (
        {"hidden_files": (HIDDEN,), "grading": RUBRIC},
        r"or in \[\], got '/tests/check.py'",
    ),
    "a file twice": ({"files": (TaskFile(path="x", data=b""),) * 2}, "each file once, got 'x' 2 times"),
    "a file that is a folder": (
        {"files": (TaskFile(path="x", data=b""), TaskFile(path="x/y", data=b""))},
        "a file or a folder at 'x', got both",
    ),
    "no such file": ({"files": (TaskFile(path="x", source=Path("/gone")),)}, "Expected to read 'x', got: .*/gone"),
    "no content": ({"files": (TaskFile(path="x"),)}, "Expected to read 'x'"),
    "too much": ({"disk_mb": 16, "files": (TaskFile(path="x", data=bytes(17 << 20)),)}, "disk_mb=16, got 17 MB"),
    "no checker": ({"hidden_files": ()}, "Expected the grading's 'reward/check.py' among the hidden files"),
    "a checker that is no Python": (
        {"hidden_files": (TaskFile(path="reward/check.py", data=b"def"),)},
        "Expected Python in 'reward/check.py'",
    ),
    "no checker in a hybrid": (
        {"hidden_files": (), "grading": HybridGrading(automated=CHECKER, rubric=RUBRIC)},
        "Expected the grading's 'reward/check.py'",
    ),
    "no test.sh": (
        {"grading": CommandGrading(command=("env", "A=b", "bash", "/tests/test.sh")), "folders": ("/tests",)},
        "Expected the grading's '/tests/test.sh'",
    ),
    "no Dockerfile": ({"image": Image(build=Path("/gone"))}, "Expected a Dockerfile in /gone"),
    "no mount": ({"mounts": (Mount(source=Path("/gone"), target="/x"),)}, "Expected the mount /gone to exist"),
}


@pytest.mark.parametrize("fault", PROBLEMS)
def test_a_problem_is_one_line(fault: str) -> None:
    changes, message = PROBLEMS[fault]
    (problem,) = check_task(make(**changes)).problems
    assert re.search(message, problem)


def test_every_error_of_a_set_is_listed(tmp_path: Path) -> None:
    save_clawgym(bundled_tasks(size=4), tmp_path / "set")
    folders = sorted((tmp_path / "set").iterdir())
    (folders[0] / "data_entry.json").write_text("{")
    (folders[1] / "stray").touch()
    (folders[2] / "reward" / "reward.sh").unlink()
    tasks, report = check_tasks(tmp_path / "set")
    assert len(tasks) == len(report.tasks) == 1
    assert [folder.name in problem for folder, problem in zip(folders, report.problems, strict=False)] == [True] * 3
    assert len(report.problems) == 3


def test_a_sound_set_has_none() -> None:
    tasks, report = check_tasks(bundled_tasks(size=6))
    assert (len(tasks), list(report.problems)) == (6, [])
    assert sum(report.needs.values()) == 0


def test_nothing_there_is_an_error() -> None:
    with pytest.raises(TaskError, match="nothing"):
        check_tasks("no/such/folder")
