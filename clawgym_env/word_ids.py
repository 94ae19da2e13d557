"""The ids of short plain texts, put together from those of their words.

A byte-level BPE splits text at a pattern and encodes every word by itself, so the ids of a text are those of its words
one behind the other. `TextTokenizer` asks here first: remembering words costs a fifth of the CPU of the library's own
way, which was most of what a turn cost in the proxy. Text is plain when its letters, digits and spaces are ASCII; what
else it holds is punctuation or symbols, on which Python's patterns and the library's agree. Invariant: what is returned
is what the library returns; where the tokenizer's description leaves a doubt, the answer is None: ask the library.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, models

from clawgym_env.messages import Json

LONGEST_TEXT = 16 << 10
"""Characters. Splitting holds the interpreter lock, of which other threads would feel a longer text."""
REMEMBERED_WORDS, LONGEST_WORD = 1 << 17, 64
"""Some 25 MB at most."""
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a `ByteLevel` pre-tokenizer splits at unless told otherwise."""

PLAIN = re.compile(
    "[\x00-\x7f\xa1-\xa9\xab\xac\xae-\xb1\xb4\xb6-\xb8\xbb\xbf\xd7\xf7\u2010-\u2027\u2030-\u203e\u2041-\u2053\u2055-\u205e"
    "\u20a0-\u20bf\u2190-\u22ff\u2500-\u2767\u2794-\u27e5\U0001f300-\U0001f64f\U0001f680-\U0001f6d2]*"
)
"""ASCII, and punctuation and symbols beyond it: quotes, dashes, currencies, arrows, mathematics, boxes, emoji."""

_ASCII_OF = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}
"""What of a Unicode class is ASCII. Punctuation and symbols are left out: their ASCII parts are easily got wrong."""

_UNSURE = re.compile(r"\\[pPGKZ]|&&|\[\^?\]|\[[\[:]|\}\+|\(\?[a-z]*m|(?<![\[\\])\^|(?<!\\)\$")
"""What Oniguruma, which the library splits with, reads otherwise than Python or alone can read."""

Encode = Callable[[str], Sequence[int]]


class WordIds:
    """Encodes by remembering words. Thread-safe: at worst a word is encoded twice."""

    def __init__(self, pattern: re.Pattern[str], added: Sequence[str], encode: Encode) -> None:
        """Begin with no word.

        Args:
            pattern: whose matches in a plain text are its words.
            added: tokens that are found in a text before it is split.
            encode: the library's way.
        """
        self._pattern = pattern
        self._added = added
        self._words = _Words(encode)

    def encode(self, text: str) -> list[int] | None:
        """Return the ids of a text, or None when they are not simply those of its words."""
        if len(text) > LONGEST_TEXT or not (text.isascii() or PLAIN.fullmatch(text)):
            return None
        if any(token in text for token in self._added):
            return None
        words = self._pattern.findall(text)
        if sum(map(len, words)) != len(text):
            return None
        if len(self._words) > REMEMBERED_WORDS:
            self._words.clear()
        return list(itertools.chain.from_iterable(map(self._words.__getitem__, words)))


class _Words(dict[str, Sequence[int]]):
    def __init__(self, encode: Encode) -> None:
        super().__init__()
        self._encode = encode

    def __missing__(self, word: str) -> Sequence[int]:
        ids = tuple(self._encode(word))
        if len(word) <= LONGEST_WORD:
            self[word] = ids
        return ids


def word_ids(tokenizer: Tokenizer, encode: Encode) -> WordIds | None:
    """Return the words of a tokenizer that is a byte-level BPE with a pattern we can read, else None."""
    if not isinstance(tokenizer.model, models.BPE) or tokenizer.model.dropout:
        return None
    if _part(tokenizer.normalizer).get("type", "NFC") != "NFC":  # which plain text is
        return None
    written = _split_pattern(_part(tokenizer.pre_tokenizer))
    pattern = None if written is None else _plain_pattern(written)
    if pattern is None:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    return WordIds(pattern, [token.content for token in added if not token.special], encode)


def _part(component: object) -> dict[str, Json]:
    """Return the JSON form of a part of a tokenizer; empty for None."""
    if component is None:
        return {}
    value: dict[str, Json] = json.loads(component.__getstate__())  # type: ignore[arg-type]
    return value


def _split_pattern(pre_tokenizer: dict[str, Json]) -> str | None:
    """Return the regular expression whose matches become words, as far as nothing else splits or changes them."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return GPT_2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return pattern
    return None


def _plain_pattern(pattern: str) -> re.Pattern[str] | None:
    """Return a pattern that matches in plain text what `pattern`, with its Unicode classes, does; None if unsure."""
    for name, characters in _ASCII_OF.items():
        inside = re.compile(r"(\[[^\[\]]*)\\p\{" + name + r"\}")
        while (found := inside.search(pattern)) is not None:
            pattern = pattern[: found.start()] + found[1] + characters + pattern[found.end() :]
        if characters:
            pattern = pattern.replace(rf"\p{{{name}}}", f"[{characters}]")
    if _UNSURE.search(pattern):
        return None
    try:
        return re.compile(pattern, re.ASCII)
    except re.error:
        return None
