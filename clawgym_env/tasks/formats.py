"""The task formats: one table of how each is recognised and loaded.

Used by `loading`. Another format is a row here and a loader beside this file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

from clawgym_env.errors import TaskError
from clawgym_env.tasks.clawgym_format import ENTRY, load_clawgym
from clawgym_env.tasks.clawgym_jsonl import load_jsonl
from clawgym_env.tasks.harbor import CONFIG, load_harbor
from clawgym_env.tasks.jobbench import is_jobbench, load_jobbench
from clawgym_env.tasks.officeqa import is_officeqa, load_officeqa
from clawgym_env.tasks.pinchbench import is_pinchbench, load_pinchbench
from clawgym_env.tasks.reading import OnError
from clawgym_env.tasks.task import TaskSet


@dataclass(frozen=True, slots=True)
class TaskFormat:
    """One way in which tasks lie on a disk."""

    name: str
    """As in `tasks="harbor:PATH"`."""
    needs: str
    """What has to lie there, in words."""
    found_at: Callable[[Path], bool]
    load: Callable[..., TaskSet]
    """Called with the path and `on_error`; its other keywords with a default are the format's options."""

    @property
    def options(self) -> Sequence[str]:
        parameters = list(inspect.signature(self.load).parameters)
        return [name for name in parameters[1:] if name not in ("on_error", "max_file_bytes")]

    def open(self, path: Path, options: Mapping[str, str], *, on_error: OnError | None = None) -> TaskSet:
        """Load the tasks at `path`.

        Raises:
            TaskError: an unknown option or value, or what the loader raises.
        """
        known = inspect.signature(self.load, eval_str=True).parameters
        values: dict[str, object] = {}
        for name, text in options.items():
            if name not in self.options:
                listed = ", ".join(self.options) or "none"
                raise TaskError(f"Expected options of {self.name} out of {listed}, got {name!r}.")
            try:
                values[name] = pydantic.TypeAdapter(known[name].annotation).validate_python(text)
            except pydantic.ValidationError as error:
                wanted = inspect.formatannotation(known[name].annotation)
                raise TaskError(f"Expected {name} to be {wanted}, got {text!r}.") from error
        return self.load(path, on_error=on_error, **values)


def _holds(name: str) -> Callable[[Path], bool]:
    """Return whether a folder, or a folder in it, holds a file of this name."""
    return lambda path: (path / name).is_file() or any(path.glob(f"*/{name}"))


FORMATS: Sequence[TaskFormat] = (
    TaskFormat("clawgym", f"folders with {ENTRY} and reward/reward.sh", _holds(ENTRY), load_clawgym),
    TaskFormat("harbor", f"folders with {CONFIG}, instruction.md and tests/test.sh", _holds(CONFIG), load_harbor),
    TaskFormat("jobbench", "<occupation>/taskN/RUBRICS.json, or a .parquet file", is_jobbench, load_jobbench),
    TaskFormat("officeqa", "officeqa*.csv and the texts of the bulletins", is_officeqa, load_officeqa),
    TaskFormat("pinchbench", "task_*.md, or a folder tasks/ with them", is_pinchbench, load_pinchbench),
    TaskFormat("clawgym-jsonl", "a .jsonl file", lambda path: path.suffix == ".jsonl" and path.is_file(), load_jsonl),
)
"""In the order in which they are tried."""


def format_of(path: Path) -> TaskFormat:
    """Return the format of what lies at `path`.

    Raises:
        TaskError: none of the known ones; what each needs is listed.
    """
    for one in FORMATS:
        if one.found_at(path):
            return one
    needs = "; ".join(f"{one.name} ({one.needs})" for one in FORMATS)
    got = "a file" if path.is_file() else "a folder" if path.exists() else "nothing"
    raise TaskError(f"Expected tasks at {path}, got {got}. Known formats: {needs}.")
