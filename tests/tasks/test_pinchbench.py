"""PinchBench's Markdown tasks: what becomes of each part, and what is said of a broken one."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from clawgym_env.errors import GraderError, TaskError
from clawgym_env.grading.base import Grade, Outcome
from clawgym_env.grading.specs import CommandGrading, HybridGrading, RubricGrading
from clawgym_env.grading.task_grader import as_grader
from clawgym_env.messages import Message, ToolCall
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks import Task
from clawgym_env.tasks.pinchbench import GRADER, is_pinchbench, load_pinchbench

SET = Path(__file__).parent / "fixtures/pinchbench"
BLOCK = "```python\ndef grade(transcript, workspace_path):\n    return {'a': 1}\n```"


def write(folder: Path, name: str = "task_a", front: str = "", body: str | None = None) -> Path:
    """Write a small task and return the set's folder."""
    (folder / "tasks").mkdir(exist_ok=True)
    text = f"## Prompt\n\nDo it.\n\n## Automated Checks\n\n{BLOCK}\n" if body is None else body
    (folder / f"tasks/{name}.md").write_text(f"---\nid: {name}\n{front}---\n\n{text}")
    return folder


def load(folder: Path) -> Task:
    (task,) = load_pinchbench(folder)
    return task


def test_a_set_is_known_by_its_files_and_loads_in_the_manifests_order() -> None:
    tasks = load_pinchbench(SET)
    assert is_pinchbench(SET)
    assert is_pinchbench(SET / "tasks")
    assert not is_pinchbench(SET / "assets")
    assert (tasks.name, [task.id for task in tasks]) == (
        "pinchbench",
        ["task_second_visit", "task_word_count", "task_thank_you"],
    )
    assert [task.id for task in load_pinchbench(SET / "tasks")] == [task.id for task in tasks]
    assert load(SET / "tasks/task_word_count.md") == tasks[1]


def test_the_workspace_begins_with_inline_files_and_copies_of_assets() -> None:
    task = load_pinchbench(SET).by_id("task_word_count")
    assert {file.path: file.read() for file in task.files} == {
        "input/words.txt": b"one two three\nfour five\n",
        "README.md": b"# Notes\n\nCount what lies in `input/`.\n",
    }
    assert task.limits.wall_clock_s == 90
    assert task.metadata == {"name": "Word Count", "category": "files", "grading_type": "automated"}


def test_a_heading_inside_a_code_block_ends_no_section() -> None:
    task = load_pinchbench(SET).by_id("task_word_count")
    assert task.instruction.startswith("Count the words in `input/words.txt`")
    assert task.instruction.endswith("## This heading is part of the prompt.\n```")
    (checks,) = [file for file in task.hidden_files if file.path.endswith("checks.py")]
    assert checks.read().decode().endswith('"note": "not a number",\n    }\n')


def test_sessions_are_turns_of_which_some_begin_afresh() -> None:
    task = load_pinchbench(SET).by_id("task_second_visit")
    assert task.instruction == "My boat is called Heron. Please write that down.\n"
    assert [(turn.text, turn.new_session) for turn in task.turns] == [
        ("What is my boat called?", False),
        ("What is my boat called? You wrote it down.", True),
    ]


def test_a_rubric_is_a_criterion_a_heading_with_its_weight_and_anchors() -> None:
    rubric = load_pinchbench(SET).by_id("task_thank_you").grading
    assert isinstance(rubric, RubricGrading)
    warmth, facts = rubric.criteria
    assert (warmth.name, warmth.weight, warmth.question) == ("Warmth", 60.0, "How kind does it sound?")
    assert warmth.anchors == {
        "1": "Warm throughout.",
        "0.75": "Warm with a stiff passage.",
        "0.5": "Polite.",
        "0.25": "Cold,\nor copied.",
        "0": "Missing.",
    }
    assert (facts.name, facts.weight, facts.anchors) == ("Facts", 40.0, {})
    assert "**Score 0.8**: Names one." in facts.question
    assert rubric.show_conversation
    assert rubric.guidance.split("\n\n") == [
        "A letter that names something the caretaker did.",
        "Judge the letter, not the chat.",
        ["Scoring", "Be strict."][0],
        "Be strict.",
    ]


def test_without_a_rubric_the_checklist_is_asked_for_item_by_item() -> None:
    grading = load_pinchbench(SET).by_id("task_second_visit").grading
    assert isinstance(grading, HybridGrading)
    assert grading.automated_weight == pytest.approx(0.6)
    assert [(criterion.checks, criterion.weight) for criterion in grading.rubric.criteria] == [
        (("The name is written to a file",), 1.0),
        (("The last answer names the boat",), 1.0),
    ]


def test_a_rubric_without_headings_is_one_question(tmp_path: Path) -> None:
    body = "## Prompt\n\nDo it.\n\n## LLM Judge Rubric\n\nGive 1 if done, else 0.\n"
    grading = load(write(tmp_path, front="grading_type: llm_judge\n", body=body)).grading
    assert isinstance(grading, RubricGrading)
    assert [criterion.question for criterion in grading.criteria] == ["Give 1 if done, else 0."]


@pytest.mark.parametrize(("weights", "kind"), [("{automated: 1, llm_judge: 0}", CommandGrading), ("{}", HybridGrading)])
def test_a_side_without_weight_is_left_out(tmp_path: Path, weights: str, kind: type) -> None:
    body = f"## Prompt\n\nDo it.\n\n## Automated Checks\n\n{BLOCK}\n\n## LLM Judge Rubric\n\nJudge it.\n"
    task = load(write(tmp_path, front=f"grading_type: hybrid\ngrading_weights: {weights}\n", body=body))
    assert isinstance(task.grading, kind)
    if isinstance(task.grading, HybridGrading):
        assert task.grading.automated_weight == 0.5


def test_tasks_off_the_manifest_are_left_out_and_one_that_it_lists_must_be_there(tmp_path: Path) -> None:
    write(write(tmp_path), "task_b")
    manifest = tmp_path / "tasks/manifest.yaml"
    manifest.write_text("run_first: [task_b]\ncategories:\n  files: [task_b]\n")
    assert [task.id for task in load_pinchbench(tmp_path)] == ["task_b"]
    manifest.write_text("tasks: [task_c]\n")
    with pytest.raises(TaskError, match=r"task_c\.md, which .*manifest\.yaml lists"):
        load_pinchbench(tmp_path)
    manifest.write_text("tasks: [../../task_c]\n")
    with pytest.raises(TaskError, match="lists"):
        load_pinchbench(tmp_path)


BROKEN = [
    ("sessions:\n  - prompt: a\n  - 7\n", None, r"sessions\.1 at \S+task_a\.md:5: "),
    ("sessions:\n  - id: x\n", None, r"sessions\.0\.prompt at \S+task_a\.md:4: field required"),
    ("grading_type: guess\n", None, r"grading_type at \S+task_a\.md:3: "),
    ("timeout_seconds: .nan\n", None, r"timeout_seconds at \S+:3: "),
    ("workspace_files:\n  - sum.py\n", None, r"workspace_files\.0 at \S+:4: "),
    ("workspace_files:\n  - {path: a}\n", None, r"\S+:4: Expected a workspace file with path and content"),
    ("workspace_files:\n  - {path: ../a, content: x}\n", None, r"\S+:4: Expected a path inside the workspace"),
    ("workspace_files:\n  - {source: ../tasks/task_a.md, dest: a}\n", None, r"\S+:4: Expected a source inside"),
    ("workspace_files:\n  - {source: gone.txt, dest: a}\n", None, r"\S+:4: .*gone\.txt"),
    ("name: [\n", None, r"Expected YAML in \S+task_a\.md:\d"),
    ("name: !!python/object/apply:os.getcwd []\n", None, r"Expected YAML in \S+task_a\.md:3"),
    ("", "Nothing.", "section '## Prompt' or sessions"),
    ("", "## Prompt\n\nA\n\n## Prompt\n\nB\n", r"one section 'prompt', got a second at \S+:9"),
    ("", "## Prompt\n\nA\n", "python block"),
    ("", "## Prompt\n\nA\n\n## Automated Checks\n\ndef grade(t, w): ...\n", r"python block .*task_a\.md:11"),
    ("", "## Prompt\n\nA\n\n## Automated Checks\n\n```python\ndef grade(:\n```\n", r"Python at \S+:12"),
    ("", "## Prompt\n\nA\n\n## Automated Checks\n\n```python\nx = 1\n```\n", r"function grade\(.*:12"),
    ("grading_type: llm_judge\n", "## Prompt\n\nA\n", r"task_a\.md: Expected a rubric or a checklist"),
]


@pytest.mark.parametrize(("front", "body", "words"), BROKEN)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, front: str, body: str | None, words: str) -> None:
    (tmp_path / "assets").mkdir()
    with pytest.raises(TaskError, match=words):
        load_pinchbench(write(tmp_path, front=front, body=body))


def test_a_file_without_front_matter_is_named(tmp_path: Path) -> None:
    write(tmp_path).joinpath("tasks/task_a.md").write_text("id: task_a\n\n## Prompt\n\nA\n")
    with pytest.raises(TaskError, match=r"front matter between two lines '---' at the top of \S+task_a\.md"):
        load_pinchbench(tmp_path)


def test_only_some_weights_are_no_weights(tmp_path: Path) -> None:
    rubric = "### A (Weight: 50%)\n**Score 1.0**: yes\n\n### B\n**Score 1.0**: yes\n"
    body = f"## Prompt\n\nA\n\n## LLM Judge Rubric\n\n{rubric}"
    with pytest.raises(TaskError, match="a weight for each criterion or for none, got 1 weights for 2"):
        load_pinchbench(write(tmp_path, front="grading_type: llm_judge\n", body=body))


@pytest.mark.parametrize("last", ["[*a9]", "{x: *a9}", "3"])
def test_a_manifest_that_stands_for_gigabytes_is_refused_at_once(tmp_path: Path, last: str) -> None:
    write(tmp_path)
    aliases = ["a0: &a0 {x: [task_a], y: [task_a]}"]
    aliases += [f"a{i + 1}: &a{i + 1} {{{', '.join(f'k{k}: *a{i}' for k in range(10))}}}" for i in range(9)]
    (tmp_path / "tasks/manifest.yaml").write_text("\n".join([*aliases, f"tasks: {last}", ""]))
    with pytest.raises(TaskError, match="lists of task names"):
        load_pinchbench(tmp_path)


def test_an_asset_that_is_a_link_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "secret").write_text("s")
    (tmp_path / "assets/a").symlink_to(tmp_path / "secret")
    with pytest.raises(TaskError, match="inside"):
        load_pinchbench(write(tmp_path, front="workspace_files:\n  - {source: a, dest: a}\n"))


def test_a_broken_task_can_be_left_out_with_its_reason(tmp_path: Path) -> None:
    write(write(tmp_path), "task_b", front="grading_type: guess\n")
    told: list[TaskError] = []
    assert [task.id for task in load_pinchbench(tmp_path, on_error=told.append)] == ["task_a"]
    assert "task_b.md" in str(told[0])


def test_two_tasks_with_one_id_are_refused(tmp_path: Path) -> None:
    shutil.copy(write(tmp_path) / "tasks/task_a.md", tmp_path / "tasks/task_b.md")
    with pytest.raises(TaskError, match="unique task ids"):
        load_pinchbench(tmp_path)


# ---- grading


def graded(task: Task, files: dict[str, bytes], conversation: Sequence[Message]) -> Grade:
    """Grade a workspace in a fresh local sandbox."""

    async def run() -> Grade:
        sandbox = await LocalBackend().open(SandboxSpec())
        try:
            for path, data in files.items():
                await sandbox.write_file(f"{task.workdir}/{path}", data)
            return await as_grader(None).grade(task, sandbox, Outcome("Done.", tuple(conversation)))
        finally:
            await sandbox.close()

    return asyncio.run(run())


def test_the_checks_see_workspace_and_transcript_and_their_numbers_are_averaged() -> None:
    task = load_pinchbench(SET).by_id("task_word_count")
    used = (Message("user", "u"), Message("assistant", tool_calls=(ToolCall("c", "Write", "{}"),)))
    grade = graded(task, {"count.txt": b"5\n"}, used)
    assert grade.components == {"exists": 1.0, "right": 1.0, "tool_used": 0.5}
    assert grade.reward == pytest.approx(2.5 / 3)
    assert "checking" in grade.output
    planted = {f"{GRADER}/checks.py": b"def grade(t, w): return {'a': 1}", "json.py": b"raise SystemExit"}
    assert graded(task, planted, ()).reward == 0.0


def test_checks_that_crash_are_a_failed_grading(tmp_path: Path) -> None:
    body = "## Prompt\n\nA\n\n## Automated Checks\n\n```python\ndef grade(t, w):\n    return open(w + '/gone')\n```\n"
    with pytest.raises(GraderError, match="gone"):
        graded(load(write(tmp_path, body=body)), {}, ())


@pytest.mark.parametrize(
    ("returned", "words"),
    [("None", "a dict of scores"), ("0.5", "a dict of scores"), ("{'a': 'yes'}", "numbers among")],
)
def test_checks_that_return_no_scores_are_a_failed_grading_and_no_zero(
    tmp_path: Path, returned: str, words: str
) -> None:
    body = f"## Prompt\n\nA\n\n## Automated Checks\n\n```python\ndef grade(t, w):\n    return {returned}\n```\n"
    with pytest.raises(GraderError, match=words):
        graded(load(write(tmp_path, body=body)), {}, ())


def test_the_grading_script_prints_numbers_only(tmp_path: Path) -> None:
    task = load_pinchbench(SET).by_id("task_word_count")
    for file in task.hidden_files:
        (tmp_path / Path(file.path).name).write_bytes(file.read())
    (tmp_path / "payload.json").write_text('{"transcript": []}')
    done = subprocess.run(
        [sys.executable, tmp_path / "grade.py"],
        env={"OPENCLAW_REWARD_PAYLOAD": str(tmp_path / "payload.json")},
        cwd=tmp_path,
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"exists": 0.0, "right": 0.0, "tool_used": 0.0}
    assert done.stderr == b"checking\n"
