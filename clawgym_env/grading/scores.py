"""What the end of a grading command means: from exit code, stdout and reward file to a score with its parts.

Called by `command`. Pure. Invariant: whatever a command does has one meaning, in this table, and what has no score is
a `GraderError`, never 0.

| found                                     | last_line | mean_of_json       | exit_code | reward_file      |
| ----------------------------------------- | --------- | ------------------ | --------- | ---------------- |
| no end in time, killed by a signal        | error     | error              | error     | error            |
| exit code 126 or 127: it could not be run | error     | error              | error     | error            |
| another exit code but 0                   | error     | error              | 0         | the file counts  |
| exit code 0                               | stdout    | stdout             | 1         | the file counts  |
| nothing there, or blanks only             | error     | error              | –         | error            |
| a number in [0, 1]                        | itself    | itself             | –         | itself           |
| true, false                               | 1, 0      | 1, 0               | –         | 1, 0             |
| outside [0, 1] by 1e-6 at most            | clipped   | clipped            | –         | clipped          |
| NaN, infinite, negative, above 1          | error     | error              | –         | error            |
| a JSON object                             | error     | mean of its values | –         | its `reward`     |
| an empty JSON object                      | error     | 0                  | –         | error            |
| a list, null, other text                  | error     | error              | –         | error            |
| more stdout than is kept                  | error     | error              | no matter | no matter        |

A signal is a negative exit code, or 129 to 192, as a shell passes it on. A value of the object of `mean_of_json` is a
number, true, false or text that reads as a number; any other (null, text, a list, an object) is an error, since a mean
over the rest would hide it, and so is a mean outside [0, 1]. `last_line` takes the components from the last line before
the score that is a JSON object, `reward_file` from the file's object; there what is no finite number is left out.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import Grade
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import ExecResult

MAX_OUTPUT_CHARS = 16_000
TAIL_CHARS = 2_000
ROUNDING = 1e-6
"""A mean of floats may leave [0, 1] by a rounding error."""

_EXPECTED = {
    "last_line": "print a score in [0, 1] as its last line",
    "mean_of_json": "print a JSON object of numbers with a mean in [0, 1]",
    "exit_code": "end with an exit code of its own",
    "reward_file": "write a score in [0, 1] to {files}",
}


class _NoScore(Exception):
    """What was found in place of a score."""


def read_grade(
    result: ExecResult, grading: CommandGrading, *, task_id: str, timeout_s: float, written: bytes | None = None
) -> Grade:
    """Return the grade that the end of a grading command stands for.

    Args:
        timeout_s: the limit it ran under, for the message.
        written: what the first reward file that exists holds; None without one.

    Raises:
        GraderError: no usable score, with the command and the end of what it printed.
    """
    stdout = result.stdout.decode(errors="replace")
    stderr = result.stderr.decode(errors="replace")
    output = "\n".join(part.rstrip() for part in (stdout, stderr) if part.strip())[-MAX_OUTPUT_CHARS:]
    components: Mapping[str, float] = {}
    try:
        _check_end(result, grading, timeout_s)
        if grading.score == "exit_code":
            score = float(result.exit_code == 0)
        elif grading.score == "reward_file":
            score, components = _reward(written)
        elif grading.score == "mean_of_json":
            score, components = _mean(stdout)
        else:
            score, components = _last_line(stdout)
        return Grade(_clip(score), components, output)
    except _NoScore as found:
        expected = _EXPECTED[grading.score].format(files=" or ".join(grading.reward_files))
        raise GraderError(
            f"Expected the grader of task {task_id!r} to {expected}, got {found}. "
            f"Run it by hand in a copy of the workspace: {shlex.join(grading.command)}\n"
            f"Its output ends: {output[-TAIL_CHARS:] or '(none)'}"
        ) from None


def _check_end(result: ExecResult, grading: CommandGrading, timeout_s: float) -> None:
    code = result.exit_code
    reads_stdout = grading.score in ("last_line", "mean_of_json")
    if result.timed_out:
        raise _NoScore(f"no end within {timeout_s:g} s")
    if code < 0 or 128 < code <= 192 or code in (126, 127) or (code != 0 and reads_stdout):
        raise _NoScore(f"exit code {code}")
    if result.dropped_bytes and reads_stdout:
        raise _NoScore(f"{len(result.stdout) + result.dropped_bytes} bytes of output, more than are kept")


def _last_line(stdout: str) -> tuple[float, Mapping[str, float]]:
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    if not lines:
        raise _NoScore("nothing on stdout")
    score = _number(lines[-1])
    if score is None:
        raise _NoScore(f"the last line {lines[-1][:200]!r}")
    found = (_json(line) for line in reversed(lines[:-1]) if line.startswith("{"))
    return score, _finite(next((value for value in found if isinstance(value, dict)), {}))


def _mean(stdout: str) -> tuple[float, Mapping[str, float]]:
    lines = stdout.split()
    if not lines:
        raise _NoScore("nothing on stdout")
    value = _json(stdout)
    if value is None:  # something was printed before it
        value = _json(stdout.rstrip().rpartition("\n")[2])
    if isinstance(value, dict):
        parts = {name: _number(part) for name, part in value.items()}
        if bad := [name for name, part in parts.items() if part is None]:
            raise _NoScore(f"{json.dumps(value[bad[0]])[:200]} for {bad[0]!r}")
        numbers = {name: part for name, part in parts.items() if part is not None}
        return (math.fsum(numbers.values()) / len(numbers) if numbers else 0.0), _finite(numbers)
    score = None if isinstance(value, str) else _number(value)
    if score is None:
        raise _NoScore(f"{stdout.strip()[-200:]!r}")
    return score, {}


def _reward(written: bytes | None) -> tuple[float, Mapping[str, float]]:
    if written is None:
        raise _NoScore("no such file")
    text = written.decode(errors="replace").strip()
    value = _json(text)
    parts = value if isinstance(value, dict) else {}
    score = _number(parts.get("reward") if parts else text)
    if score is None:
        raise _NoScore(f"{text[:200]!r} in it")
    return score, _finite({name: part for name, part in parts.items() if name != "reward"})


def _clip(score: float) -> float:
    if not -ROUNDING <= score <= 1 + ROUNDING:  # also for NaN
        raise _NoScore(f"the score {score}")
    return min(1.0, max(0.0, score))


def _number(value: object) -> float | None:
    """Return a JSON number, a boolean or a text that says one of these; None for anything else."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("true", "false"):
            return float(text == "true")
        if "_" in text:  # Python's own notation
            return None
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None


def _json(text: str) -> object:
    """Return the value of a JSON text; None where it is none."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value


def _finite(parts: Mapping[str, object]) -> Mapping[str, float]:
    numbers = {name: _number(part) for name, part in parts.items() if isinstance(part, int | float)}
    return {name: part for name, part in numbers.items() if part is not None and math.isfinite(part)}
