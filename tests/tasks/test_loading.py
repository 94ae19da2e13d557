"""What `tasks=` may be."""

from pathlib import Path

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.tasks import Task, TaskSet, TasksLike, load_tasks, save_clawgym
from clawgym_env.tasks.bundled import bundled_tasks


def test_a_name_gives_the_bundled_tasks() -> None:
    tasks = load_tasks("bundled", seed=4)
    assert len(tasks) == 1000
    assert {task.metadata["level"] for task in tasks[:28]} == {1, 2}
    assert tasks[0] == bundled_tasks(seed=4)[0]


def test_options_choose_among_the_bundled_tasks() -> None:
    tasks = load_tasks("bundled:level=1-2, split=heldout,size=4,seed=3,family=write_word+two_files")
    assert [task.id for task in tasks] == [
        "write_word-heldout-3000000",
        "two_files-heldout-3000000",
        "write_word-heldout-3000001",
        "two_files-heldout-3000001",
    ]


@pytest.mark.parametrize(("text", "levels"), [("3", {3}), ("2-4", {2, 3, 4}), ("1+4", {1, 4})])
def test_levels_are_a_number_a_range_or_a_sum(text: str, levels: set[int]) -> None:
    assert {task.metadata["level"] for task in load_tasks(f"bundled:level={text},size=60")} == levels


def test_a_folder_is_loaded_whether_text_or_path(tmp_path: Path) -> None:
    save_clawgym(bundled_tasks(size=2), tmp_path / "set")
    for spec in (tmp_path / "set", str(tmp_path / "set")):
        assert len(load_tasks(spec)) == 2


def test_tasks_come_back_as_they_are() -> None:
    tasks = [Task(id="a", instruction="b")]
    assert load_tasks(tasks) is tasks
    lazy = TaskSet("lazy", 3, lambda index: pytest.fail("made too early"))
    assert load_tasks(lazy) is lazy


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bundeld", "got 'bundeld', which is neither. Did you mean 'bundled'"),
        ("bundled:levle=1", "level, family, split, size, seed, got 'levle'. Nearest: 'level'"),
        ("bundled:level", "Expected level=VALUE"),
        ("bundled:level=1,level=2", "level once"),
        ("bundled:level=9", "got 9"),
        ("bundled:level=2-1", "got none"),
        ("bundled:level=x", "got 'x'"),
        ("bundled:size=many", "got 'many'"),
        ("bundled:size=0", "size=0"),
        ("bundled:split=test", "got split='test'"),
        ("bundled:family=write_wrod", "Nearest: 'write_word'"),
        ("bundled:level=2,family=write_word", r"got \['write_word'\]"),
        ("no/such/folder", "nothing"),
        ([], "empty sequence"),
        (["a"], "sequence of Task"),
        (3, "got int"),
        ([Task(id="a", instruction="b")] * 2, "2 tasks with 1 ids"),
    ],
)
def test_what_cannot_be_loaded_is_said_with_what_can(spec: TasksLike, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        load_tasks(spec)
