"""OfficeQA: rows and their texts, what the agent is told, what stays with the grader."""

import csv
from pathlib import Path
from typing import Any

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import AnswerGrading
from clawgym_env.tasks import SolutionStep
from clawgym_env.tasks.officeqa import is_officeqa, load_officeqa

ROWS: list[dict[str, str]] = [
    {
        "uid": "Q1",
        "question": "How many millions, in 1941?",
        "answer": "507",
        "source_docs": "https://example.org/a?id=1",
        "source_files": "treasury_bulletin_1941_01.txt\ntreasury_bulletin_1941_02.txt",
        "difficulty": "easy",
    },
    {
        "uid": "Q2",
        "question": 'Which, "net"\nor gross?',
        "answer": "[net, 12%]",
        "source_docs": "",
        "source_files": "['treasury_bulletin_1941_02.json']",
        "difficulty": "hard",
    },
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "officeqa_full.csv", ROWS)
    texts = tmp_path / "bulletins" / "parsed"
    texts.mkdir(parents=True)
    for month in ("01", "02", "03"):
        (texts / f"treasury_bulletin_1941_{month}.txt").write_text(f"month {month}\n")
    return tmp_path


def write(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def test_a_row_brings_the_texts_it_names(folder: Path) -> None:
    first, second = load_officeqa(folder)
    assert (first.id, second.id) == ("Q1", "Q2")
    assert [(file.path, file.read()) for file in first.files] == [
        ("corpus/treasury_bulletin_1941_01.txt", b"month 01\n"),
        ("corpus/treasury_bulletin_1941_02.txt", b"month 02\n"),
    ]
    assert [file.path for file in second.files] == ["corpus/treasury_bulletin_1941_02.txt"]
    assert first.instruction.startswith("How many millions, in 1941?\n")
    assert "<FINAL_ANSWER>" in first.instruction
    assert "corpus/" in first.instruction
    assert first.grading == AnswerGrading(expected="507")
    assert first.metadata == {"category": "easy"}
    assert "507" not in first.instruction


def test_all_texts_are_shown_from_where_they_lie(folder: Path) -> None:
    (task, _) = load_officeqa(folder / "officeqa_full.csv", corpus="all", tolerance=0.01)
    assert task.files == ()
    ((mount,),) = (task.mounts,)
    assert (mount.source, mount.target) == (folder / "bulletins" / "parsed", "/corpus")
    assert "/corpus/" in task.instruction
    assert task.grading == AnswerGrading(expected="507", tolerance=0.01)


@pytest.mark.parametrize(("difficulty", "ids"), [("all", ["Q1", "Q2"]), ("easy", ["Q1"]), ("hard", ["Q2"])])
def test_difficulty_chooses_rows(difficulty: str, ids: list[str], folder: Path) -> None:
    assert [task.id for task in load_officeqa(folder, difficulty=difficulty)] == ids


def test_rows_without_a_difficulty_have_no_category(folder: Path) -> None:
    write(folder / "officeqa_pro.csv", [{key: ROWS[0][key] for key in ("uid", "question", "answer", "source_files")}])
    assert len(load_officeqa(folder)) == 2
    (task,) = load_officeqa(folder / "officeqa_pro.csv")
    assert task.metadata == {}


def test_texts_may_lie_elsewhere(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("texts")
    (folder / "bulletins").rename(elsewhere / "bulletins")
    with pytest.raises(TaskError, match=r"got none. Name their folder: texts=FOLDER"):
        load_officeqa(folder)
    assert len(load_officeqa(folder, texts=elsewhere)) == 2


def test_the_answer_is_the_solution(folder: Path) -> None:
    tasks = load_officeqa(folder)
    assert tasks.solution(tasks[0]) == (SolutionStep("answer", {"text": "<FINAL_ANSWER>507</FINAL_ANSWER>"}),)


def test_it_is_recognised_by_its_csv(folder: Path) -> None:
    assert is_officeqa(folder)
    assert is_officeqa(folder / "officeqa_full.csv")
    assert not is_officeqa(folder / "bulletins")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source_files": "treasury_bulletin_1999_01.txt"}, r"full.csv:4: Expected the text treasury_bulletin_1999_01"),
        ({"source_files": ""}, "Expected source_files, got ''. Without them: corpus=all"),
        ({"answer": " "}, "Expected uid, question and answer"),
        ({"uid": "Q1"}, "unique ids, got 'Q1' twice"),
    ],
)
def test_a_bad_row_is_named_and_costs_no_other(change: dict[str, str], message: str, folder: Path) -> None:
    write(folder / "officeqa_full.csv", [ROWS[0], {**ROWS[1], "question": "Which?", **change}])
    with pytest.raises(TaskError, match=message):
        load_officeqa(folder)
    errors: list[TaskError] = []
    assert [task.id for task in load_officeqa(folder, on_error=errors.append)] == ["Q1"]
    assert len(errors) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"corpus": "some"}, "corpus='some'"),
        ({"difficulty": "odd"}, "difficulty 'odd' .* got none among 2"),
        ({"tolerance": 1.0}, r"tolerance in \[0, 1\)"),
    ],
)
def test_a_wrong_option_is_said(options: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(TaskError, match=message):
        load_officeqa(folder, **options)


def test_a_csv_of_other_columns_or_bytes_is_said(folder: Path) -> None:
    (folder / "officeqa_full.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TaskError, match="got no uid, question, answer"):
        load_officeqa(folder)
    (folder / "officeqa_full.csv").write_bytes(b"uid,question,answer\n\xff,b,c\n")
    with pytest.raises(TaskError, match="Expected CSV in UTF-8"):
        load_officeqa(folder)
