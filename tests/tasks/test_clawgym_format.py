"""The ClawGym folder format: what loads, and the one clear error of each bad folder."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading, HybridGrading
from clawgym_env.sandbox.base import WORKDIR, Image
from clawgym_env.tasks import Limits, McpServer, Task, TaskFile, Turn, load_clawgym, save_clawgym
from clawgym_env.tasks.bundled import bundled_tasks

ENTRY = {"task_id": "task_0000", "user_query": "Do it.", "input_mount_dir": WORKDIR, "metadata": {"category": ""}}

DOCUMENTS = McpServer(name="papers", command=("clawgym:documents", "--folder", "papers"))


def make_task(folder: Path, **changes: object) -> Path:
    """Write a good task folder; a change to None drops the key."""
    entry = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
    (folder / "input_files" / "data").mkdir(parents=True)
    (folder / "input_files" / "data" / "a.txt").write_text("a\n")
    (folder / "input_files" / ".env").write_text("x=1\n")
    (folder / "reward").mkdir()
    (folder / "reward" / "reward.sh").write_text("echo 1.0\n")
    (folder / "reward" / "reward.sh").chmod(0o755)
    (folder / "reward" / "check.py").write_text("print('{}')\n")
    (folder / "data_entry.json").write_text(json.dumps(entry))
    return folder


def test_a_set_loads_in_the_order_of_its_folders(tmp_path: Path) -> None:
    for name in ("task_0002", "task_0001"):
        make_task(tmp_path / name, task_id=name)
    tasks = load_clawgym(tmp_path)
    assert [task.id for task in tasks] == ["task_0001", "task_0002"]
    task = tasks[0]
    assert (task.instruction, task.metadata) == ("Do it.", {"category": ""})
    assert [file.path for file in task.files] == [".env", "data/a.txt"]
    assert [(file.path, file.executable) for file in task.hidden_files] == [
        ("reward/check.py", False),
        ("reward/reward.sh", True),
    ]


def test_one_task_folder_alone_is_a_set_of_one(tmp_path: Path) -> None:
    assert [task.id for task in load_clawgym(make_task(tmp_path / "only"))] == ["task_0000"]


def test_files_are_read_when_they_are_asked_for(tmp_path: Path) -> None:
    task = load_clawgym(make_task(tmp_path / "only"))[0]
    (tmp_path / "only" / "input_files" / "data" / "a.txt").write_text("later\n")
    assert task.files[1].read() == b"later\n"


def test_inputs_go_to_a_folder_of_the_workspace(tmp_path: Path) -> None:
    task = load_clawgym(make_task(tmp_path / "only", input_mount_dir=f"{WORKDIR}/deep/er"))[0]
    assert [file.path for file in task.files] == ["deep/er/.env", "deep/er/data/a.txt"]


def test_a_task_without_inputs_needs_no_mount(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "only", input_mount_dir=None)
    (folder / "input_files" / ".env").unlink()
    (folder / "input_files" / "data" / "a.txt").unlink()
    (folder / "input_files" / "data").rmdir()
    (folder / "input_files").rmdir()
    assert load_clawgym(folder)[0].files == ()


def test_links_that_stay_inside_are_read_as_files(tmp_path: Path) -> None:
    folder = make_task(tmp_path / "only")
    (folder / "input_files" / "b.txt").symlink_to("data/a.txt")
    assert load_clawgym(folder)[0].files[1].read() == b"a\n"


def write_entry(**changes: object) -> Callable[[Path], None]:
    def spoil(task: Path) -> None:
        entry = {key: value for key, value in {**ENTRY, **changes}.items() if value is not None}
        (task / "data_entry.json").write_text(json.dumps(entry))

    return spoil


def a_huge_file(task: Path) -> None:
    with (task / "input_files" / "huge.bin").open("wb") as file:
        file.truncate(1 << 30)


def a_duplicate(task: Path) -> None:
    make_task(task.parent / "zzz")


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no entry": (lambda task: (task / "data_entry.json").unlink(), r"Expected .*t/data_entry.json, got no such file"),
    "no query": (write_entry(user_query=None), r"t/data_entry.json, got user_query: field required"),
    "no metadata": (write_entry(metadata=None), r"t/data_entry.json, got metadata: field required"),
    "no id": (write_entry(task_id=None), r"t/data_entry.json, got task_id: field required"),
    "an empty id": (write_entry(task_id=""), r"t/data_entry.json, got task_id: string should have at least 1"),
    "a number as id": (write_entry(task_id=3), r"t/data_entry.json, got task_id: input should be a valid string"),
    "a list as metadata": (write_entry(metadata=[]), r"t/data_entry.json, got metadata: .*dictionary"),
    "an unknown key": (write_entry(inputs="x"), r"t/data_entry.json, got inputs: extra inputs"),
    "bad limits": (write_entry(metadata={"limits": {"max_calls": 0}}), r"data_entry.json, got limits.max_calls: "),
    "half a character": (write_entry(user_query="\ud800"), r"Expected JSON in .*t/data_entry.json.*surrogate"),
    "no number": (write_entry(metadata={"x": float("nan")}), r"Expected JSON in .*t/data_entry.json"),
    "a list": (lambda task: (task / "data_entry.json").write_text("[]"), r"t/data_entry.json, got the whole: "),
    "no JSON": (lambda task: (task / "data_entry.json").write_text("{"), r"Expected JSON in .*t/data_entry.json"),
    "deep JSON": (lambda task: (task / "data_entry.json").write_text("[" * 10**6), r"Expected JSON in .*t/data_e"),
    "no UTF-8": (lambda task: (task / "data_entry.json").write_bytes(b"\xff"), r"Expected JSON in .*t/data_entry"),
    "no reward.sh": (lambda task: (task / "reward" / "reward.sh").unlink(), r"Expected .*t/reward/reward.sh, got no"),
    "a stray file": (lambda task: (task.parent / "README").touch(), r"got a stray file: .*/README"),
    "a stray file in a task": (lambda task: (task / "notes").touch(), r"in a task folder, got .*t/notes"),
    "a mount outside": (write_entry(input_mount_dir="/etc"), r"t/data_entry.json to be in /root.*, got '/etc'"),
    "a mount up": (write_entry(input_mount_dir=f"{WORKDIR}/../x"), r"t/data_entry.json to be in .*\.\./x'"),
    "a mount beside": (write_entry(input_mount_dir=f"{WORKDIR}2"), r"t/data_entry.json to be in .*workspace2'"),
    "a relative mount": (write_entry(input_mount_dir="data"), r"t/data_entry.json to be in .*, got 'data'"),
    "no mount": (write_entry(input_mount_dir=None), r"Expected input_mount_dir in .*t/data_entry.json"),
    "no inputs": (
        lambda task: (task / "input_files").rename(task / "x") and (task / "x").rename(task.parent.parent / "x"),
        r"Expected the folder .*t/input_files",
    ),
    "an input in reward/": (
        lambda task: (task / "input_files" / "data").rename(task / "input_files" / "reward"),
        r"grader's own, got .*t/input_files/reward/a.txt",
    ),
    "a link out of inputs": (
        lambda task: (task / "input_files" / "l").symlink_to("/etc/passwd"),
        r"Expected links to stay in .*t/input_files/l -> /etc/passwd",
    ),
    "a link out of reward": (
        lambda task: (task / "reward" / "l").symlink_to("../data_entry.json"),
        r"Expected links to stay in .*t/reward/l -> ",
    ),
    "a link to a folder": (lambda task: (task / "input_files" / "l").symlink_to("data"), r"got a link: .*_files/l\."),
    "a linked inputs folder": (
        lambda task: (
            (task / "input_files").rename(task.parent.parent / "x") and (task / "input_files").symlink_to("../../x")
        ),
        r"got a link: .*t/input_files\.",
    ),
    "a dangling link": (lambda task: (task / "input_files" / "l").symlink_to("gone"), r"got .*/l: No such file"),
    "a pipe": (lambda task: os.mkfifo(task / "input_files" / "p"), r"Expected a regular file, got .*/p\."),
    "a huge file": (a_huge_file, r"at most 67108864 bytes, got .*huge.bin with 1073741824"),
    "a duplicate id": (a_duplicate, r"unique task ids, got 'task_0000' in both .*/t and .*/zzz"),
    "a file name that is no text": (
        lambda task: (task / "input_files" / os.fsdecode(b"\xff")).touch(),
        r"name in UTF-8",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_gives_one_error_that_names_the_file(fault: str, tmp_path: Path) -> None:
    spoil, message = BAD[fault]
    task = make_task(tmp_path / "set" / "t")
    spoil(task)
    with pytest.raises(TaskError, match=message):
        load_clawgym(tmp_path / "set")


def test_what_is_no_folder_of_tasks_is_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="nothing"):
        load_clawgym(tmp_path / "gone")
    with pytest.raises(TaskError, match="got an empty folder"):
        load_clawgym(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(TaskError, match="a file"):
        load_clawgym(tmp_path / "file")


def content(task: Task) -> dict[str, tuple[bytes, bool]]:
    return {file.path: (file.read(), file.executable) for file in (*task.files, *task.hidden_files)}


def test_bundled_tasks_survive_being_written_and_loaded(tmp_path: Path) -> None:
    tasks = bundled_tasks(levels=(1, 2, 3, 4), size=40)
    save_clawgym(tasks, tmp_path / "out")
    loaded = load_clawgym(tmp_path / "out")
    assert {task.id for task in loaded} == {task.id for task in tasks}
    for task in tasks:
        copy = loaded.by_id(task.id)
        assert content(copy) == content(task)
        blank: dict[str, object] = {"files": (), "hidden_files": ()}
        assert copy.model_copy(update=blank) == task.model_copy(update=blank)


def test_limits_servers_and_turns_are_kept_in_the_metadata(tmp_path: Path) -> None:
    additions: dict[str, object] = {
        "limits": Limits(max_calls=3),
        "memory_mb": 512,
        "cpus": 1.5,
        "disk_mb": 64,
        "env": {"A": "b"},
        "mcp_servers": (DOCUMENTS,),
        "turns": (Turn(text="And then?", new_session=True),),
    }
    task = load_clawgym(make_task(tmp_path / "a"))[0].model_copy(update=additions)
    save_clawgym([task], tmp_path / "out")
    copy = load_clawgym(tmp_path / "out")[0]
    assert {name: getattr(copy, name) for name in additions} == additions
    assert copy.metadata == task.metadata


RUBRIC = [{"name": "tone", "file_path": "out/[a].txt", "scores": {"0": "bad", "1": "good"}}]


@pytest.mark.parametrize(("mode", "weight"), [(None, 0.7), ("code_and_rubric", 0.5)])
def test_a_rubric_in_the_metadata_joins_the_checker(mode: str | None, weight: float, tmp_path: Path) -> None:
    metadata = {"category": "x", "rubrics": RUBRIC, **({"validation_mode": mode} if mode else {})}
    task = load_clawgym(make_task(tmp_path / "a", metadata=metadata))[0]
    assert isinstance(task.grading, HybridGrading)
    assert task.grading.automated == CommandGrading(command=("bash", "reward/reward.sh"))
    assert task.grading.automated_weight == weight
    assert task.grading.rubric.criteria[0].file == "out/[a].txt"
    assert task.grading.rubric.files == ("out/[[]a].txt",)
    save_clawgym([task], tmp_path / "out")
    assert load_clawgym(tmp_path / "out")[0].grading == task.grading


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grading": CommandGrading(command=("true",))}, "got 'task_0000' with CommandGrading"),
        ({"id": "../x"}, "got '../x'"),
        ({"workdir": "/elsewhere"}, "got 'task_0000' with workdir"),
        ({"image": Image(name="debian"), "grade_in": "same"}, "got 'task_0000' with grade_in, image"),
        ({"hidden_files": ()}, r"reward.sh, got \[\]"),
        ({"hidden_files": (TaskFile(path="check.py", data=b""),)}, "check.py"),
    ],
)
def test_a_task_that_the_format_cannot_say_is_not_written(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    task = load_clawgym(make_task(tmp_path / "a"))[0].model_copy(update=change)
    with pytest.raises(TaskError, match=message):
        save_clawgym([task], tmp_path / "out")


def test_nothing_is_written_over_other_files(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="new or empty"):
        save_clawgym(load_clawgym(make_task(tmp_path / "a")), tmp_path)


@pytest.mark.skipif("CLAWGYM_BENCH" not in os.environ, reason="CLAWGYM_BENCH names no folder of ClawGym-Bench tasks")
def test_clawgym_bench_loads_unchanged(tmp_path: Path) -> None:
    tasks = load_clawgym(os.environ["CLAWGYM_BENCH"])
    assert len(tasks) == len(os.listdir(os.environ["CLAWGYM_BENCH"]))
    save_clawgym(tasks, tmp_path / "out")
    assert [content(task) for task in load_clawgym(tmp_path / "out")] == [content(task) for task in tasks]
