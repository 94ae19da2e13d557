"""ClawGym's JSONL form: persona, skill and benchmark lines, rubrics, ids, and the one error of each bad line."""

import json
import subprocess
import tracemalloc
from pathlib import Path

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading, HybridGrading, RubricGrading
from clawgym_env.sandbox.base import WORKDIR
from clawgym_env.tasks.clawgym_jsonl import load_jsonl

CHECKER = "import json, sys\nprint(json.dumps({'there': float(len(sys.argv) == 2)}))\n"
ANCHORS = {"0": "none", "0.25": "bad", "0.5": "half", "0.75": "good", "1.0": "all"}
RULES = [
    {"name": "tone", "file_path": "out/mail.txt", "scores": ANCHORS},
    {"name": "depth", "file_path": f"{WORKDIR}/out/plan.md", "scores": ANCHORS},
]
RUBRIC = {"eval_type": "llm_rubric", "score_options": [0, 0.25, 0.5, 0.75, 1], "rules": RULES}
PERSONA: dict[str, object] = {
    "prompt": "Write a mail.",
    "hook_code": "python3 reward/test.py <workspace>",
    "hook_lang": "bash",
    "rule": None,
    "category": "office",
    "origin_template": "---\nid: task_mail_007\nname: x\n---\nid: not_this\n",
    "input_files": [
        {"file_path": "input/notes.txt", "file_format": "txt", "content": "notes\n"},
        {"file_path": "./reward/test.py", "content": CHECKER},
    ],
}
SKILL: dict[str, object] = {
    "task_id": "skill-1",
    "prompt": "Make a plan.",
    "validation_mode": "code_and_rubric",
    "rubrics": RUBRIC,
    "hook_code": "python3 reward/check.py {workspace}",
    "input_files": [{"path": f"{WORKDIR}/data/a.json", "content": {"a": 1}}],
    "reward_files": [{"path": "check.py", "content": CHECKER}],
}


def write(folder: Path, *entries: object) -> Path:
    path = folder / "tasks.jsonl"
    path.write_text("".join(f"{entry if isinstance(entry, str) else json.dumps(entry)}\n" for entry in entries))
    return path


def test_a_rule_about_no_file_is_judged_with_what_was_said(tmp_path: Path) -> None:
    rule = {"name": "told", "scores": ANCHORS}
    about_files, about_words = load_jsonl(
        write(tmp_path, {"prompt": "p", "rule": RUBRIC}, {"prompt": "p", "rule": {"rules": [*RULES, rule]}})
    )
    assert isinstance(about_files.grading, RubricGrading)
    assert isinstance(about_words.grading, RubricGrading)
    assert (about_files.grading.show_conversation, about_words.grading.show_conversation) == (False, True)
    assert about_words.grading.files == ()


def test_a_mark_at_the_start_and_windows_line_ends_are_no_fault(tmp_path: Path) -> None:
    path = write(tmp_path, PERSONA, SKILL)
    plain = list(load_jsonl(path))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert list(load_jsonl(path)) == plain


def test_a_task_is_found_by_its_id_without_making_the_others(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": f"p{i}", "task_id": f"t{i}", "rules": RUBRIC} for i in range(5)))
    tasks = load_jsonl(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[i] if i == 3 else b"x" * (len(lines[i]) - 1) + b"\n" for i in range(5)))
    assert tasks.by_id("t3").instruction == "p3"
    assert tasks[2:].by_id("t3").instruction == "p3"
    with pytest.raises(KeyError, match="Expected a task id of 'tasks', got 't9'"):
        load_jsonl(write(tmp_path, PERSONA)).by_id("t9")


def test_a_persona_line_is_a_task_with_its_checker_hidden(tmp_path: Path) -> None:
    (task,) = load_jsonl(write(tmp_path, PERSONA))
    assert (task.id, task.instruction) == ("task_mail_007", "Write a mail.")
    assert [(file.path, file.read()) for file in task.files] == [("input/notes.txt", b"notes\n")]
    assert [file.path for file in task.hidden_files] == ["reward/test.py"]
    assert task.grading == CommandGrading(
        command=("bash", "-c", f"python3 reward/test.py {WORKDIR}"), score="mean_of_json"
    )
    assert task.metadata == {"category": "office", "hook_lang": "bash"}


def test_the_hook_runs_as_it_is(tmp_path: Path) -> None:
    (task,) = load_jsonl(write(tmp_path, PERSONA))
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "test.py").write_bytes(task.hidden_files[0].read())
    assert isinstance(task.grading, CommandGrading)
    done = subprocess.run(task.grading.command, cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(done.stdout) == {"there": 1.0}


def test_a_skill_line_averages_code_and_rubric(tmp_path: Path) -> None:
    (task,) = load_jsonl(write(tmp_path, SKILL))
    assert task.id == "skill-1"
    assert [(file.path, json.loads(file.read())) for file in task.files] == [("data/a.json", {"a": 1})]
    assert [file.path for file in task.hidden_files] == ["reward/check.py"]
    assert isinstance(task.grading, HybridGrading)
    assert task.grading.automated_weight == 0.5
    assert task.grading.automated.command == ("bash", "-c", f"python3 reward/check.py {WORKDIR}")
    tone, depth = task.grading.rubric.criteria
    assert (tone.file, depth.file) == ("out/mail.txt", "out/plan.md")
    assert list(tone.anchors) == ["0", "0.25", "0.5", "0.75", "1"]
    assert task.grading.rubric.files == ("out/mail.txt", "out/plan.md")


@pytest.mark.parametrize("key", ["rule", "rules", "rubrics"])
@pytest.mark.parametrize("rubric", [RUBRIC, RUBRIC["rules"], json.dumps(RUBRIC)])
def test_code_with_a_rubric_weighs_as_in_the_benchmark(key: str, rubric: object, tmp_path: Path) -> None:
    (task,) = load_jsonl(write(tmp_path, {**PERSONA, key: rubric}))
    assert isinstance(task.grading, HybridGrading)
    assert task.grading.automated_weight == 0.7
    assert len(task.grading.rubric.criteria) == 2


def test_a_skipped_rubric_is_none(tmp_path: Path) -> None:
    (task,) = load_jsonl(write(tmp_path, {**PERSONA, "rule": {"skip_rubric": True, "reason": "code says all"}}))
    assert isinstance(task.grading, CommandGrading)


@pytest.mark.parametrize(("mode", "kind"), [("rubric", RubricGrading), ("code", CommandGrading)])
def test_the_mode_chooses_a_side(mode: str, kind: type, tmp_path: Path) -> None:
    (task,) = load_jsonl(write(tmp_path, {**SKILL, "validation_mode": mode}))
    assert isinstance(task.grading, kind)


@pytest.mark.parametrize(
    ("name", "command", "score"),
    [
        ("reward.sh", ("bash", "reward/reward.sh"), "last_line"),
        ("check.py", ("python3", "reward/check.py", WORKDIR), "mean_of_json"),
    ],
)
def test_without_a_hook_the_checker_itself_is_run(
    name: str, command: tuple[str, ...], score: str, tmp_path: Path
) -> None:
    entry = {**SKILL, "validation_mode": "code", "hook_code": "", "reward_files": [{"path": name, "content": ""}]}
    (task,) = load_jsonl(write(tmp_path, entry))
    assert isinstance(task.grading, CommandGrading)
    assert (task.grading.command, task.grading.score) == (command, score)


def test_lines_of_one_template_get_ids_of_their_own_and_lines_without_one_their_number(tmp_path: Path) -> None:
    nameless = {key: value for key, value in PERSONA.items() if key != "origin_template"}
    tasks = load_jsonl(write(tmp_path, PERSONA, "", PERSONA, nameless))
    assert [task.id for task in tasks] == ["task_mail_007", "task_mail_007-000003", "tasks-000004"]
    assert tasks[1].id == "task_mail_007-000003"
    assert tasks[2:][0].id == "tasks-000004"


def test_only_the_lines_asked_for_are_read_again(tmp_path: Path) -> None:
    path = write(tmp_path, PERSONA, SKILL)
    tasks = load_jsonl(path)
    text = path.read_text()
    path.write_text("x" * text.index("\n") + text[text.index("\n") :])
    assert tasks[1].id == "skill-1"
    with pytest.raises(TaskError, match=r"tasks.jsonl:1: Expected JSON"):
        tasks[0]


BAD = {
    "no JSON": ("{", "Expected JSON"),
    "a list": ("[]", "Expected an object, got list"),
    "no prompt": ({**PERSONA, "prompt": None}, "Expected a prompt"),
    "a way out": ({**PERSONA, "input_files": [{"file_path": "../x", "content": ""}]}, r"inside the workspace.*'../x'"),
    "an absolute path": ({**PERSONA, "input_files": [{"path": "/etc/x", "content": ""}]}, "inside the workspace"),
    "no path": ({**PERSONA, "input_files": [{"content": ""}]}, "Expected file_path"),
    "a file twice": ({**PERSONA, "input_files": [{"path": "a"}, {"path": "./a"}]}, "'a' twice"),
    "files that are text": ({**PERSONA, "input_files": "a"}, "Expected a list in input_files"),
    "no grading": ({"prompt": "x"}, "a checker .* or a rubric, got neither"),
    "an unknown mode": ({**SKILL, "validation_mode": "vibes"}, "got 'vibes'"),
    "no rubric for the mode": ({**SKILL, "rubrics": None}, "got no rubric"),
    "no code for the mode": ({**SKILL, "hook_code": None, "reward_files": []}, "got no hook_code"),
    "a rubric without rules": ({**SKILL, "rubrics": {"rules": []}}, "Expected rules in the rubric"),
    "two rules of one name": ({**SKILL, "rubrics": [{"name": "a"}, {"name": "a"}]}, "unique names"),
    "an odd score": ({**SKILL, "rubrics": [{"name": "a", "scores": {"0.3": "x"}}]}, "got 0.3"),
    "scores in a list": ({**SKILL, "rubrics": [{"name": "a", "scores": [1]}]}, "texts by score"),
    "a rule that is text": ({**SKILL, "rubrics": ["be nice"]}, "rule 1 to be an object"),
    "a rule with a way out": ({**SKILL, "rubrics": [{"name": "a", "file_path": "../../x"}]}, "inside the workspace"),
    "a negative weight": ({**SKILL, "rubrics": [{"name": "a", "weight": -1}]}, "weight: "),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_line_is_named_and_costs_no_other(fault: str, tmp_path: Path) -> None:
    entry, message = BAD[fault]
    path = write(tmp_path, PERSONA, entry, SKILL)
    with pytest.raises(TaskError, match=rf"In .*tasks.jsonl:2: .*{message}"):
        load_jsonl(path)
    errors: list[TaskError] = []
    assert [task.id for task in load_jsonl(path, on_error=errors.append)] == ["task_mail_007", "skill-1"]
    assert len(errors) == 1


def test_no_file_and_no_line_are_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="got no line"):
        load_jsonl(write(tmp_path))
    with pytest.raises(TaskError, match=r"Expected a JSONL file"):
        load_jsonl(tmp_path / "gone.jsonl")


def test_a_large_set_keeps_no_content(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    line = json.dumps({**PERSONA, "input_files": [{"path": "a", "content": "x" * 10_000}]})
    path.write_text(f"{line}\n" * 300)
    tracemalloc.start()
    try:
        tasks = load_jsonl(path)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tasks) == 300
    assert kept < path.stat().st_size / 10
