"""Runs a PinchBench task's own checks inside the grader's sandbox; copied there beside them, never imported here.

Prints the numbers that `grade(transcript, workspace_path)` returns as one JSON object. What the checks print goes to
stderr, and an exception of theirs ends the process with its traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path


def main() -> None:
    """Call the checks on the current folder and the transcript of the payload."""
    checks = Path(__file__).with_name("checks.py")
    payload = json.loads(Path(os.environ["OPENCLAW_REWARD_PAYLOAD"]).read_text("utf-8"))
    names: dict[str, object] = {"__name__": "checks", "__file__": str(checks)}
    with contextlib.redirect_stdout(sys.stderr):
        exec(compile(checks.read_text("utf-8"), str(checks), "exec"), names)
        grade = names["grade"]
        scores = grade(payload["transcript"], os.getcwd()) if callable(grade) else None
    if not isinstance(scores, dict):
        raise TypeError(f"Expected a dict of scores from grade(), got {scores!r}.")
    numbers = {str(name): float(score) for name, score in scores.items() if isinstance(score, int | float)}
    if scores and not numbers:  # a mean over nothing would be a score of 0 that nobody gave
        raise TypeError(f"Expected numbers among the scores of grade(), got {scores!r}.")
    sys.stdout.write(json.dumps(numbers) + "\n")


if __name__ == "__main__":
    main()
