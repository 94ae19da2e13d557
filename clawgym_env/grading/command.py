"""The default grader: runs the task's own command over the finished workspace.

Called by the runner with a fresh sandbox that holds a copy of the workspace. Invariant: nothing the agent left there
is imported or run by the grader's own processes, and a command that gives no usable score is a `GraderError`, never a
reward of 0.
"""

from __future__ import annotations

import functools
import json
import math
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import Grade, Grader, GraderLike, Outcome
from clawgym_env.grading.clawgym_reward import stock_checker, with_mean
from clawgym_env.grading.function import FunctionGrader
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import ExecResult, Sandbox
from clawgym_env.sandbox.threads import in_thread

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

SIDE_FOLDER = "/tmp/clawgym-grader"
"""What the grader needs beside the task's own files: outside the workspace, which checkers may list."""

MAX_OUTPUT_CHARS = 16_000
TAIL_CHARS = 2_000

# Python puts the current folder (`python3 -c`) or the script's folder first on its import path: a json.py left in the
# workspace would replace the grader's own. PYTHONSAFEPATH stops that, and this hook then takes both variables away
# again, so that programs of the workspace which a checker starts find their own modules as usual.
_HOOK = """\
import os, sys
for name in ("PYTHONSAFEPATH", "PYTHONPATH"):
    os.environ.pop(name, None)
sys.path[:] = {folders!r} + [path for path in sys.path if path != os.path.dirname(__file__)]
"""

# Whatever the agent left where a hidden file goes, a link above all, would carry the file elsewhere or keep it out.
_MAKE_ROOM = """\
while [ "$1" != -- ]; do
    if [ -L "$1" ] || [ ! -d "$1" ]; then rm -rf -- "$1" || exit; fi
    shift
done
exec rm -rf "$@"
"""
"""Arguments: parents of hidden files, shallow ones first; `--`; what is removed for good."""


class CommandGrader:
    """Runs the task's `CommandGrading` in the workspace; the last line of its stdout is the score.

    A line before it that holds a JSON object of numbers gives the components. The top-level folders that hold only
    hidden files (`reward/`) belong to the grader, and so does every hidden file's own path: what the agent put there is
    removed first. The environment variable
    `OPENCLAW_REWARD_PAYLOAD` names a JSON file with the answer (`final_message`), as ClawGym's own runner does.
    """

    async def grade(self, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
        """Score the workspace found in `sandbox.spec.workdir`; see `Grader.grade`."""
        grading = task.grading
        if not isinstance(grading, CommandGrading):
            raise GraderError(f"Expected task {task.id!r} to be graded by a command, got {grading.kind!r}.")
        try:
            await _bring_in(task, sandbox, outcome)
            stock = await in_thread(functools.partial(stock_checker, task))
        except (OSError, ValueError) as error:
            raise GraderError(f"Expected to bring in the hidden files of task {task.id!r}, got: {error}") from error
        result = await sandbox.exec(
            stock or grading.command,
            env={
                "PYTHONDONTWRITEBYTECODE": "1",
                "PYTHONSAFEPATH": "1",
                "PYTHONPATH": SIDE_FOLDER,
                "OPENCLAW_REWARD_PAYLOAD": f"{SIDE_FOLDER}/payload.json",
            },
            timeout_s=task.limits.grader_s,
        )
        return read_grade(with_mean(result) if stock else result, task, grading)


async def _bring_in(task: Task, sandbox: Sandbox, outcome: Outcome) -> None:
    workdir = sandbox.spec.workdir
    hidden = [PurePosixPath(file.path) for file in task.hidden_files]
    shared = {PurePosixPath(file.path).parts[0] for file in task.files}
    owned = sorted({path.parts[0] for path in hidden if len(path.parts) > 1} - shared)
    beside = [path for path in hidden if path.parts[0] not in owned]
    parents = {parent for path in beside for parent in path.parents if parent.parts}
    argv = [*(f"./{path}" for path in sorted(parents, key=lambda path: len(path.parts))), "--"]
    argv += [f"./{path}" for path in (*owned, *beside)]
    removed = await sandbox.exec(["sh", "-c", _MAKE_ROOM, "sh", *argv])
    if removed.exit_code != 0:
        raise OSError(f"their places could not be emptied: {removed.stderr.decode(errors='replace').strip()}")
    for file in task.hidden_files:
        data = await in_thread(file.read) if file.source else file.read()
        await sandbox.write_file(f"{workdir}/{file.path}", data, mode=0o755 if file.executable else 0o644)
    folders = sorted({f"{workdir}/{path.parent}" for path in hidden if path.parts[0] in owned})
    hook = _HOOK.format(folders=folders)
    payload = {
        "task_id": task.id,
        "user_query": task.instruction,
        "metadata": dict(task.metadata),
        "final_message": outcome.response,
        "transcript": [],
    }
    await sandbox.write_file(f"{SIDE_FOLDER}/sitecustomize.py", hook.encode())
    await sandbox.write_file(f"{SIDE_FOLDER}/payload.json", json.dumps(payload).encode())


def read_grade(result: ExecResult, task: Task, grading: CommandGrading) -> Grade:
    """Turn the end of a grading command into a grade.

    Raises:
        GraderError: a timeout, a non-zero exit, too much output, or a last line that is no number in [0, 1].
    """
    stdout = result.stdout.decode(errors="replace")
    stderr = result.stderr.decode(errors="replace")
    output = "\n".join(part.rstrip() for part in (stdout, stderr) if part.strip())[-MAX_OUTPUT_CHARS:]
    lines = [line.strip() for line in stdout.splitlines() if line.strip()]
    score = _number(lines[-1]) if lines else None
    if result.timed_out:
        got = f"no end within {task.limits.grader_s:g} s"
    elif result.exit_code != 0:
        got = f"exit code {result.exit_code}"
    elif result.dropped_bytes:
        got = f"{len(result.stdout) + result.dropped_bytes} bytes of output, more than are kept"
    elif not lines:
        got = "nothing on stdout"
    elif score is None:
        got = f"the last line {lines[-1][:200]!r}"
    elif not -1e-6 <= score <= 1 + 1e-6:  # also false for NaN; a mean of floats may exceed 1 by a rounding error
        got = f"the score {score}"
    else:
        return Grade(min(1.0, max(0.0, score)), _components(lines[:-1]), output)
    raise GraderError(
        f"Expected the grader of task {task.id!r} to print a score in [0, 1] as its last line, got {got}. "
        f"Run it by hand in a copy of the workspace: {shlex.join(grading.command)}\n"
        f"Its output ends: {output[-TAIL_CHARS:] or '(none)'}"
    )


def _number(text: str) -> float | None:
    if text.lower() in ("true", "false"):
        return float(text.lower() == "true")
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _components(lines: list[str]) -> Mapping[str, float]:
    """Return the numbers of the last line that is a JSON object."""
    for line in reversed(lines):
        try:
            value = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            return {
                name: float(part)
                for name, part in value.items()
                if isinstance(part, int | float) and math.isfinite(part)
            }
    return {}


def as_grader(grader: GraderLike | None) -> Grader:
    """Return a grader: the tasks' own command for None, a plain function wrapped, a `Grader` as it is."""
    if grader is None:
        return CommandGrader()
    if isinstance(grader, type):
        raise TypeError(f"Expected a grader or a function, got the class {grader.__name__}. Make an instance of it.")
    if isinstance(grader, Grader):
        return grader
    if callable(grader):
        return FunctionGrader(grader)
    raise TypeError(f"Expected a grader or a function (task, workspace) -> float, got {grader!r}.")
