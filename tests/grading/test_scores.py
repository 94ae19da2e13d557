"""The table of `scores`: every outcome of a grading command has one meaning."""

import json
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import Grade
from clawgym_env.grading.scores import read_grade
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import ExecResult

Form = Literal["last_line", "mean_of_json", "exit_code", "reward_file"]
FORMS: tuple[Form, ...] = ("last_line", "mean_of_json", "exit_code", "reward_file")
READ: tuple[Form, ...] = ("last_line", "mean_of_json", "reward_file")
"""The forms that read a text."""


def read(form: Form, text: str = "0.5", *, exit_code: int = 0, timed_out: bool = False, dropped: int = 0) -> Grade:
    """Grade a command that prints `text`, or writes it where the form reads a file."""
    in_file = form == "reward_file"
    grading = CommandGrading(command=("grade",), score=form, reward_files=("/r.txt",) if in_file else ())
    stdout = b"noise" if in_file else text.encode()
    result = ExecResult(exit_code, stdout, b"", timed_out=timed_out, dropped_bytes=dropped)
    written = text.encode() if in_file else None
    return read_grade(result, grading, task_id="t", timeout_s=5.0, written=written)


def fails(form: Form, text: str = "0.5", *, exit_code: int = 0, timed_out: bool = False, dropped: int = 0) -> str:
    with pytest.raises(GraderError, match="Expected the grader of task 't' to") as error:
        read(form, text, exit_code=exit_code, timed_out=timed_out, dropped=dropped)
    return str(error.value)


@pytest.mark.parametrize("form", FORMS)
def test_a_command_that_does_not_end_is_killed_or_cannot_be_run_has_no_score(form: Form) -> None:
    assert "got no end within 5 s" in fails(form, exit_code=124, timed_out=True)
    for code in (-9, -15, 126, 127, 137, 139, 143, 192):
        assert f"got exit code {code}." in fails(form, exit_code=code)


@pytest.mark.parametrize("code", [1, 2, 125, 128, 255])
def test_another_exit_code_is_an_error_a_zero_or_no_matter(code: int) -> None:
    assert f"got exit code {code}." in fails("last_line", exit_code=code)
    assert f"got exit code {code}." in fails("mean_of_json", exit_code=code)
    assert read("exit_code", exit_code=code).reward == 0.0
    assert read("reward_file", exit_code=code).reward == 0.5


def test_a_good_end_scores_one_whatever_was_printed() -> None:
    assert read("exit_code", "").reward == read("exit_code", "nan", dropped=7).reward == 1.0


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("text", ["", "  \n \n", "nan", "NaN", "inf", "-inf", "-0.1", "1.5", "1e400", "1_0", "-1e-5"])
def test_what_is_no_number_between_zero_and_one_is_no_score(form: Form, text: str) -> None:
    fails(form, text)


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize("text", ["null", "[1]", '"0.5"', "done", "{", "[" * 100_000, "9" * 5000])
def test_lists_null_and_text_are_no_score(form: Form, text: str) -> None:
    fails(form, text)


@pytest.mark.parametrize("form", READ)
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("0", 0.0),
        ("1", 1.0),
        ("0.25", 0.25),
        ("2.5e-1\n", 0.25),
        ("true", 1.0),
        ("false", 0.0),
        ("1.0000000001", 1.0),
        ("-1e-9", 0.0),
    ],
)
def test_numbers_and_truths_are_scores(form: Form, text: str, reward: float) -> None:
    assert read(form, text).reward == reward


def test_stdout_cut_short_is_an_error_only_where_it_is_read() -> None:
    assert "10 bytes of output, more than are kept" in fails("last_line", "0.5", dropped=7)
    assert "more than are kept" in fails("mean_of_json", "{}", dropped=1)
    assert read("reward_file", dropped=1).reward == 0.5


@pytest.mark.parametrize(
    ("printed", "mean", "parts"),
    [
        ('{\n  "a": 1.0,\n  "b": true,\n  "c": false, "d": "0.5"\n}', 0.625, {"a": 1.0, "b": 1.0, "c": 0.0, "d": 0.5}),
        ("{}", 0.0, {}),
        ('noise\n{"a": 1, "b": 0}\n', 0.5, {"a": 1.0, "b": 0.0}),
        ('{"bonus": 1.5, "malus": -0.5}', 0.5, {"bonus": 1.5, "malus": -0.5}),
        ('{"a": 0.1, "b": 0.1, "c": 0.1}', 0.1, {"a": 0.1, "b": 0.1, "c": 0.1}),
    ],
)
def test_a_mean_keeps_its_parts(printed: str, mean: float, parts: dict[str, float]) -> None:
    grade = read("mean_of_json", printed)
    assert grade.reward == pytest.approx(mean)
    assert grade.components == parts


@pytest.mark.parametrize("value", ["null", '"x"', "[1]", '{"b": 1}', "NaN", "Infinity", "3", "-2", '"nan"'])
def test_a_part_that_is_no_number_or_spoils_the_mean_is_an_error(value: str) -> None:
    fails("mean_of_json", f'{{"a": {value}}}')


def test_an_error_names_the_part_without_a_number() -> None:
    assert "got null for 'b'" in fails("mean_of_json", '{"a": 1, "b": null}')


def test_the_last_line_before_the_score_that_is_an_object_gives_the_components() -> None:
    line = json.dumps({"a": 0.5, "b": True, "note": "x", "bad": float("nan"), "deep": {"c": 1}})
    grade = read("last_line", f'{{"old": 1}}\n{line}\n{{broken\n0.75\n\n')
    assert grade.reward == 0.75
    assert grade.components == {"a": 0.5, "b": 1.0}
    assert "got the last line '{" in fails("last_line", '{"reward": 1}')


def test_a_reward_file_may_hold_an_object_with_a_reward() -> None:
    grade = read("reward_file", '{"reward": 0.5, "speed": 2, "ok": true, "note": "x"}')
    assert grade.reward == 0.5
    assert grade.components == {"speed": 2.0, "ok": 1.0}
    for text in ("{}", '{"score": 1}', '{"reward": null}', '{"reward": [1]}', '{"reward": {"reward": 1}}'):
        assert "in it" in fails("reward_file", text)


def test_a_missing_reward_file_is_an_error_that_names_it() -> None:
    grading = CommandGrading(command=("grade",), score="reward_file", reward_files=("/l/r.txt", "/l/r.json"))
    with pytest.raises(GraderError, match=r"write a score in \[0, 1\] to /l/r\.txt or /l/r\.json, got no such file"):
        read_grade(ExecResult(0, b"1", b""), grading, task_id="t", timeout_s=1.0)


def test_where_a_reward_is_written_is_said_exactly_when_it_is_read() -> None:
    with pytest.raises(ValueError, match="Expected reward_files"):
        CommandGrading(score="reward_file")
    with pytest.raises(ValueError, match="Expected reward_files"):
        CommandGrading(reward_files=("/r.txt",))
    with pytest.raises(ValueError, match="Expected absolute paths"):
        CommandGrading(score="reward_file", reward_files=("r.txt",))


@given(form=st.sampled_from(FORMS), text=st.text() | st.floats().map(repr), code=st.integers(-64, 255))
def test_any_outcome_is_a_grade_in_range_or_a_grader_error(form: Form, text: str, code: int) -> None:
    text = text.encode(errors="replace").decode()
    try:
        grade = read(form, text, exit_code=code)
    except GraderError:
        return
    assert 0.0 <= grade.reward <= 1.0
