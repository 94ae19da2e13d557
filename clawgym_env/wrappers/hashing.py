"""Text as a vector of fixed length, without a learned model: signed hashing of words and of neighbouring pairs.

Used by `TaskFeatures` and `CallFeatures`. Invariant: the vector is a function of text and size alone, the same in every
process and on every machine.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
import zlib
from collections import Counter

import numpy as np
import numpy.typing as npt

_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
"""Kana, Chinese and Hangul: written without blanks, so each character counts as a word."""
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def hashed_text(text: str, size: int) -> npt.NDArray[np.float32]:
    """Return a vector of shape [size] and length 1 (0 where the text has no words), with components in [-1, 1]."""
    words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    terms = Counter(words)
    terms.update(f"{first} {second}" for first, second in itertools.pairwise(words))
    features = np.zeros(size)
    for term, count in terms.items():
        digest = zlib.crc32(term.encode("utf-8", "surrogatepass"))
        # The sign makes terms that meet in one place cancel out on average instead of adding up.
        features[(digest >> 1) % size] += (1.0 + math.log(count)) * (1.0 if digest & 1 else -1.0)
    length = float(np.linalg.norm(features))
    return np.clip(features / (length or 1.0), -1.0, 1.0).astype(np.float32)
