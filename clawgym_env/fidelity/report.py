"""What a conformance run came to: a row per scenario, and the first token that was not the one it had to be.

Made by `run`, printed by `clawgym fidelity`, asserted on by tests. Invariant: a result passes exactly when it has no
problem, and a problem about tokens says where they part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clawgym_env.engine.base import TokenIds

BEFORE, AFTER = 24, 12
"""Tokens shown on either side of a divergence."""

Verdict = Literal["ok", "FAIL", "n/a"]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which two sequences that had to be equal are not."""

    call: int
    """Index in the tree."""
    position: int
    """Counted from the start of the compared sequence."""
    expected: int | None
    """Token id; None where the sequence ends."""
    got: int | None
    before: str
    """Decoded text that both share, up to the divergence."""
    expected_text: str
    """Decoded text from the divergence on."""
    got_text: str

    def __str__(self) -> str:
        return (
            f"call #{self.call}, position {self.position}: expected id {self.expected} {self.expected_text!r}, "
            f"got id {self.got} {self.got_text!r}, both after {self.before!r}"
        )


def divergence(
    expected: TokenIds, got: TokenIds, *, call: int, decode: Callable[[Sequence[int]], str]
) -> Divergence | None:
    """Return where two sequences part, None when they are equal."""
    length = min(len(expected), len(got))
    different = expected[:length] != got[:length]
    if not different.any() and len(expected) == len(got):
        return None
    at = int(different.argmax()) if different.any() else length

    def text(tokens: TokenIds, start: int, end: int) -> str:
        return decode(tokens[max(start, 0) : end].tolist())

    return Divergence(
        call=call,
        position=at,
        expected=int(expected[at]) if at < len(expected) else None,
        got=int(got[at]) if at < len(got) else None,
        before=text(expected, at - BEFORE, at),
        expected_text=text(expected, at, at + AFTER),
        got_text=text(got, at, at + AFTER),
    )


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be."""

    what: str
    where: Divergence | None = None

    def __str__(self) -> str:
        return self.what if self.where is None else f"{self.what}: {self.where}"


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """One row."""

    scenario: str
    verdict: Verdict
    calls: int = 0
    main_calls: int = 0
    subagent_calls: int = 0
    kept: int = 0
    """Kept main trajectories."""
    segments: int = 0
    """Stretches of the main agent's history between two compactions, counted on the requests."""
    forks: int = 0
    """Main calls the harness did not go on from."""
    drift: tuple[str, ...] = ()
    """Reasons for which main calls restarted their tokens, with repetition."""
    buckets: Mapping[str, int] | None = None
    """Sampled tokens by what becomes of them; empty buckets left out."""
    identical: bool = False
    """Every call, id and log-probability of the engine is in the tree, and nothing else."""
    template_drift: Divergence | None = None
    """Where a full render of a request first parts from its spliced prompt, inside a reply: what a proxy without token
    splicing would have trained on instead."""
    problems: tuple[Problem, ...] = ()
    note: str = ""
    """Why the scenario does not apply, or how the run ended."""
    outline: str = ""
    """The tree."""
    output: str = ""
    """What the harness printed."""


@dataclass(frozen=True, slots=True)
class FidelityReport:
    """A conformance run of one harness with one policy."""

    harness: str
    version: str
    policy: str
    results: tuple[ScenarioResult, ...]

    @property
    def passed(self) -> bool:
        """Whether no scenario failed, and some scenario applied."""
        verdicts = {result.verdict for result in self.results}
        return "FAIL" not in verdicts and "ok" in verdicts

    @property
    def first_divergence(self) -> Divergence | None:
        """The first token that had to be another one."""
        found = (problem.where for result in self.results for problem in result.problems)
        return next((where for where in found if where is not None), None)

    def result(self, scenario: str) -> ScenarioResult:
        """Return the row of a scenario.

        Raises:
            KeyError: it was not run.
        """
        return {one.scenario: one for one in self.results}[scenario]

    def table(self) -> str:
        """Return the report as text: a row per scenario, then what was wrong."""
        head = ("scenario", "calls", "main", "kept", "segments", "forks", "drift", "buckets", "identical", "verdict")
        rows = [head, *(_row(result) for result in self.results)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = [f"{self.harness} {self.version}, policy {self.policy}"]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        for result in self.results:
            lines += [f"{result.scenario}: {problem}" for problem in result.problems]
            if result.note:
                lines.append(f"{result.scenario}: {result.note}")
            if result.template_drift is not None:
                lines.append(f"{result.scenario}: a full render would differ: {result.template_drift}")
        return "\n".join(lines)


def _row(result: ScenarioResult) -> tuple[str, ...]:
    if result.verdict == "n/a":
        return (result.scenario, *("-" for _ in range(8)), "n/a")
    reasons = {reason: result.drift.count(reason) for reason in dict.fromkeys(result.drift)}
    return (
        result.scenario,
        str(result.calls),
        str(result.main_calls),
        str(result.kept),
        str(result.segments),
        str(result.forks),
        " ".join(f"{reason}:{count}" for reason, count in reasons.items()) or "-",
        " ".join(f"{name}:{count}" for name, count in (result.buckets or {}).items()) or "-",
        "yes" if result.identical else "NO",
        result.verdict,
    )
