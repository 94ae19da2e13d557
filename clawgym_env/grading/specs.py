"""How a task is judged, as data: what its loader wrote down and a grader carries out.

Part of `Task`, so a task can be stored, compared and sent to another process. Invariant: no spec names a judge model,
an address or a key; those belong to whoever runs the grading.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Self, TypeAlias, Union

from pydantic import BaseModel, ConfigDict, Field, model_validator

ANCHORS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""The scores a judge may give to one criterion."""


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CommandGrading(_Spec):
    """A command over the finished workspace."""

    kind: Literal["command"] = "command"
    command: tuple[str, ...] = ("bash", "reward/reward.sh")
    """Run in the workspace after the hidden files were brought in."""
    score: Literal["last_line", "mean_of_json", "exit_code", "reward_file"] = "last_line"
    """`last_line`: of stdout, a number. `mean_of_json`: of the values of the JSON object on stdout. `exit_code`: 1 for
    0, else 0. `reward_file`: a number that the command writes, or a JSON object with one named `reward`. The table in
    `scores` says what everything else means."""
    reward_files: tuple[str, ...] = ()
    """Absolute paths, of which the first that exists counts (Harbor: `reward.txt`, else `reward.json`). What lay there
    before is removed first."""

    @model_validator(mode="after")
    def _says_where(self) -> Self:
        if (self.score == "reward_file") != bool(self.reward_files):
            raise ValueError(
                f"Expected reward_files with score='reward_file' only, got {self.score}: {self.reward_files}."
            )
        if relative := [path for path in self.reward_files if not path.startswith("/")]:
            raise ValueError(f"Expected absolute paths in reward_files, got {relative}.")
        return self


class Criterion(_Spec):
    """One question to the judge."""

    name: str
    question: str
    weight: float = Field(default=1.0, gt=0.0, allow_inf_nan=False)
    anchors: Mapping[str, str] = Field(default_factory=dict)
    """What each of `ANCHORS` means, by its shortest decimal form: "0", "0.25", …, "1"."""
    checks: tuple[str, ...] = ()
    """Yes-or-no statements instead of anchors: the criterion scores 1 if all hold, else 0."""
    file: str | None = None
    """Relative to the workspace: without this file the criterion scores 0 and the judge is not asked."""


class RubricGrading(_Spec):
    """A judge model's answers to criteria; their weighted mean is the score."""

    kind: Literal["rubric"] = "rubric"
    criteria: tuple[Criterion, ...] = Field(min_length=1)
    guidance: str = ""
    """What the judge should know beside the instruction: the behaviour expected."""
    files: tuple[str, ...] = ()
    """Glob patterns, relative to the workspace, of what the judge is shown; empty: what the agent made or changed."""
    show_conversation: bool = False
    separate_calls: bool = False
    """Ask the judge once per criterion instead of once for all."""

    @model_validator(mode="after")
    def _unambiguous(self) -> Self:
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) != len(names):
            raise ValueError(f"Expected criteria with names of their own, got {names}.")
        paths = [*self.files, *(criterion.file for criterion in self.criteria if criterion.file is not None)]
        if outside := [path for path in paths if not path or path.startswith("/") or ".." in path.split("/")]:
            raise ValueError(f"Expected files inside the workspace, relative to it, got {outside}.")
        return self


class HybridGrading(_Spec):
    """A command and a judge together."""

    kind: Literal["hybrid"] = "hybrid"
    automated: CommandGrading
    rubric: RubricGrading
    automated_weight: float = Field(default=0.7, gt=0.0, lt=1.0)
    missing_side: Literal["error", "renormalise", "zero"] = "error"
    """What a side that gives no score becomes: a failed grading, the other side alone, or 0."""


class AnswerGrading(_Spec):
    """A short answer against the expected one; no program is run."""

    kind: Literal["answer"] = "answer"
    expected: str
    tolerance: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Relative error allowed in numbers."""
    file: str | None = None
    """Where the agent was told to write its answer; None: the visible response."""


Grading: TypeAlias = Union[CommandGrading, RubricGrading, HybridGrading, AnswerGrading]
