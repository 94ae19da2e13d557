"""OfficeQA: questions about Treasury Bulletins, from a CSV and a folder of their texts.

The agent finds either the texts that its question comes from in its workspace, or all of them in a read-only folder.
Invariant: expected answer and difficulty are in no file and no word that the agent sees.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import AnswerGrading
from clawgym_env.sandbox.base import Mount
from clawgym_env.tasks.reading import OnError, naming, reported, task_file
from clawgym_env.tasks.task import SolutionStep, Task, TaskFile, TaskSet

PATTERN = "officeqa*.csv"
PREFERRED = "officeqa_full.csv"
CORPUS = "corpus"
"""Folder of the workspace with the texts of one question."""
MOUNTED = "/corpus"
"""Where all texts are shown; outside the workspace, which is copied for the grader."""
COLUMNS = ("uid", "question", "answer")
CONTRACT = """
{where}

Work the answer out from these texts. End with the answer alone on one line between <FINAL_ANSWER> and </FINAL_ANSWER>:
a number with its unit if it has one, a few words, or a list in brackets such as [1.5, 2.25]. No explanation inside."""
_STEM = re.compile(r"[\w-]+(?=\.(?:txt|json|pdf|md)\b)|\b[\w-]*\d{4}_\d{2}\b", re.IGNORECASE)


def load_officeqa(
    path: str | Path,
    *,
    texts: str | Path | None = None,
    corpus: Literal["row", "all"] = "row",
    difficulty: str = "all",
    tolerance: float = 0.0,
    on_error: OnError | None = None,
) -> TaskSet:
    """Load OfficeQA's questions. The set knows the answers as solutions.

    Args:
        path: the CSV, or the folder that holds it.
        texts: the folder of the bulletins as `.txt` files, at any depth; that of the CSV by default.
        corpus: "row" copies the texts a question names into its workspace, "all" shows every text in `/corpus`.
        difficulty: "easy", "hard" or "all"; a CSV without that column has only "all".
        tolerance: relative error allowed in numbers.
        on_error: told what is wrong with a row, which is then left out.

    Raises:
        TaskError: without `on_error` the first thing that is wrong; no task at all in any case.
    """
    file = _csv(Path(path))
    if corpus not in ("row", "all"):
        raise TaskError(f"Expected corpus=row or corpus=all, got corpus={corpus!r}.")
    if not 0.0 <= tolerance < 1.0:
        raise TaskError(f"Expected a tolerance in [0, 1), got {tolerance}.")
    folder = Path(texts).expanduser() if texts is not None else file.parent
    known = {text.stem: text for text in sorted(folder.rglob("*.txt"))}
    if not known:
        raise TaskError(f"Expected the bulletins as .txt files in {folder}, got none. Name their folder: texts=FOLDER")
    mounts = (Mount(source=_common(known), target=MOUNTED),) if corpus == "all" else ()
    tasks: dict[str, Task] = {}
    rows = 0
    for number, row in _rows(file, on_error):
        rows += 1
        if difficulty not in ("all", (row.get("difficulty") or "").strip().lower()):
            continue
        with reported(on_error), naming(f"{file}:{number}"):
            files = () if mounts else tuple(_sources(row, known, folder))
            task = _task(row, files, mounts, tolerance)
            if task.id in tasks:
                raise TaskError(f"Expected unique ids, got {task.id!r} twice.")
            tasks[task.id] = task
    if not tasks and on_error is None:
        raise TaskError(f"Expected questions of difficulty {difficulty!r} in {file}, got none among {rows}.")
    return TaskSet.of(list(tasks.values()), name="officeqa", solve=_solution)


def is_officeqa(path: Path) -> bool:
    """Whether OfficeQA's CSV lies there."""
    if path.is_dir():
        return any(path.glob(PATTERN))
    return path.suffix == ".csv" and path.is_file()


def _csv(path: Path) -> Path:
    if path.is_file():
        return path
    found = sorted(path.glob(PATTERN), key=lambda file: (file.name != PREFERRED, file.name))
    if not found:
        raise TaskError(f"Expected {PREFERRED} in {path}, got no such file.")
    return found[0]


def _rows(file: Path, on_error: OnError | None) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Yield the rows with the number of the line they end on."""
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            if missing := [name for name in COLUMNS if name not in (reader.fieldnames or ())]:
                raise TaskError(f"Expected the columns {', '.join(COLUMNS)} in {file}, got no {', '.join(missing)}.")
            for row in reader:
                yield reader.line_num, row
        except (csv.Error, UnicodeDecodeError) as error:
            with reported(on_error):
                raise TaskError(
                    f"Expected CSV in UTF-8 in {file}, got, after line {reader.line_num}: {error}."
                ) from error


def _common(texts: Mapping[str, Path]) -> Path:
    return Path(os.path.commonpath([text.absolute().parent for text in texts.values()]))


def _sources(row: Mapping[str, str], texts: Mapping[str, Path], folder: Path) -> Iterator[TaskFile]:
    """Yield the texts that a row names, whatever kind of file it names them as."""
    named = list(dict.fromkeys(_STEM.findall(row.get("source_files") or "")))
    if not named:
        raise TaskError(f"Expected source_files, got {row.get('source_files')!r}. Without them: corpus=all")
    for stem in named:
        if stem not in texts:
            raise TaskError(f"Expected the text {stem}.txt in {folder}, got none.")
        yield task_file(texts[stem], folder, f"{CORPUS}/{stem}.txt")


def _task(row: Mapping[str, str], files: Sequence[TaskFile], mounts: tuple[Mount, ...], tolerance: float) -> Task:
    uid, question, answer = (str(row.get(name) or "").strip() for name in COLUMNS)
    if not (uid and question and answer):
        raise TaskError(f"Expected uid, question and answer, got {dict(row)}.")
    where = f"The bulletins are text files in {MOUNTED if mounts else CORPUS}/."
    difficulty = (row.get("difficulty") or "").strip().lower()
    return Task(
        id=uid,
        instruction=f"{question}\n{CONTRACT.format(where=where)}",
        files=tuple(files),
        mounts=mounts,
        grading=AnswerGrading(expected=answer, tolerance=tolerance),
        metadata={"category": difficulty} if difficulty else {},
    )


def _solution(task: Task) -> Sequence[SolutionStep] | None:
    if not isinstance(task.grading, AnswerGrading):
        return None
    return (SolutionStep("answer", {"text": f"<FINAL_ANSWER>{task.grading.expected}</FINAL_ANSWER>"}),)
