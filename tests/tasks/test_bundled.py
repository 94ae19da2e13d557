"""Every bundled family: the oracle earns 1.0, idleness nothing, and the splits share no words or numbers."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.tasks.bundled import Instance, Split, TaskFamily, bundled_tasks, families
from clawgym_env.tasks.task import SolutionStep, Task
from harness_adapters.mini.agent import run_tool

FAMILIES = pytest.mark.parametrize("family", families(), ids=lambda family: family.name)


def lay_out(task: Task, workspace: Path) -> None:
    for file in task.files:
        path = workspace / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read())


def play(steps: Sequence[SolutionStep], workspace: Path) -> None:
    for step in steps:
        answer = run_tool(step.tool, dict(step.arguments), str(workspace))
        assert not answer.startswith("error"), answer


def check(task: Task, workspace: Path) -> tuple[float, dict[str, float]]:
    for file in task.hidden_files:
        path = workspace / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.read())
    path = f"{sys.base_prefix}/bin:/usr/bin:/bin"
    done = subprocess.run(
        task.grading.command, cwd=workspace, env={"PATH": path}, capture_output=True, text=True, check=True
    )
    *_, components, reward = done.stdout.strip().splitlines()
    return float(reward), json.loads(components)


def grade(instance: Instance, workspace: Path, steps: Sequence[SolutionStep]) -> float:
    workspace.mkdir(parents=True)
    lay_out(instance.task, workspace)
    play(steps, workspace)
    return check(instance.task, workspace)[0]


@FAMILIES
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_oracle_scores_one_and_doing_nothing_next_to_nothing(
    family: TaskFamily, split: Split, tmp_path: Path
) -> None:
    for index in (0, 1, 2, 1_000_003):
        instance = family.instance(index, split=split)
        assert grade(instance, tmp_path / f"oracle{index}", instance.oracle) == 1.0
        assert grade(instance, tmp_path / f"idle{index}", ()) <= 0.1


def rewriting_families() -> list[TaskFamily]:
    """Return the families that change a file which is there at the start."""
    chosen = []
    for family in families():
        hidden = {file.path: file.read() for file in family.instance(0).task.hidden_files}
        if any(one["before"] is not None for one in json.loads(hidden["reward/expected.json"])["checks"]):
            chosen.append(family)
    return chosen


@pytest.mark.parametrize("family", rewriting_families(), ids=lambda family: family.name)
@pytest.mark.parametrize("change", ["one more", "one less", "one before", "carriage returns"])
def test_rewriting_the_inputs_with_other_newlines_earns_next_to_nothing(
    family: TaskFamily, change: str, tmp_path: Path
) -> None:
    task = family.instance(0).task
    for file in task.files:
        text = file.read().decode()
        changed = {
            "one more": f"{text}\n",
            "one less": text.removesuffix("\n"),
            "one before": f"\n{text}",
            "carriage returns": text.replace("\n", "\r\n"),
        }[change]
        assert changed != text
        (tmp_path / file.path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file.path).write_bytes(changed.encode())
    assert check(task, tmp_path)[0] <= 0.1


def test_some_families_change_a_file() -> None:
    assert {family.name for family in rewriting_families()} >= {"replace_word", "append_line", "csv_row"}


@FAMILIES
def test_an_instance_is_a_function_of_family_split_and_index(family: TaskFamily) -> None:
    assert family.instance(5) == family.instance(5)
    assert family.instance(5).task.instruction != family.instance(6).task.instruction
    assert family.instance(5).task.id == f"{family.name}-train-000005"


def spelled_out(instance: Instance) -> tuple[set[str], set[str]]:
    """Return the instruction's own words and everything drawn: what is quoted, in files or written by the oracle."""
    instruction = instance.task.instruction
    plain = set(re.findall("[a-z]+", re.sub('"[^"]*"', " ", instruction).lower()))
    texts = re.findall(r'"([^"]*)"', instruction) + re.findall(r"\d\d+", instruction)
    texts += [text for file in instance.task.files for text in (file.path, file.read().decode())]
    texts += [value for step in instance.oracle for value in step.arguments.values() if step.tool != "bash"]
    drawn = set(re.findall(r"[a-z]+|\d\d+", " ".join(texts).lower())) - {"txt", "csv", "json", "md"}
    return plain, drawn


def test_train_and_heldout_instances_share_no_words_names_or_numbers() -> None:
    plain: set[str] = set()
    drawn: dict[Split, set[str]] = {"train": set(), "heldout": set()}
    for split, seen in drawn.items():
        for family in families():
            for index in range(100):
                words, draws = spelled_out(family.instance(index, split=split))
                plain |= words
                seen |= draws
    assert min(len(seen) for seen in drawn.values()) > 1000
    assert not drawn["train"] & drawn["heldout"]
    assert not plain & (drawn["train"] | drawn["heldout"])


@pytest.mark.parametrize("family", [family for family in families() if family.level <= 2], ids=lambda f: f.name)
def test_levels_one_and_two_fit_a_tiny_model(family: TaskFamily) -> None:
    for index in range(50):
        instance = family.instance(index)
        assert len(instance.task.instruction.split()) <= 30
        assert len(instance.oracle) <= 2
        assert sum(step.tool == "write" for step in instance.oracle) >= 1


@FAMILIES
def test_names_of_sub_scores_are_the_same_for_every_instance(family: TaskFamily, tmp_path: Path) -> None:
    names = []
    for index in range(3):
        workspace = tmp_path / str(index)
        workspace.mkdir()
        names.append(list(check(family.instance(index).task, workspace)[1]))
    assert names[0] == names[1] == names[2]


def test_there_are_four_levels_of_at_least_six_families_with_unique_names() -> None:
    levels = [family.level for family in families()]
    assert set(levels) == {1, 2, 3, 4}
    assert all(levels.count(level) >= 6 for level in levels)
    assert len({family.name for family in families()}) == len(levels)


def test_a_set_takes_families_in_turn_and_seeds_never_meet() -> None:
    tasks = bundled_tasks(families=("write_word", "two_files"), size=5)
    assert [task.id for task in tasks] == [
        "write_word-train-000000",
        "two_files-train-000000",
        "write_word-train-000001",
        "two_files-train-000001",
        "write_word-train-000002",
    ]
    assert not {task.id for task in tasks} & {task.id for task in bundled_tasks(size=500, seed=1)}


def test_a_set_makes_tasks_only_when_asked() -> None:
    tasks = bundled_tasks(size=10**9, split="heldout")
    assert len(tasks) == 10**9
    assert tasks[-1].metadata["split"] == "heldout"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": (1, 9)}, r"\[1, 2, 3, 4\], got 9"),
        ({"levels": ()}, "got none"),
        ({"families": ("write_wrod",)}, "got 'write_wrod'. Nearest: 'write_word'"),
        ({"families": ()}, "got none"),
        ({"split": "test"}, "got 'test'"),
        ({"size": 0}, "size=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_bad_selections_name_what_is_known(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        bundled_tasks(**arguments)  # type: ignore[arg-type]
