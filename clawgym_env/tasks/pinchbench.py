"""PinchBench's tasks: one Markdown file each, with YAML front matter and a section for everything else.

Called by `loading` for a folder of that form. `tasks/manifest.yaml` gives the order where there is one, `assets/` holds
the files that tasks share. Sessions become turns, the python block becomes a command over the finished workspace, the
rubric criteria for a judge. Invariant: a set that loads has no path that leaves its folder on the host or the workspace
inside, and an error names file and line.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading, Grading, HybridGrading, RubricGrading
from clawgym_env.sandbox.base import WORKDIR
from clawgym_env.tasks.pinchbench_rubric import read_rubric
from clawgym_env.tasks.reading import OnError, inside_path, naming, read_text, reported, task_file
from clawgym_env.tasks.task import Limits, Task, TaskFile, TaskSet, Turn

GRADER = ".pinchbench"
"""The grader's folder in the workspace."""
GRADING = CommandGrading(command=("python3", f"{GRADER}/grade.py"), score="mean_of_json")
PATTERN = "task_*.md"
FENCE = "---"

Text = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int | float) else value)]
"""YAML reads a bare 2024 as a number."""


class _Front(BaseModel):
    model_config = ConfigDict(extra="ignore")


class WorkspaceFile(_Front):
    """One file the task begins with: its content, or where it lies under `assets/`."""

    path: str | None = None
    content: Text | None = None
    source: str | None = None
    dest: str | None = None


class Session(_Front):
    """One prompt of a task with several."""

    prompt: str = Field(min_length=1)
    new_session: bool = False


class Weights(_Front):
    """Shares of the two sides of a hybrid grade."""

    automated: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)
    llm_judge: float = Field(default=0.5, ge=0.0, allow_inf_nan=False)


class FrontMatter(_Front):
    """The YAML head of a task."""

    id: Text = Field(min_length=1)
    name: Text = ""
    category: Text = ""
    grading_type: Literal["automated", "llm_judge", "hybrid"] = "automated"
    timeout_seconds: float = Field(default=120.0, gt=0.0, allow_inf_nan=False)
    grading_weights: Weights | None = None
    workspace_files: list[WorkspaceFile] | None = None
    sessions: list[Annotated[Session, BeforeValidator(lambda value: _session(value))]] | None = None


def is_pinchbench(path: Path) -> bool:
    """Whether a folder, its `tasks/` or a file has the form of PinchBench."""
    return path.match(PATTERN) if path.is_file() else any(_tasks_folder(path).glob(PATTERN))


def load_pinchbench(path: str | Path, *, on_error: OnError | None = None) -> TaskSet:
    """Load a PinchBench folder, its `tasks/` folder, or one task file.

    With a manifest only the tasks that it lists are loaded, in its order; else all, in the order of their names.

    Args:
        on_error: told what is wrong with a task, which is then left out; without it the first error is raised.

    Raises:
        TaskError: the first thing that is wrong, with file and line.
    """
    root = Path(path)
    folder = root.parent if root.is_file() else _tasks_folder(root)
    files = [root] if root.is_file() else _listed(folder)
    if not files:
        raise TaskError(f"Expected PinchBench tasks ({PATTERN}) in {folder}, got none.")
    tasks: dict[str, Task] = {}
    for file in files:
        with reported(on_error):
            task = _load_task(file, folder.parent / "assets")
            if task.id in tasks:
                raise TaskError(f"Expected unique task ids, got {task.id!r} a second time in {file}.")
            tasks[task.id] = task
    return TaskSet.of([*tasks.values()], name=folder.parent.resolve().name)


def _tasks_folder(root: Path) -> Path:
    return root / "tasks" if (root / "tasks").is_dir() else root


def _listed(folder: Path) -> list[Path]:
    """Return the files of a set in order."""
    manifest = folder / "manifest.yaml"
    if not manifest.is_file():
        return sorted(folder.glob(PATTERN))
    head = _Yaml(read_text(manifest), manifest)
    names = [*_names(head.values.get("run_first")), *_names(head.values.get("tasks"))]
    names += _names(head.values.get("categories"))
    files = [folder / f"{name}.md" for name in dict.fromkeys(names)]
    for file in files:
        if file.parent != folder or not file.is_file():
            raise TaskError(f"Expected {file}, which {manifest} lists, got no such file.")
    return files


def _names(value: Any) -> Iterator[str]:
    """Yield the task names of a manifest's entry: a list of them, or lists by category."""
    for names in value.values() if isinstance(value, Mapping) else [value]:
        # Nothing deeper: aliases of aliases may stand for gigabytes.
        if not isinstance(names, list | None) or any(not isinstance(name, str | int) for name in names or ()):
            raise TaskError("Expected lists of task names in manifest.yaml, got something else.")
        yield from map(str, names or ())


def _load_task(file: Path, assets: Path) -> Task:
    document = _Document(file)
    front = document.front()
    prompt = document.sections.get("prompt")
    sessions = front.sessions or ([] if prompt is None else [Session(prompt=prompt.text)])
    if not sessions:
        raise TaskError(f"Expected a section '## Prompt' or sessions in {file}, got neither.")
    files = [
        _file(each, assets, document.place("workspace_files", number))
        for number, each in enumerate(front.workspace_files or ())
    ]
    hidden, grading = _grading(front, document)
    with naming(file):
        return Task(
            id=front.id,
            instruction=sessions[0].prompt,
            turns=tuple(Turn(text=each.prompt, new_session=each.new_session) for each in sessions[1:]),
            files=tuple(files),
            hidden_files=hidden,
            grading=grading,
            limits=Limits(wall_clock_s=front.timeout_seconds),
            metadata={"name": front.name, "category": front.category, "grading_type": front.grading_type},
        )


@dataclass(frozen=True, slots=True)
class _Section:
    line: int
    """Of its first line in the file, from 1."""
    text: str

    def code(self) -> _Section | None:
        """Return the first python block."""
        lines = self.text.splitlines()
        starts = [at for at, line in enumerate(lines) if _fence(line) and line.strip("` ~").lower() in ("python", "py")]
        if not starts:
            return None
        first = starts[0] + 1
        ends = (at for at in range(first, len(lines)) if _closes(lines[at], _fence(lines[starts[0]])))
        return _Section(self.line + first, "\n".join(lines[first : next(ends, len(lines))]) + "\n")


class _Document:
    """A task file, split into front matter and sections."""

    def __init__(self, file: Path) -> None:
        """Read and split it.

        Raises:
            TaskError: no front matter, broken YAML, or a section that comes twice.
        """
        self.file = file
        lines = read_text(file).splitlines()
        ends = [at for at, line in enumerate(lines) if line.rstrip() == FENCE]
        if not ends or ends[0] != 0 or len(ends) < 2:
            raise TaskError(f"Expected front matter between two lines {FENCE!r} at the top of {file}, got none.")
        self._yaml = _Yaml("\n".join(["", *lines[1 : ends[1]], ""]), file)
        self.sections = self._split(lines, ends[1] + 1)

    def front(self) -> FrontMatter:
        """Return the front matter as it must be."""
        try:
            return FrontMatter.model_validate(self._yaml.values)
        except ValidationError as error:
            detail = error.errors()[0]
            name = ".".join(map(str, detail["loc"]))
            raise TaskError(
                f"Expected another {name or 'front matter'} at {self.place(*detail['loc'])}: {detail['msg'].lower()}."
            ) from error

    def place(self, *keys: str | int) -> str:
        """Return file and line of something in the front matter."""
        return f"{self.file}:{self._yaml.line(keys)}"

    def text(self, name: str) -> str:
        """Return a section's text, empty without one."""
        return self.sections[name].text if name in self.sections else ""

    def _split(self, lines: Sequence[str], start: int) -> dict[str, _Section]:
        """Split at headings that stand in no code block."""
        places: list[tuple[str, int]] = []
        fence = ""
        for at in range(start, len(lines)):
            line = lines[at]
            if fence:
                fence = "" if _closes(line, fence) else fence
            elif line.startswith("## "):
                places.append((line[3:].strip().lower(), at + 1))
            else:
                fence = _fence(line)
        ends = [at - 1 for _, at in places[1:]] + [len(lines)]
        sections: dict[str, _Section] = {}
        for (name, first), end in zip(places, ends, strict=False):
            if name in sections:
                raise TaskError(f"Expected one section {name!r}, got a second at {self.file}:{first}.")
            while end > first and lines[end - 1].strip() in ("", FENCE):  # a rule before the next section
                end -= 1
            while first < end and not lines[first].strip():
                first += 1
            sections[name] = _Section(first + 1, "\n".join(lines[first:end]))
        return {name: section for name, section in sections.items() if section.text}


class _Yaml:
    """A mapping in YAML, with the lines of what is in it."""

    def __init__(self, text: str, file: Path) -> None:
        try:
            self._root = yaml.compose(text, Loader=yaml.SafeLoader)
            values = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f":{mark.line + 1}" if mark is not None else ""
            problem = getattr(error, "problem", None) or error
            raise TaskError(f"Expected YAML in {file}{line}, got: {problem}.") from error
        if not isinstance(values, dict):
            raise TaskError(f"Expected a mapping as YAML in {file}, got {type(values).__name__}.")
        self.values: Mapping[str, Any] = values

    def line(self, keys: Sequence[str | int]) -> int:
        """Return the line, from 1, of the value that a path of keys leads to, or of the nearest one around it."""
        node = self._root
        for key in keys:
            below: Mapping[Any, Any] = {}
            if isinstance(node, yaml.MappingNode):
                below = {name.value: value for name, value in node.value}
            elif isinstance(node, yaml.SequenceNode):
                below = dict(enumerate(node.value))
            if key not in below:
                break
            node = below[key]
        return 1 if node is None else node.start_mark.line + 1


def _fence(line: str) -> str:
    """Return the fence that opens a code block; empty where none does."""
    stripped = line.lstrip()
    marks = stripped[: len(stripped) - len(stripped.lstrip(stripped[:1]))] if stripped[:1] in ("`", "~") else ""
    return marks if len(marks) >= 3 else ""


def _closes(line: str, fence: str) -> bool:
    marks = line.strip()
    return len(marks) >= len(fence) and set(marks) == set(fence)


def _file(spec: WorkspaceFile, assets: Path, place: str) -> TaskFile:
    """Return a file of the workspace.

    Raises:
        TaskError: it leads out of the assets or the workspace, or is not there.
    """
    with naming(place):
        if spec.path is not None and spec.content is not None:
            return TaskFile(path=inside_path(spec.path, WORKDIR), data=spec.content.encode())
        if spec.source is None or spec.dest is None:
            raise TaskError("Expected a workspace file with path and content or source and dest, got neither pair.")
        source = assets / spec.source
        if not source.exists() and spec.source.startswith("assets/"):
            source = assets.parent / spec.source
        if not source.resolve().is_relative_to(assets.resolve()):
            raise TaskError(f"Expected a source inside {assets}, got {spec.source!r}.")
        return task_file(source, assets, inside_path(spec.dest, WORKDIR))


def _grading(front: FrontMatter, document: _Document) -> tuple[tuple[TaskFile, ...], Grading]:
    """Return the grader's files and how a task is graded. A side of weight 0 is left out."""
    weights = front.grading_weights or Weights()
    automated = 1.0 if front.grading_type == "automated" else weights.automated
    judged = 1.0 if front.grading_type == "llm_judge" else weights.llm_judge
    if front.grading_type == "hybrid" and automated + judged == 0:
        raise TaskError(f"Expected a weight above 0 at {document.place('grading_weights')}, got none.")
    hidden: tuple[TaskFile, ...] = ()
    if front.grading_type != "llm_judge" and automated:
        hidden = (
            TaskFile(path=f"{GRADER}/grade.py", source=Path(__file__).with_name("pinchbench_grade.py")),
            TaskFile(path=f"{GRADER}/checks.py", data=_checks(document).encode()),
        )
    if front.grading_type == "automated" or not judged:
        return hidden, GRADING
    with naming(document.file):
        rubric = _rubric(document)
        if not hidden:
            return (), rubric
        share = automated / (automated + judged)
        return hidden, HybridGrading(automated=GRADING, rubric=rubric, automated_weight=share)


def _rubric(document: _Document) -> RubricGrading:
    return read_rubric(
        document.text("llm judge rubric"),
        document.text("grading criteria"),
        guidance=document.text("expected behavior"),
    )


def _checks(document: _Document) -> str:
    """Return the code of the automated checks.

    Raises:
        TaskError: no python block, one that is no Python, or without `grade`.
    """
    section = document.sections.get("automated checks")
    code = None if section is None else section.code()
    if section is None or code is None:
        line = "" if section is None else f":{section.line}"
        raise TaskError(
            f"Expected a python block in the section 'Automated Checks' of {document.file}{line}, got none."
        )
    try:
        found = ast.parse(code.text).body
    except (SyntaxError, ValueError) as error:
        line_number = code.line + (getattr(error, "lineno", None) or 1) - 1
        raise TaskError(f"Expected Python at {document.file}:{line_number}, got: {error}.") from error
    if not any(isinstance(node, ast.FunctionDef) and node.name == "grade" for node in found):
        raise TaskError(f"Expected a function grade(transcript, workspace_path) at {document.file}:{code.line}.")
    return code.text


def _session(value: Any) -> Any:
    """Accept a session that is only its prompt, and `message` for `prompt`."""
    if isinstance(value, str):
        return {"prompt": value}
    if isinstance(value, dict) and "prompt" not in value and "message" in value:
        return {**value, "prompt": value["message"]}
    return value
