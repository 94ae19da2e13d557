"""Words and numbers that belong to exactly one split.

Every family draws its words, file names and numbers here. Invariant: whether a word (or number) is a training or a
held-out one is a stable hash of itself, so that no seed, index or family can leak one into the other split.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable
from typing import Literal, TypeVar

Split = Literal["train", "heldout"]
Drawn = TypeVar("Drawn")

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"

ENGLISH = frozenset(
    {"base", "data", "date", "done", "file", "five", "give", "into", "line", "live", "made", "make", "mode", "more"}
    | {"name", "nine", "none", "note", "rule", "same", "save", "side", "size", "some", "take", "time", "type", "zero"}
)
"""English words the inventory can spell: never drawn, so that instructions and answers do not mix."""


def owner(text: str) -> Split:
    """Return the split a word or number belongs to; case does not matter. A quarter of all are held out."""
    return "heldout" if zlib.crc32(text.lower().encode()) % 4 == 0 else "train"


class Vocabulary:
    """Draws for one instance: nothing is drawn twice, and everything belongs to `split`."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split
        self._used: set[str] = set()

    def word(self) -> str:
        """Return a new lower-case pseudo-word of two or three syllables, such as `balo`."""
        while True:
            syllables = self.rng.choice((2, 2, 3))
            word = "".join(self.rng.choice(CONSONANTS) + self.rng.choice(VOWELS) for _ in range(syllables))
            if word not in ENGLISH and self._take(word):
                return word

    def words(self, count: int) -> list[str]:
        """Return `count` different new words."""
        return [self.word() for _ in range(count)]

    def name(self) -> str:
        """Return a new capitalised word, for people and things."""
        return self.word().capitalize()

    def number(self, low: int = 10, high: int = 999) -> int:
        """Return a new number between `low` and `high`, both at least 10: one digit is too few to divide."""
        while True:
            number = self.rng.randint(low, high)
            if self._take(str(number)):
                return number

    def numbers(self, count: int, low: int = 10, high: int = 999) -> list[int]:
        """Return `count` different new numbers."""
        return [self.number(low, high) for _ in range(count)]

    def file(self, extension: str = "txt") -> str:
        """Return a new file name."""
        return f"{self.word()}.{extension}"

    def settle(self, draw: Callable[[], Drawn], derived: Callable[[Drawn], Iterable[int]]) -> Drawn:
        """Repeat `draw` until the numbers computed from it belong to this split too.

        Sums and products are answers, so they must not cross the splits either. One digit may: it is a count.
        """
        used = frozenset(self._used)
        while True:
            drawn = draw()
            if all(number < 10 or owner(str(number)) == self.split for number in derived(drawn)):
                return drawn
            self._used = set(used)

    def _take(self, text: str) -> bool:
        if text in self._used or owner(text) != self.split:
            return False
        self._used.add(text)
        return True
