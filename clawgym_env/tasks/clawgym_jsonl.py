"""ClawGym's JSONL form: one task per line, as its two generators and ClawGym-Bench write it.

The file is read once to find where its lines begin and to check them; a task is made again from its line whenever it is
asked for, so that a set of many thousands costs a few bytes each. Invariant: nothing below `reward/` is among the files
the agent sees.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import orjson

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import WORKDIR
from clawgym_env.tasks.clawgym_rubric import RUBRIC_KEYS, combine, take_rubric
from clawgym_env.tasks.reading import OnError, inside_path, naming, reported
from clawgym_env.tasks.task import Task, TaskFile, TaskSet

REWARD = "reward"
CHECKERS = (f"{REWARD}/check.py", f"{REWARD}/test.py")
"""What is run where a task has no hook."""
_CONTENT = ("input_files", "reward_files", "prompt", "user_query", "hook_code", "origin_template", *RUBRIC_KEYS)
"""What of a line does not go into the metadata."""
_WORKSPACE = re.compile(r"<workspace(?:_path)?>|\$?\{workspace(?:_path)?\}", re.IGNORECASE)
_TEMPLATE_ID = re.compile(r"^\s*id:\s*[\"']?([^\"'\s#]+)", re.MULTILINE)


def load_jsonl(path: str | Path, *, on_error: OnError | None = None) -> TaskSet:
    """Load a file of ClawGym tasks, one JSON object per line.

    Args:
        on_error: told what is wrong with a line, which is then left out.

    Raises:
        TaskError: without `on_error` the first thing that is wrong, with file and line; no task in any case.
    """
    file = Path(path)
    if not file.is_file():
        raise TaskError(f"Expected a JSONL file of ClawGym tasks, got {file}: {'a folder' if file.exists() else 'no'}.")
    lines: list[tuple[int, int]] = []  # where it begins, and its number from 1
    ids: list[str] = []
    known: set[str] = set()
    with file.open("rb") as stream:
        offset = 0
        for number, line in enumerate(stream, start=1):
            if line.strip():
                with reported(on_error):
                    task = _task(line.removeprefix(BOM_UTF8), f"{file.stem}-{number:06d}", f"{file}:{number}")
                    # Several tasks are made from one template, and then share its id.
                    ids.append(f"{task.id}-{number:06d}" if task.id in known else task.id)
                    known.add(ids[-1])
                    lines.append((offset, number))
            offset += len(line)
    if not lines and on_error is None:
        raise TaskError(f"Expected at least one task in {file}, got no line.")

    def make(index: int) -> Task:
        offset, number = lines[index]
        with file.open("rb") as stream:
            stream.seek(offset)
            task = _task(stream.readline().removeprefix(BOM_UTF8), ids[index], f"{file}:{number}")
        return task if task.id == ids[index] else task.model_copy(update={"id": ids[index]})

    return TaskSet(file.stem, len(lines), make, ids=ids)


def _task(line: bytes, default_id: str, place: str) -> Task:
    """Make the task of a line.

    Args:
        default_id: used where the line has none.
        place: file and line, for errors.
    """
    with naming(place):
        try:
            entry = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TaskError(f"Expected JSON, got: {error}.") from error
        if not isinstance(entry, dict):
            raise TaskError(f"Expected an object, got {type(entry).__name__}.")
        files = _files(entry, "input_files")
        hidden = [file for file in files if PurePosixPath(file.path).parts[0] == REWARD] + _files(
            entry, "reward_files", below=REWARD
        )
        hidden = list({file.path: file for file in hidden}.values())
        instruction = entry.get("prompt") or entry.get("user_query")
        if not isinstance(instruction, str):
            raise TaskError(f"Expected a prompt, got {sorted(entry)}.")
        mode = entry.get("validation_mode")
        return Task(
            id=_id(entry) or default_id,
            instruction=instruction,
            files=tuple(file for file in files if PurePosixPath(file.path).parts[0] != REWARD),
            hidden_files=tuple(hidden),
            grading=combine(_code(entry, hidden), take_rubric(entry), mode=mode if isinstance(mode, str) else None),
            metadata={key: value for key, value in entry.items() if key not in _CONTENT},
        )


def _id(entry: Mapping[str, Any]) -> str | None:
    for key in ("task_id", "id"):
        if isinstance(entry.get(key), str) and entry[key]:
            return str(entry[key])
    template = entry.get("origin_template")
    if isinstance(template, dict):
        return str(template["id"]) if template.get("id") else None
    if isinstance(template, str):
        front = re.match(r"\s*---\s*\n(.*?)\n---", template, re.DOTALL)
        found = _TEMPLATE_ID.search(front[1] if front else template)
        return found[1] if found else None
    return None


def _files(entry: Mapping[str, Any], key: str, *, below: str = "") -> list[TaskFile]:
    """Return the files listed under `key`, paths without the folder `below` being taken as inside it."""
    listed = entry.get(key) or []
    if isinstance(listed, dict):
        listed = [{"path": path, "content": content} for path, content in listed.items()]
    if not isinstance(listed, list):
        raise TaskError(f"Expected a list in {key}, got {type(listed).__name__}.")
    files: dict[str, TaskFile] = {}
    for item in listed:
        path = (item.get("file_path") or item.get("path")) if isinstance(item, dict) else None
        if not isinstance(path, str):
            raise TaskError(f"Expected file_path (or path) and content in {key}, got {str(item)[:100]!r}.")
        inside = inside_path(path, WORKDIR)
        if below and PurePosixPath(inside).parts[0] != below:
            inside = f"{below}/{inside}"
        if inside in files:
            raise TaskError(f"Expected each file of {key} once, got {inside!r} twice.")
        files[inside] = TaskFile(path=inside, data=_bytes(item.get("content")), executable=inside.endswith(".sh"))
    return list(files.values())


def _bytes(content: Any) -> bytes:
    """Return a file's content: text as it is, other JSON written out."""
    if isinstance(content, str):
        return content.encode()
    return b"" if content is None else orjson.dumps(content, option=orjson.OPT_INDENT_2)


def _code(entry: Mapping[str, Any], hidden: Sequence[TaskFile]) -> CommandGrading | None:
    """Return the checker: the hook, else a checker among the hidden files."""
    hook = entry.get("hook_code")
    paths = {file.path for file in hidden}
    if isinstance(hook, str) and hook.strip():
        program = "python3" if entry.get("hook_lang") in ("python", "python3", "py") else "bash"
        return CommandGrading(command=(program, "-c", _WORKSPACE.sub(WORKDIR, hook)), score="mean_of_json")
    if f"{REWARD}/reward.sh" in paths:
        return CommandGrading(command=("bash", f"{REWARD}/reward.sh"))
    for checker in CHECKERS:
        if checker in paths:
            return CommandGrading(command=("python3", checker, WORKDIR), score="mean_of_json")
    return None
