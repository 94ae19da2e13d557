"""The checker of every bundled task: copied into the grading sandbox as `reward/check.py`, never imported by it.

Reads `expected.json` beside itself, looks at the workspace given as argument, prints a JSON object of named sub-scores
and then, as the last line, their weighted mean. Standard library only, one process, about 20 ms.
Invariant: text is right up to one trailing newline; what is close but not right earns at most half, and only for what
was not there at the start.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from typing import Any

MAX_BYTES = 1 << 20
MAX_SEARCHED_FILES = 100
NEAR = 0.5
"""Most that a wrong value can earn, times the share of it that is right."""
MISPLACED = 0.25
"""Earned by exactly the right content in a file of another name."""


def main() -> None:
    workspace = sys.argv[1] if len(sys.argv) > 1 else "."
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "expected.json"), encoding="utf-8") as file:
        expected = json.load(file)
    checks = expected["checks"]
    known = {*expected["inputs"], *(check["file"] for check in checks)}
    scores = {check["name"]: judge(workspace, check, known) for check in checks}
    total = sum(check["weight"] * scores[check["name"]] for check in checks)
    sys.stdout.write(json.dumps(scores) + f"\n{min(1.0, round(total, 6))}\n")


def judge(workspace: str, check: dict[str, Any], known: set[str]) -> float:
    """Return the score of one expectation in [0, 1]."""
    text = read(os.path.join(workspace, check["file"]))
    untouched = text is not None and check["before"] is not None and same_lines(text, check["before"])
    if check["kind"] == "exists":
        return float(text is not None and not untouched)
    if text is None:
        others = search(workspace, known)
        return MISPLACED * any(score(check["kind"], check["value"], other) == 1.0 for other in others)
    if untouched:
        return 0.0
    earned = score(check["kind"], check["value"], text)
    if earned == 1.0 or check["before"] is None:
        return earned
    return max(0.0, earned - score(check["kind"], check["value"], check["before"]))


def same_lines(text: str, before: str) -> bool:
    """Whether nothing but newlines at the ends tells the two apart: a file saved again is not a file changed."""
    return text.strip("\n") == before.strip("\n")


def read(path: str) -> str | None:
    """Return a regular file's text, or None. A pipe or device planted by the agent is never opened."""
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        with open(path, encoding="utf-8", errors="replace", newline="") as file:
            return file.read(MAX_BYTES).replace("\r\n", "\n")
    except (OSError, ValueError):
        return None


def search(workspace: str, known: set[str]) -> list[str]:
    """Return the texts of files the agent made under other names."""
    texts: list[str] = []
    for folder, subfolders, names in os.walk(workspace):
        top = os.path.relpath(folder, workspace)
        subfolders[:] = [name for name in sorted(subfolders) if name[0] != "." and (top != "." or name != "reward")]
        for name in sorted(names):
            path = os.path.normpath(os.path.join(top, name))
            if len(texts) >= MAX_SEARCHED_FILES:
                return texts
            text = None if path in known else read(os.path.join(folder, name))
            if text is not None:
                texts.append(text)
    return texts


def score(kind: str, value: Any, text: str) -> float:
    """Compare one file's text with what was expected."""
    try:
        if kind == "text":
            return score_text(value, text.removesuffix("\n"))
        if kind == "contains":
            return 1.0 if value in text else 0.0
        if kind == "number":
            return float(abs(float(text) - value) <= 1e-6 * max(1.0, abs(value)))
        if kind == "json":
            return score_json(value, json.loads(text))
        if kind == "csv":
            return score_csv(value, text)
    except (ValueError, RecursionError):
        return 0.0
    raise ValueError(f"Expected a known kind of check, got {kind!r}.")


def score_text(value: str, text: str) -> float:
    if text == value:
        return 1.0
    if text.strip(" \t\n\"'`") == value.strip():
        return NEAR
    if "\n" in value:
        return NEAR * share_in_place(value.split("\n"), text.split("\n"))
    return NEAR * share_in_place(value.split(), text.split())


def score_json(value: Any, got: Any) -> float:
    if same(value, got):
        return 1.0
    if isinstance(value, dict) and isinstance(got, dict):
        right = sum(key in got and same(value[key], got[key]) for key in value)
        return NEAR * right / len(value.keys() | got.keys())
    if isinstance(value, list) and isinstance(got, list):
        return NEAR * share_in_place(value, got)
    return 0.0


def score_csv(value: list[Any], text: str) -> float:
    import csv  # costs 3 ms that most checks need not pay

    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    return 1.0 if rows == value else NEAR * share_in_place(value, rows)


def same(value: Any, got: Any) -> bool:
    """JSON equality: 3 equals 3.0, but true is no number and "3" is no 3."""
    if isinstance(value, bool) or isinstance(got, bool):
        return value is got
    if isinstance(value, dict) and isinstance(got, dict):
        return value.keys() == got.keys() and all(same(value[key], got[key]) for key in value)
    if isinstance(value, list) and isinstance(got, list):
        return len(value) == len(got) and all(map(same, value, got))
    return bool(value == got)


def share_in_place(value: list[Any], got: list[Any]) -> float:
    """Return the share of places that hold what was expected there; surplus places count against it."""
    right = sum(map(same, value, got))
    return right / max(len(value), len(got), 1)


if __name__ == "__main__":
    main()
