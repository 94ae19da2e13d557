"""Gymnasium spaces for what a rollout shows: any text, any token ids, and the captured prefix tree.

Used by the environments' spaces only. Invariant: `sample` draws members, `contains` refuses everything
the environments would never return, and `from_jsonable(to_jsonable(x))` is x.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from gymnasium import Space

from clawgym_env.engine import base
from clawgym_env.engine.base import SamplingParams, VersionSpan
from clawgym_env.messages import Json
from clawgym_env.trace.calls import CallTiming, ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PRINTABLE = "".join(map(chr, range(0x20, 0x7F)))


class Unicode(Space[str]):
    """Any text of at most `max_length` code points; samples are printable ASCII.

    Not a `gymnasium.spaces.Text`: its handlers index a finite alphabet, and listing all of Unicode takes seconds.
    Vectorised it becomes a tuple of strings; `AsyncVectorEnv` needs `shared_memory=False`.
    """

    def __init__(self, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        if max_length < 0:
            raise ValueError(f"Expected max_length >= 0, got {max_length}.")
        self.max_length = max_length
        super().__init__(dtype=str, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> str:
        """Draw up to 64 printable ASCII characters."""
        _refuse_mask(self, mask, probability)
        length = int(self.np_random.integers(0, min(self.max_length, 64) + 1))
        return "".join(_PRINTABLE[i] for i in self.np_random.integers(0, len(_PRINTABLE), size=length))

    def contains(self, x: Any) -> TypeGuard[str]:
        return isinstance(x, str) and len(x) <= self.max_length

    def to_jsonable(self, sample_n: Iterable[str]) -> list[str]:
        return list(sample_n)

    def from_jsonable(self, sample_n: list[Any]) -> list[str]:
        return [str(text) for text in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Unicode) and other.max_length == self.max_length

    def __repr__(self) -> str:
        return f"Unicode({self.max_length})"


class TokenIds(Space[base.TokenIds]):
    """Every vector of at most `max_length` ids of a vocabulary, dtype int32; samples are short.

    Not a `gymnasium.spaces.Sequence` of `Discrete`, which asks about each id by itself: of 100,000 ids that takes more
    than half a second. Vectorised it becomes a tuple of vectors; `AsyncVectorEnv` needs `shared_memory=False`.
    """

    def __init__(self, vocab_size: int, max_length: int, *, seed: int | np.random.Generator | None = None) -> None:
        if vocab_size < 1 or max_length < 0:
            raise ValueError(
                f"Expected vocab_size >= 1 and max_length >= 0, got vocab_size={vocab_size}, max_length={max_length}."
            )
        self.vocab_size = vocab_size
        self.max_length = max_length
        super().__init__(dtype=np.int32, seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> base.TokenIds:
        """Draw up to 64 ids."""
        _refuse_mask(self, mask, probability)
        length = int(self.np_random.integers(0, min(self.max_length, 64) + 1))
        return self.np_random.integers(0, self.vocab_size, size=length, dtype=np.int32)

    def contains(self, x: Any) -> TypeGuard[base.TokenIds]:
        if not _is_vector(x, np.int32) or len(x) > self.max_length:
            return False
        return not len(x) or bool(x.min() >= 0 and x.max() < self.vocab_size)

    def to_jsonable(self, sample_n: Iterable[base.TokenIds]) -> list[list[int]]:
        return [ids.tolist() for ids in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[base.TokenIds]:
        return [np.array(ids, dtype=np.int32) for ids in sample_n]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenIds):
            return False
        return (other.vocab_size, other.max_length) == (self.vocab_size, self.max_length)

    def __repr__(self) -> str:
        return f"TokenIds({self.vocab_size}, {self.max_length})"


class TraceSpace(Space[PrefixTree]):
    """Every well-formed `PrefixTree`, the empty one included. Samples are small random trees."""

    def __init__(self, *, seed: int | np.random.Generator | None = None) -> None:
        super().__init__(seed=seed)

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def sample(self, mask: None = None, probability: None = None) -> PrefixTree:
        """Draw a tree of up to five calls with up to eight new tokens each."""
        _refuse_mask(self, mask, probability)
        calls: list[ModelCall] = []
        for index in range(int(self.np_random.integers(0, 6))):
            calls.append(_random_call(self.np_random, calls, index))
        return PrefixTree(calls)

    def contains(self, x: Any) -> TypeGuard[PrefixTree]:
        """Whether the prefix chain and all array shapes fit together, in O(stored tokens)."""
        return isinstance(x, PrefixTree) and all(_well_formed(x, index) for index in range(len(x)))

    def to_jsonable(self, sample_n: Iterable[PrefixTree]) -> list[dict[str, Json]]:
        return [tree.to_json() for tree in sample_n]

    def from_jsonable(self, sample_n: list[Any]) -> list[PrefixTree]:
        return [PrefixTree.from_json(value) for value in sample_n]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TraceSpace)

    def __repr__(self) -> str:
        return "TraceSpace()"


def _refuse_mask(space: Space[Any], mask: object, probability: object) -> None:
    if mask is not None or probability is not None:
        raise ValueError(f"Expected no mask and no probability for {space!r}, got one. Sample without them.")


def _well_formed(tree: PrefixTree, index: int) -> bool:
    call = tree[index]
    parents = (call.lineage_parent, call.prefix_parent)
    if call.index != index or not all(parent is None or 0 <= parent < index for parent in parents):
        return False
    available = 0 if call.prefix_parent is None else tree[call.prefix_parent].history_len
    spans = [0, *(span.end for span in call.policy_versions)]
    return (
        0 <= call.prefix_len <= available
        and _is_vector(call.delta_token_ids, np.int32)
        and _is_vector(call.token_ids, np.int32)
        and _is_vector(call.logprobs, np.float32)
        and len(call.logprobs) == len(call.token_ids)
        and bool((call.delta_token_ids >= 0).all() and (call.token_ids >= 0).all())
        and [span.start for span in call.policy_versions] == spans[:-1]
        and spans[-1] == len(call.token_ids)
    )


def _is_vector(array: object, dtype: type[np.generic]) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype == dtype


def _random_call(rng: np.random.Generator, earlier: Sequence[ModelCall], index: int) -> ModelCall:
    parent = int(rng.integers(0, index)) if index and rng.random() < 0.8 else None
    prefix_len = 0 if parent is None else int(rng.integers(0, earlier[parent].history_len + 1))
    token_ids = _random_ids(rng)
    logprobs = -rng.exponential(size=len(token_ids)).astype(np.float32)
    logprobs.setflags(write=False)
    return ModelCall(
        id=f"call{index}",
        index=index,
        lineage_parent=parent,
        prefix_parent=parent,
        prefix_len=prefix_len,
        delta_token_ids=_random_ids(rng),
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=(VersionSpan(0, 0, len(token_ids)),),
        sampling=SamplingParams(),
        finish_reason="stop",
        kind="main",
        state="live",
        dialect="chat",
        drift_reason=None,
        request_hash=f"request{index}",
        role_hash="role",
        starved=False,
        timing=CallTiming(float(index), index + 0.5, index + 0.5),
    )


def _random_ids(rng: np.random.Generator) -> NDArray[np.int32]:
    ids = rng.integers(0, 256, size=int(rng.integers(1, 9)), dtype=np.int32)
    ids.setflags(write=False)
    return ids
