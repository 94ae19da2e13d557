"""The bundled tasks' shared checker: what is right, what is near, what is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_env.tasks.bundled import check
from clawgym_env.tasks.bundled.expectation import expect, expected_json
from clawgym_env.tasks.bundled.family import checker_files


@pytest.mark.parametrize(
    ("kind", "value", "text", "score"),
    [
        ("text", "balo", "balo", 1.0),
        ("text", "balo", "balo\n", 1.0),
        ("text", "balo", "balo\r\n", 1.0),
        ("text", "balo", "balo\n\n", 0.5),
        ("text", "balo", '"balo"', 0.5),
        ("text", "balo", "Balo", 0.0),
        ("text", "balo", "kimu", 0.0),
        ("text", "balo", "", 0.0),
        ("text", "balo", "balo kimu", 0.25),
        ("text", "balo kimu", "balo", 0.25),
        ("text", "balo kimu", "kimu balo", 0.0),
        ("text", "balo\nkimu", "balo\nkimu\n", 1.0),
        ("text", "balo\nkimu", "balo kimu", 0.0),
        ("text", "a\nb\nc\nd", "a\nb\nx\nd", 0.375),
        ("contains", "balo", "x balo x", 1.0),
        ("contains", "balo", "kimu", 0.0),
        ("number", 12, "12\n", 1.0),
        ("number", 12, " 12.0", 1.0),
        ("number", 12, "13", 0.0),
        ("number", 12, "twelve", 0.0),
        ("number", 12, "nan", 0.0),
        ("json", {"a": 1, "b": "x"}, '{"b": "x", "a": 1.0}', 1.0),
        ("json", {"a": 1, "b": "x"}, '{"a": "1", "b": "x"}', 0.25),
        ("json", {"a": 1}, '{"a": true}', 0.0),
        ("json", {"a": 1}, '{"a": 1, "b": 2}', 0.25),
        ("json", {"a": 1}, "{", 0.0),
        ("json", {"a": 1}, "[" * 100_000, 0.0),
        ("json", [1, 2], "[1, 3]", 0.25),
        ("csv", [["a", "b"], ["1", "2"]], "a,b\n1,2\n", 1.0),
        ("csv", [["a", "b"], ["1", "2"]], 'a, b\r\n"1",2', 1.0),
        ("csv", [["a", "b"], ["1", "2"]], "a,b\n1,3\n", 0.25),
    ],
)
def test_texts_earn_what_they_should(kind: str, value: object, text: str, score: float, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(text.encode())
    judged = check.judge(str(tmp_path), {"file": "f", "kind": kind, "value": value, "before": None}, {"f"})
    assert judged == pytest.approx(score)


def run(workspace: Path, *, inputs: tuple[str, ...] = (), before: str | None = None) -> tuple[float, dict[str, float]]:
    """Check that the file `out.txt` holds `balo`."""
    (workspace / "reward").mkdir()
    for file in checker_files():
        (workspace / file.path).write_bytes(file.read())
    expected = expected_json(expect("out.txt", "balo", before=before), inputs)
    (workspace / "reward" / "expected.json").write_bytes(expected)
    environment = {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "PYTHONPATH": str(workspace)}
    command = ["bash", "reward/reward.sh"]
    done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, check=True)
    components, reward = done.stdout.splitlines()
    return float(reward), json.loads(components)


def test_a_wrong_word_in_the_right_file_earns_a_fifth(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("kimu")
    assert run(tmp_path) == (0.2, {"file_exists": 1.0, "file_content": 0.0})


def test_the_right_word_in_another_file_earns_a_fifth(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "other.txt").write_text("balo\n")
    assert run(tmp_path) == (0.2, {"file_exists": 0.0, "file_content": 0.25})


def test_an_input_that_holds_the_answer_earns_nothing(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("balo\n")
    assert run(tmp_path, inputs=("in.txt",))[0] == 0.0


def test_a_file_left_as_it_was_earns_nothing(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("balo kimu")
    assert run(tmp_path, inputs=("out.txt",), before="balo kimu")[0] == 0.0


@pytest.mark.parametrize(
    ("text", "earned"),
    [
        ("a,b\n1,2\n3,4\n", 1.0),
        ("a,b\n1,2\n", 0.0),
        ("a,b\n1,2", 0.0),
        ("\na,b\n1,2\n\n", 0.0),
        ("a,b\n3,4\n", 0.0),
        ("a,b\n1,2\n3,5\n", 0.0),
        ("x,y\n1,2\n3,4\n", 0.0),
    ],
)
def test_what_was_there_at_the_start_earns_nothing(text: str, earned: float, tmp_path: Path) -> None:
    (tmp_path / "f").write_text(text)
    rows = [["a", "b"], ["1", "2"], ["3", "4"]]
    expected = {"file": "f", "kind": "csv", "value": rows, "before": "a,b\n1,2\n"}
    assert check.judge(str(tmp_path), expected, {"f"}) == earned


def test_half_of_what_was_to_be_done_earns_something(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("a\nc\n")
    expected = {"file": "f", "kind": "text", "value": "a\nc\nd\ne", "before": "a\n"}
    assert check.judge(str(tmp_path), expected, {"f"}) == pytest.approx(0.5 * 2 / 4 - 0.5 * 1 / 4)


def test_pipes_links_and_folders_in_place_of_the_file_earn_nothing_and_do_not_hang(tmp_path: Path) -> None:
    for name, make in (
        ("pipe", os.mkfifo),
        ("link", lambda path: os.symlink("/etc/hostname", path)),
        ("folder", os.mkdir),
    ):
        (tmp_path / name).mkdir()
        make(tmp_path / name / "out.txt")
        os.mkfifo(tmp_path / name / "another-pipe")
        assert run(tmp_path / name)[0] == 0.0


def test_modules_planted_in_the_workspace_are_not_imported(tmp_path: Path) -> None:
    for name in ("json.py", "sitecustomize.py"):
        (tmp_path / name).write_text("print(1.0)\nraise SystemExit\n")
    assert run(tmp_path)[0] == 0.0
