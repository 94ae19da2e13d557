"""Whether a short answer is the expected one: OfficeQA's rules, of which only the words are known, in our own code.

Pure functions, called by the grader of `AnswerGrading`. Invariant: the score is 0 or 1 whatever the text holds, and an
answer that hedges (several lines, a second number) is wrong even where the right one is in it.

1. The text of the last `<FINAL_ANSWER>…</FINAL_ANSWER>` is the answer, else all of the text.
2. It must be direct: one non-empty line of at most 250 characters without markup, and no refusal.
3. A truth in brackets is a list: as many items, each right in its place.
4. A truth without numbers is equal after normalisation (case, punctuation, articles, white space).
5. A truth with numbers: the answer has as many, each in its place within the relative tolerance. `(5)` is -5. Years do
   not count, unless the truth has no other number; those that are there must agree. A percentage is never an amount. A
   scale (`million`) that both state, or that makes two bare numbers equal, counts; one that only one side states may
   also come from the question.
6. At least half of the truth's words that are no units must be in the answer.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Literal

MAX_CHARS = 250
SCALES: Mapping[str, int] = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12, "mn": 6, "bn": 9, "tn": 12}
MAX_EXPONENT = 60
"""A number beyond ten to this power is none: comparing it would cost without bound."""

_OPEN, _CLOSE = "<final_answer>", "</final_answer>"
_MARKUP = re.compile(r"</?[A-Za-z][^>]*>|`|\*\*|__|^\s*(?:#+|[-*•]|>|\|)\s|\\[A-Za-z(\[]|\]\(|\$\$")
_REFUSAL = re.compile(
    r"\b(?:unable to|can(?:no|')t|could not|not possible to)\s+(?:be\s+)?(?:determined?|answer|find|calculated?)\b"
    r"|\bnot (?:available|determinable|enough information)\b|\binsufficient (?:data|information)\b"
    r"|\bi (?:do not|don't) know\b|^\s*(?:n/?a|unknown|none)\s*\.?\s*$",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?P<open>\(\s*)?"
    r"(?P<sign>(?<![\w.])[-+]\s*)?(?:(?P<currency>[$€£¥]\s*)(?P<inner>[-+]\s*)?)?"
    r"(?<![\w.])(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d{1,3})?"
    r"(?P<percent>\s*(?:%|percent\b|per cent\b))?"
    r"(?P<close>\s*\))?"
    r"(?:\s*(?P<scale>thousand|million|billion|trillion|mn|bn|tn)s?\b)?"
    r"(?P<late_close>\s*\))?",
    re.IGNORECASE,
)
_PLAIN = """a an the of in and or is was approximately about roughly nominal us usd dollar dollars eur euro euros cents
percent percentage per cent pct point points"""
_UNITS = frozenset(_PLAIN.split()) | {name + plural for name in SCALES for plural in ("", "s")}
"""Words that may be left out of an answer."""
_ARTICLES = frozenset(("a", "an", "the"))
_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_DASHES = str.maketrans(dict.fromkeys("‐‑‒–—−﹣－", "-"))


@dataclass(frozen=True, slots=True)
class _Number:
    value: Decimal
    """As written, without its scale."""
    exponent: int
    """Of the scale stated, 0 without one."""
    kind: Literal["amount", "percent", "year"]

    @property
    def full(self) -> Decimal:
        return self.value.scaleb(self.exponent)


def score_answer(expected: str, given: str, *, tolerance: float = 0.0) -> float:
    """Return 1.0 if `given` answers as `expected` does, else 0.0.

    Args:
        expected: the truth: a number with or without a unit, words, or a list in brackets.
        given: all that was said; see the module's head for which part of it counts.
        tolerance: relative error allowed in each number, in [0, 1).

    Raises:
        ValueError: a tolerance outside [0, 1).
    """
    if not 0.0 <= tolerance < 1.0:
        raise ValueError(f"Expected a tolerance in [0, 1), got {tolerance}.")
    answer, truth = _direct(given), _clean(expected)
    if answer is None or not truth:
        return 0.0
    truths, answers = _items(truth), _items(answer)
    if truths is None:
        single = answers[0] if answers is not None and len(answers) == 1 else answer
        return float(_same(truth, single, tolerance))
    if answers is None:  # a list without brackets
        answers = _split(answer)
    pairs = zip(truths, answers, strict=False)
    return float(len(truths) == len(answers) and all(_same(one, other, tolerance) for one, other in pairs))


def _clean(text: str) -> str:
    return unicodedata.normalize("NFKC", text.translate(_DASHES)).strip()


def _direct(given: str) -> str | None:
    """Return the answer in a text, None where it is not a direct one."""
    lines = [line for line in _clean(_final(given)).splitlines() if line.strip()]
    if len(lines) != 1 or len(lines[0].strip()) > MAX_CHARS:
        return None
    line = lines[0].strip()
    return None if _MARKUP.search(line) or _REFUSAL.search(line) else line


def _final(given: str) -> str:
    """Return what the last pair of tags holds, all of the text without one."""
    # ASCII only, so that positions stay the same; and no pattern, which many lone tags would make quadratic.
    lower = given.translate(_LOWER)
    end = lower.rfind(_CLOSE)
    start = lower.rfind(_OPEN, 0, end) if end >= 0 else -1
    return given[start + len(_OPEN) : end] if start >= 0 else given


def _items(text: str) -> Sequence[str] | None:
    """Return the items of a list in brackets, None for anything else."""
    return _split(text[1:-1]) if text.startswith("[") and text.endswith("]") else None


def _split(text: str) -> Sequence[str]:
    """Split at semicolons, else at commas with a blank behind, else at commas: `1,234, 5,678` has two items."""
    for separator in (r";", r",\s+", r","):
        parts = re.split(separator, text)
        if len(parts) > 1:
            return [part.strip().strip("\"'") for part in parts]
    return [text.strip().strip("\"'")]


def _same(truth: str, answer: str, tolerance: float) -> bool:
    wanted, found = _numbers(truth), _numbers(answer)
    if not wanted:
        return _normal(truth) == _normal(answer) != ""
    years = [number.value for number in wanted if number.kind == "year"]
    if len(years) < len(wanted):
        given_years = [number.value for number in found if number.kind == "year"]
        if years and given_years and years != given_years:
            return False
        wanted = [number for number in wanted if number.kind != "year"]
        # A number that looks like a year may be the amount asked for: 1953 of 1,953.
        if len(found) != len(wanted):
            found = [number for number in found if number.kind != "year"]
    if len(found) != len(wanted):
        return False
    close = all(_close(one, other, tolerance) for one, other in zip(wanted, found, strict=True))
    return close and _words_overlap(truth, answer)


def _close(wanted: _Number, found: _Number, tolerance: float) -> bool:
    scales = {wanted.exponent, found.exponent}
    if "percent" in (wanted.kind, found.kind):
        return scales == {0} and _within(wanted.value, found.value, tolerance)
    if 0 not in scales:
        return _within(wanted.full, found.full, tolerance)
    return _within(wanted.full, found.full, tolerance) or _within(wanted.value, found.value, tolerance)


def _within(wanted: Decimal, found: Decimal, tolerance: float) -> bool:
    return abs(wanted - found) <= Decimal(str(tolerance)) * abs(wanted)


def _numbers(text: str) -> list[_Number]:
    return [number for match in _NUMBER.finditer(text) if (number := _number(match)) is not None]


def _number(match: re.Match[str]) -> _Number | None:
    digits = match["digits"]
    value = Decimal(digits.replace(",", "") + (match["exponent"] or ""))
    if abs(value.adjusted()) > MAX_EXPONENT:
        return None
    in_parentheses = bool(match["open"]) and bool(match["close"] or match["late_close"])
    negative = in_parentheses or "-" in (match["sign"] or "") + (match["inner"] or "")
    exponent = SCALES[match["scale"].lower()] if match["scale"] else 0
    plain = not (match["percent"] or exponent or match["currency"] or negative or match["exponent"])
    kind: Literal["amount", "percent", "year"] = "percent" if match["percent"] else "amount"
    if plain and re.fullmatch(r"(?:1[89]|20)\d\d", digits):
        kind = "year"
    return _Number(-value if negative else value, exponent, kind)


def _words_overlap(truth: str, answer: str) -> bool:
    wanted = _words(truth) - _UNITS
    return len(wanted & _words(answer)) * 2 >= len(wanted)


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"(?<!\w)[^\W\d_]+", text.casefold()))


def _normal(text: str) -> str:
    """Return a text without case, punctuation, articles and surplus blanks."""
    words = re.findall(r"\w+", text.casefold())
    return " ".join(word for word in words if word not in _ARTICLES)
