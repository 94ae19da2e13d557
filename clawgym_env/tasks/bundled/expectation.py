"""What a finished workspace must hold, as data: the content of a bundled task's hidden `reward/expected.json`.

Families make these, `check.py` judges them inside the grading sandbox. Invariant: the weights of one task's
expectations add up to 1 after `expected_json` has normalised them, and an untouched workspace earns none of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

Kind = Literal["exists", "text", "number", "json", "csv", "contains"]

EXISTS_SHARE = 0.2
"""Part of a file's credit that is earned by the right path alone. Small: a wrong word must not pay."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """One named sub-score."""

    name: str
    """The same for every instance of a family, so that it can be plotted."""
    file: str
    kind: Kind
    weight: float
    value: JsonValue = None
    """Text, a number, any JSON value, or CSV rows (lists of strings)."""
    before: str | None = None
    """The file's text at the start, where there was one: unchanged earns nothing."""


def expect(
    file: str,
    value: JsonValue,
    *,
    kind: Kind = "text",
    name: str = "file",
    weight: float = 1.0,
    before: str | None = None,
) -> tuple[Expectation, Expectation]:
    """Return the two expectations of one output: it was written, and it holds `value`."""
    written = "exists" if before is None else "changed"
    return (
        Expectation(f"{name}_{written}", file, "exists", weight * EXISTS_SHARE, before=before),
        Expectation(f"{name}_content", file, kind, weight * (1 - EXISTS_SHARE), value, before),
    )


def expected_json(expectations: Sequence[Expectation], inputs: Sequence[str]) -> bytes:
    """Serialise for `check.py`.

    Args:
        expectations: with any positive weights.
        inputs: paths the task starts with; they never count as output.
    """
    total = sum(expectation.weight for expectation in expectations)
    checks: list[Mapping[str, JsonValue]] = [
        {
            "name": expectation.name,
            "file": expectation.file,
            "kind": expectation.kind,
            "weight": expectation.weight / total,
            "value": expectation.value,
            "before": expectation.before,
        }
        for expectation in expectations
    ]
    return json.dumps({"inputs": list(inputs), "checks": checks}, indent=1).encode()
