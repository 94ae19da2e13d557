"""Grading by the task's own command over the finished workspace.

Called by `task_grader` with a sandbox that holds the workspace. Invariant: nothing the agent left there is imported or
run by the grader's own processes, and a command that gives no usable score is a `GraderError`, never a reward of 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import Grade, Outcome
from clawgym_env.grading.plants import guarded_environment, loaded_beside
from clawgym_env.grading.scores import read_grade
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.sandbox.threads import in_thread
from clawgym_env.trace.conversation import conversation_to_transcript

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

SIDE_FOLDER = "/tmp/clawgym-grader"
"""What the grader needs beside the task's own files: outside the workspace, which checkers may list."""

MAX_REWARD_FILE_BYTES = 1 << 20

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
shift
while [ "$1" != -- ]; do
    rm -rf -- "$1"/* "$1"/.[!.]* "$1"/..?* || exit
    shift
done
exec rm -rf "$@"
"""
"""Arguments: parents of hidden files, shallow ones first; `--`; folders to empty, which may be mounts; `--`; what is
removed for good."""


async def grade_command(grading: CommandGrading, task: Task, sandbox: Sandbox, outcome: Outcome) -> Grade:
    """Bring in the hidden files, run the command in the workspace and read its score as `scores` says.

    The workspace's top-level folders that hold only hidden files (`reward/`) belong to the grader, and so do the task's
    `folders` with a hidden file and every hidden file's own path: what the agent put there is removed first. Inputs
    that are `restored` are as the task gave them. The environment variable `OPENCLAW_REWARD_PAYLOAD` names a JSON file
    with the answer (`final_message`) and the `transcript`, as ClawGym's own runner does.

    Raises:
        GraderError: no usable score.
    """
    try:
        guard = await _bring_in(grading, task, sandbox, outcome)
    except (OSError, ValueError) as error:
        raise GraderError(f"Expected to bring in the hidden files of task {task.id!r}, got: {error}") from error
    result = await sandbox.exec(
        grading.command,
        env={
            **guard,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONSAFEPATH": "1",
            "PYTHONPATH": SIDE_FOLDER,
            "OPENCLAW_REWARD_PAYLOAD": f"{SIDE_FOLDER}/payload.json",
        },
        timeout_s=task.limits.grader_s,
    )
    written = await _first_file(sandbox, grading.reward_files)
    return read_grade(result, grading, task_id=task.id, timeout_s=task.limits.grader_s, written=written)


async def _bring_in(grading: CommandGrading, task: Task, sandbox: Sandbox, outcome: Outcome) -> Mapping[str, str]:
    """Put the grader's files in place of the agent's; return the variables that guard it from what stays."""
    hidden = [PurePosixPath(file.path) for file in task.hidden_files]
    inside = [path for path in hidden if not path.is_absolute()]
    shared = {PurePosixPath(file.path).parts[0] for file in task.files}
    owned = sorted({path.parts[0] for path in inside if len(path.parts) > 1} - shared)
    emptied = sorted({_folder(path, task) for path in hidden if path.is_absolute()})
    beside = [path for path in inside if path.parts[0] not in owned]
    loaded = loaded_beside(beside)
    restored = [file for file in task.files if file.restored or PurePosixPath(file.path) in loaded]
    trusted = [*beside, *(PurePosixPath(file.path) for file in restored)]
    parents = {parent for path in trusted for parent in path.parents if parent.parts}
    for folder in emptied:
        parents |= {folder, *folder.parents[:-1]}
    shallow_first = sorted(parents, key=lambda path: len(path.parts))
    places = _arguments([*owned, *trusted, *sorted(loaded)])
    removed = [*places, *grading.reward_files, SIDE_FOLDER]
    argv = [*_arguments(shallow_first), "--", *_arguments(emptied), "--", *removed]
    cleared = await sandbox.exec(["sh", "-c", _MAKE_ROOM, "sh", *argv])
    if cleared.exit_code != 0:
        raise OSError(f"their places could not be emptied: {cleared.stderr.decode(errors='replace').strip()}")
    workdir = PurePosixPath(sandbox.spec.workdir)
    for file in (*restored, *task.hidden_files):
        data = await in_thread(file.read) if file.source else file.read()
        await sandbox.write_file(str(workdir / file.path), data, mode=0o755 if file.executable else 0o644)
    modules = {str((workdir / path).parent) for path in hidden if path.is_absolute() or path.parts[0] in owned}
    hook = _HOOK.format(folders=sorted(modules))
    payload = {
        "task_id": task.id,
        "user_query": task.instruction,
        "metadata": dict(task.metadata),
        "final_message": outcome.response,
        "transcript": conversation_to_transcript(outcome.conversation),
    }
    await sandbox.write_file(f"{SIDE_FOLDER}/sitecustomize.py", hook.encode())
    await sandbox.write_file(f"{SIDE_FOLDER}/payload.json", json.dumps(payload).encode())
    # What was installed in the agent's own sandbox is what such a task asked for: hooks, say.
    return guarded_environment(workdir, hidden) if task.grade_in == "fresh" else {}


def _folder(path: PurePosixPath, task: Task) -> PurePosixPath:
    """Return the folder of the task that a hidden file with an absolute path lies in."""
    for folder in map(PurePosixPath, task.folders):
        if folder in path.parents:
            return folder
    raise ValueError(f"Expected {str(path)!r} to lie in one of the task's folders, got {list(task.folders)}.")


def _arguments(paths: Iterable[PurePosixPath | str]) -> list[str]:
    """Return paths in a form that no program takes for an option."""
    return [str(path) if PurePosixPath(path).is_absolute() else f"./{path}" for path in paths]


async def _first_file(sandbox: Sandbox, paths: Sequence[str]) -> bytes | None:
    for path in paths:
        try:
            return await sandbox.read_file(path, max_bytes=MAX_REWARD_FILE_BYTES)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise GraderError(f"Expected a reward file at {path}, got: {error}") from error
    return None
