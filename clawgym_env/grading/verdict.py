"""A judge's reply, read strictly.

Between `judge` and `rubric`. Pure. Invariant: a verdict holds exactly one allowed score per criterion; anything else is
a `ValueError` whose words the judge is told.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clawgym_env.grading.specs import ANCHORS, Criterion


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a judge says about the criteria of one question."""

    scores: tuple[float, ...]
    """In the order of the criteria, out of `ANCHORS`."""
    notes: str


def key(position: int) -> str:
    """Return what the criterion at this position is called between us and the judge."""
    return f"criterion_{position + 1}"


def read_verdict(reply: str, criteria: Sequence[Criterion]) -> Verdict:
    """Return the verdict at the end of a reply.

    The JSON object may follow thoughts and stand in a code fence; nothing may follow it. It has the keys `scores` and
    `notes` only, one score per criterion: one of `ANCHORS`, or a list of true and false, one for each of its checks.

    Raises:
        ValueError: what is wrong.
    """
    value = _object_at_end(reply)
    if unknown := sorted(set(value) - {"scores", "notes"}):
        raise ValueError(f"It has keys besides scores and notes: {', '.join(unknown)[:200]}.")
    scores, notes = value.get("scores"), value.get("notes", "")
    if not isinstance(scores, dict) or not isinstance(notes, str):
        raise ValueError("scores is no object or notes is no text.")
    keys = [key(position) for position in range(len(criteria))]
    if sorted(scores) != sorted(keys):
        raise ValueError(f"scores has the keys {sorted(scores)}, expected are {keys}.")
    return Verdict(tuple(_score(name, scores[name], one) for name, one in zip(keys, criteria, strict=True)), notes)


def _score(name: str, given: object, criterion: Criterion) -> float:
    if criterion.checks:
        number = len(criterion.checks)
        if not isinstance(given, list) or len(given) != number or not all(isinstance(held, bool) for held in given):
            raise ValueError(f"{name} is {_brief(given)}, expected is a list of {number} times true or false.")
        return float(all(given))
    if isinstance(given, bool) or not isinstance(given, int | float) or given not in ANCHORS:
        raise ValueError(f"{name} is {_brief(given)}, expected is one of {', '.join(f'{a:g}' for a in ANCHORS)}.")
    return float(given)


def _brief(value: object) -> str:
    return json.dumps(value)[:100]


def _object_at_end(reply: str) -> Mapping[str, object]:
    text = reply.strip().removesuffix("```").rstrip()
    decoder = json.JSONDecoder(object_pairs_hook=_unique)
    start = text.find("{")
    while start >= 0:
        try:
            value, end = decoder.raw_decode(text, start)
        except RecursionError:
            break
        except json.JSONDecodeError:
            end = 0
        if end == len(text) and isinstance(value, dict):
            return value
        start = text.find("{", max(end, start + 1))
    raise ValueError("It does not end with one JSON object.")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len({name for name, _ in pairs}) != len(pairs):
        raise ValueError("A key of its JSON object stands there twice.")
    return dict(pairs)
