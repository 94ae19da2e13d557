"""What an evaluation was asked for, and the folder that belongs to it.

Written to `eval.json` before the first rollout and compared before every later one. Invariant: the rollouts of one
folder were all run with the same settings, whoever was killed in between.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from clawgym_env.engine.base import SamplingParams
from clawgym_env.envs.service import JUDGE_CACHE
from clawgym_env.errors import UsageError
from clawgym_env.tasks.task import Task
from clawgym_env.trace.store import FILE_NAME, RolloutStore

SETTINGS_FILE = "eval.json"
RESULTS_FILE, TABLE_FILE, REPORT_FILE = "results.json", "results.csv", "report.md"
_WRITTEN = (SETTINGS_FILE, RESULTS_FILE, TABLE_FILE, REPORT_FILE)
_PART = ".part"
"""Ends the name of a file that is being written."""


class EvaluationError(UsageError):
    """The folder belongs to something else, or the evaluation cannot be made."""


class EvaluationSettings(BaseModel):
    """Everything the scores depend on. Concurrency is left out: they do not depend on it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tasks: str
    """As it was asked for: a folder, a name, or the name of a task set."""
    num_tasks: int
    tasks_digest: str
    """Of everything that makes a task but its limits, the contents of its files included."""
    harnesses: tuple[str, ...]
    """With options, as in "claude-code?bare"."""
    harness_versions: tuple[str, ...]
    policy: str
    """Or the engine."""
    sampling: SamplingParams
    sandbox: str
    grader: str
    """ "task" where each task brings its own."""
    judge: str
    """URL#MODEL; empty where there is none."""
    limits: Mapping[str, float]
    """Those set for all tasks; the others are the task's own."""
    attempts: int
    """Rollouts of each task with each harness."""
    seed: int
    clawgym_version: str


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Return a digest of everything a score may depend on; each file on disk is read once."""
    digest = hashlib.blake2b(digest_size=16)
    known: dict[Path, bytes] = {}
    for task in tasks:
        told = task.model_dump(mode="json", exclude={"files", "hidden_files", "limits"})
        _add(digest, json.dumps(told, sort_keys=True).encode())
        for file in (*task.files, *task.hidden_files):
            content = known.get(file.source) if file.source is not None else None
            if content is None:
                content = hashlib.blake2b(file.read(), digest_size=16).digest()
                if file.source is not None:
                    known[file.source] = content
            _add(digest, f"{file.executable:d}{file.path}".encode("utf-8", "surrogatepass"), content)
    return digest.hexdigest()


def claim(folder: Path, settings: EvaluationSettings, *, fresh: bool) -> RolloutStore:
    """Make `folder` the home of this evaluation, or find that it is, and return its open store.

    Args:
        fresh: discard the evaluation found there, whatever its settings.

    Raises:
        EvaluationError: it holds something else, or an evaluation with other settings; the message names which.
        StoreError: another process is at work in it.
    """
    file = folder / SETTINGS_FILE
    strays = [path.name for path in _entries(folder) if not _is_ours(path.name)]
    if strays:
        raise EvaluationError(
            f"Expected an empty folder or one of an evaluation, got {folder} with {strays[0]!r}. Choose another folder."
        )
    if fresh and file.is_file():
        RolloutStore(folder).close()  # refuses while another process is at work
        for path in _entries(folder):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    store = RolloutStore(folder)
    try:
        if file.is_file():
            _compare(file, settings)
        elif store.rollout_ids():
            raise EvaluationError(
                f"Expected an empty folder or one of an evaluation, got {folder} with another run's rollouts. "
                "Choose another folder."
            )
        else:
            write_file(file, settings.model_dump_json(indent=2) + "\n")
    except BaseException:
        store.close()
        raise
    return store


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    part = path.with_name(path.name + _PART)
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _compare(file: Path, settings: EvaluationSettings) -> None:
    cure = "Choose another folder, or discard what is there with --fresh (fresh=True)."
    try:
        before = EvaluationSettings.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise EvaluationError(f"Expected the settings of an evaluation in {file}, got other JSON. {cure}") from error
    for name in EvaluationSettings.model_fields:
        old, new = getattr(before, name), getattr(settings, name)
        if old != new:
            raise EvaluationError(f"Expected {name} to be {old!r} as in {file}, got {new!r}. {cure}")


def _entries(folder: Path) -> Iterable[Path]:
    return sorted(folder.iterdir()) if folder.exists() else ()


def _is_ours(name: str) -> bool:
    return name.removesuffix(_PART) in _WRITTEN or name.startswith(FILE_NAME) or name == JUDGE_CACHE.parts[0]


def _add(digest: hashlib.blake2b, *parts: bytes) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
