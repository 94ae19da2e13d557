"""PinchBench's rubrics, which are Markdown for a human reader, as criteria for a judge.

Used by `pinchbench`. Each `### ` heading of the rubric that says what scores mean is a criterion with its weight; its
texts are anchors where they stand for our five scores, else part of the question. A rubric without such headings is one
criterion as a whole, and without a rubric every item of the checklist is one that holds or not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import ANCHORS, Criterion, RubricGrading

ANCHOR_NAMES = frozenset(f"{anchor:g}" for anchor in ANCHORS)
HEADING = re.compile(r"#{3,4}\s+(?P<title>.+?)\s*#*$")
WEIGHT = re.compile(r"\s*\(\s*(?:weight\s*:?\s*)?(?P<weight>\d+(?:\.\d+)?)\s*%?\s*\)\s*$", re.IGNORECASE)
NUMBER = re.compile(r"^(?:criterion\s*)?\d+\s*[.:)\u2013\u2014-]\s*", re.IGNORECASE)
LEVEL = re.compile(
    r"\s*(?:[-*]\s+)?\*\*\s*(?:score\s*:?\s*)?(?P<score>[01](?:\.\d+)?)\s*:?\s*\*\*\s*:?\s*", re.IGNORECASE
)
ITEM = re.compile(r"\s*[-*]\s+(?:\[[ xX]?\]\s*)?(?P<text>.+)")


@dataclass(slots=True)
class _Part:
    """What stands under one heading."""

    title: str
    weight: float | None
    text: str
    """Before the first score."""
    levels: dict[str, str]
    whole: str


def read_rubric(rubric: str, checklist: str, *, guidance: str) -> RubricGrading:
    """Return what the judge is asked.

    Args:
        rubric: the section "LLM Judge Rubric", or nothing.
        checklist: the section "Grading Criteria".
        guidance: the section "Expected Behavior".

    Raises:
        TaskError: neither holds anything, or only some criteria have a weight.
    """
    notes, parts = _parts(rubric)
    scored = [part for part in parts if part.levels]
    criteria: Sequence[Criterion]
    if scored:
        notes += [part.whole for part in parts if not part.levels]
        criteria = tuple(_criteria(scored))
    elif rubric.strip():
        notes, criteria = [], (Criterion(name="rubric", question=rubric.strip()),)
    else:
        found = [match["text"].strip() for line in checklist.splitlines() if (match := ITEM.fullmatch(line))]
        criteria = tuple(
            Criterion(name=f"item_{number}", question=text, checks=(text,)) for number, text in enumerate(found, 1)
        )
    if not criteria:
        raise TaskError("Expected a rubric or a checklist for the judge, got neither.")
    told = "\n\n".join(part for part in (guidance, *notes) if part.strip())
    return RubricGrading(criteria=tuple(criteria), guidance=told, show_conversation=True)


def _parts(rubric: str) -> tuple[list[str], list[_Part]]:
    """Split at headings into what stands before the first and what stands under each."""
    before: list[str] = []
    parts: list[tuple[str, list[str]]] = []
    for line in rubric.splitlines():
        if heading := HEADING.fullmatch(line):
            parts.append((heading["title"], []))
        else:
            (parts[-1][1] if parts else before).append(line)
    notes = "\n".join(before).strip()
    return [notes] if notes else [], [_part(title, lines) for title, lines in parts]


def _part(title: str, lines: Sequence[str]) -> _Part:
    weight = WEIGHT.search(title)
    texts: list[list[str]] = [[]]
    scores: list[str] = []
    for line in lines:
        if level := LEVEL.match(line):
            scores.append(f"{float(level['score']):g}")
            texts.append([line[level.end() :]])
        else:
            texts[-1].append(line)
    question, *meanings = ("\n".join(text).strip() for text in texts)
    return _Part(
        title=NUMBER.sub("", WEIGHT.sub("", title)).strip() or title,
        weight=None if weight is None else float(weight["weight"]),
        text=question,
        levels=dict(zip(scores, meanings, strict=True)),
        whole="\n".join([title, *lines]).strip(),
    )


def _criteria(parts: Sequence[_Part]) -> Iterator[Criterion]:
    weighted = [part for part in parts if part.weight is not None]
    if len(weighted) not in (0, len(parts)):
        raise TaskError(
            f"Expected a weight for each criterion or for none, got {len(weighted)} weights for {len(parts)}."
        )
    titles: dict[str, int] = {}
    for part in parts:
        if part.weight == 0:
            continue
        count = titles[part.title] = titles.get(part.title, 0) + 1
        anchored = part.levels.keys() <= ANCHOR_NAMES
        yield Criterion(
            name=part.title if count == 1 else f"{part.title} {count}",
            question=(part.text or part.title) if anchored else part.whole,
            weight=1.0 if part.weight is None else part.weight,
            anchors=part.levels if anchored else {},
        )
