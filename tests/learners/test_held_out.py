"""What is trained on and what is only evaluated on."""

from __future__ import annotations

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.tasks.loading import load_tasks
from learners import held_out
from learners.held_out import hold_out


@pytest.mark.parametrize("spec", ["bundled", "bundled:level=1", "bundled: level=1 , size = 9, family=write_word"])
def test_bundled_tasks_hold_out_instances_that_share_nothing_with_training(spec: str) -> None:
    train, tests = hold_out(spec, 6)
    assert len(tests) == 6
    assert all("-train-" in task.id for task in train[:9])
    assert all("-heldout-" in task.id for task in tests)


def test_levels_and_families_are_those_trained_on_whatever_the_blanks() -> None:
    train, tests = hold_out("bundled:size=9, family = write_word", 6)
    assert len(train) == 9
    assert all(task.id.startswith("write_word-") for task in (*train, *tests))


@pytest.mark.parametrize("spec", ["bundled:split=train", "bundled:level=1, split=heldout"])
def test_a_split_of_ones_own_is_refused(spec: str) -> None:
    with pytest.raises(TaskError, match="got 'split="):
        hold_out(spec, 6)


def test_nothing_is_held_out_when_nothing_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [len(part) for part in hold_out("bundled:size=9", 0)] == [9, 0]
    tasks = load_tasks("bundled:size=9")
    monkeypatch.setattr(held_out, "load_tasks", lambda spec: tasks)
    assert [len(part) for part in hold_out("./folder", 0)] == [9, 0]


def test_a_folder_gives_its_last_tasks_and_must_have_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = list(load_tasks("bundled:size=9"))
    monkeypatch.setattr(held_out, "load_tasks", lambda spec: tasks)
    assert hold_out("./folder", 4) == (tasks[:5], tasks[5:])
    with pytest.raises(TaskError, match="more than the 9 tasks"):
        hold_out("./folder", 9)
