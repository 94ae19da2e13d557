"""ClawGym's rubrics: from the JSON beside a task to what a judge is asked, and how that joins the task's checker.

Used by both of ClawGym's formats. Tolerant of the three names and the shapes found in released data.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import ValidationError

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import ANCHORS, CommandGrading, Criterion, Grading, HybridGrading, RubricGrading
from clawgym_env.sandbox.base import WORKDIR
from clawgym_env.tasks.reading import explain, inside_path

RUBRIC_KEYS = ("rubrics", "rules", "rule")
"""Where a task keeps its rubric; the first that is not null counts."""
CODE_WEIGHT = 0.7
"""Of the checker's score where there is a rubric too, as in ClawGym-Bench."""
AVERAGE_WEIGHT = 0.5
"""The same where a task of the skill route says `code_and_rubric`: the plain average."""
_FILE_KEYS = ("file_path", "path", "file", "target_file")
_QUESTION_KEYS = ("question", "description", "criterion", "instruction")


def take_rubric(entry: Mapping[str, Any]) -> RubricGrading | None:
    """Return the rubric of a task's JSON; None where there is none or it says `skip_rubric`.

    Raises:
        TaskError: what is there is no rubric.
    """
    for key in RUBRIC_KEYS:
        if entry.get(key) not in (None, "", [], {}):
            try:
                return _rubric(entry[key])
            except ValidationError as error:
                raise TaskError(f"Expected a rubric in {key!r}, got {explain(error)}.") from error
    return None


def combine(code: CommandGrading | None, rubric: RubricGrading | None, *, mode: str | None = None) -> Grading:
    """Return how a task with a checker, a rubric or both is graded.

    Args:
        mode: the `validation_mode` of the skill route: code, rubric or code_and_rubric.

    Raises:
        TaskError: the mode names a side that is not there, or there is no side at all.
    """
    if mode not in (None, "", "code", "rubric", "code_and_rubric"):
        raise TaskError(f"Expected validation_mode to be code, rubric or code_and_rubric, got {mode!r}.")
    wanted_code, wanted_rubric = mode in ("code", "code_and_rubric"), mode in ("rubric", "code_and_rubric")
    if (wanted_code and code is None) or (wanted_rubric and rubric is None):
        raise TaskError(f"Expected what validation_mode={mode!r} names, got no {'rubric' if code else 'hook_code'}.")
    if mode == "code":
        rubric = None
    elif mode == "rubric":
        code = None
    if code is not None and rubric is not None:
        weight = AVERAGE_WEIGHT if mode == "code_and_rubric" else CODE_WEIGHT
        return HybridGrading(automated=code, rubric=rubric, automated_weight=weight)
    if code is not None:
        return code
    if rubric is not None:
        return rubric
    raise TaskError("Expected a checker (hook_code, reward/) or a rubric, got neither.")


def _rubric(value: Any) -> RubricGrading | None:
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise TaskError(f"Expected JSON as rubric, got {value[:100]!r}.") from error
    if isinstance(value, list):
        value = {"rules": value}
    if not isinstance(value, dict):
        raise TaskError(f"Expected an object or a list as rubric, got {type(value).__name__}.")
    if value.get("skip_rubric"):
        return None
    rules = value.get("rules") or value.get("rubrics") or []
    if not isinstance(rules, list) or not rules:
        raise TaskError(f"Expected rules in the rubric, got {sorted(value)}.")
    criteria = tuple(_criterion(rule, number) for number, rule in enumerate(rules, start=1))
    names = [criterion.name for criterion in criteria]
    if len(set(names)) < len(names):
        raise TaskError(f"Expected rules with unique names, got {names}.")
    files = [glob.escape(criterion.file) for criterion in criteria if criterion.file is not None]
    if len(files) == len(criteria):
        return RubricGrading(criteria=criteria, files=tuple(dict.fromkeys(files)))
    # A rule about no file may be about what the agent said, which is no work that the workspace shows.
    return RubricGrading(criteria=criteria, show_conversation=True)


def _criterion(rule: Any, number: int) -> Criterion:
    if not isinstance(rule, dict):
        raise TaskError(f"Expected rule {number} to be an object, got {rule!r}.")
    name = rule.get("name") or f"rule_{number}"
    file = next((rule[key] for key in _FILE_KEYS if rule.get(key)), None)
    question = next((rule[key] for key in _QUESTION_KEYS if rule.get(key)), None)
    if file is not None and not isinstance(file, str):
        raise TaskError(f"Expected one file in rule {name!r}, got {file!r}.")
    return Criterion(
        name=name,
        question=question or f"{str(name).replace('_', ' ')}: which of the descriptions fits {file or 'the result'}?",
        weight=rule.get("weight") or 1.0,
        anchors=_anchors(rule.get("scores"), name),
        file=None if file is None else inside_path(file, WORKDIR),
    )


def _anchors(scores: Any, name: object) -> Mapping[str, str]:
    if scores is None:
        return {}
    known = {f"{anchor:g}" for anchor in ANCHORS}
    try:
        anchors = {f"{float(score):g}": str(text) for score, text in scores.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise TaskError(f"Expected texts by score in rule {name!r}, got {scores!r}.") from error
    if not anchors.keys() <= known:
        raise TaskError(f"Expected scores {', '.join(sorted(known))} in rule {name!r}, got {', '.join(anchors)}.")
    return anchors
