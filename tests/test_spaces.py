from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest
from gymnasium.vector.utils import batch_space
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.spaces import TokenIds, TraceSpace, Unicode
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree


@given(st.text())
def test_unicode_holds_any_text_up_to_its_length(text: str) -> None:
    assert Unicode(len(text)).contains(text)
    assert not Unicode(len(text)).contains(text + "x")


def test_unicode_holds_nothing_but_text() -> None:
    assert not any(Unicode(9).contains(value) for value in (b"ab", 3, None, ["a"]))
    with pytest.raises(ValueError, match="max_length"):
        Unicode(-1)


def test_token_ids_hold_short_vectors_of_the_vocabulary() -> None:
    space = TokenIds(10, 3)
    assert all(space.contains(np.array(ids, dtype=np.int32)) for ids in ([], [0], [9, 0, 9]))
    assert not any(space.contains(np.array(ids, dtype=np.int32)) for ids in ([10], [-1], [1, 2, 3, 4], [[1]]))
    assert not any(space.contains(value) for value in ([1], "1", np.array([1]), np.array([1.0], dtype=np.float32)))
    assert space != TokenIds(10, 4)
    with pytest.raises(ValueError, match="vocab_size=0"):
        TokenIds(0, 3)


@pytest.mark.parametrize("space", [Unicode(1000), Unicode(0), TokenIds(300, 1000), TraceSpace()], ids=repr)
def test_samples_are_members_and_follow_the_seed(space: Unicode | TokenIds | TraceSpace) -> None:
    space.seed(5)
    first = [space.sample() for _ in range(20)]
    assert all(space.contains(value) for value in first)
    space.seed(5)
    again = [space.sample() for _ in range(20)]
    assert json.dumps(space.to_jsonable(first)) == json.dumps(space.to_jsonable(again))


def test_random_trees_differ_in_size() -> None:
    space = TraceSpace(seed=1)
    assert len({len(space.sample()) for _ in range(50)}) == 6


def test_jsonable_goes_there_and_back() -> None:
    texts, trees = Unicode(100), TraceSpace(seed=2)
    some = [trees.sample() for _ in range(10)]
    there = json.loads(json.dumps(trees.to_jsonable(some)))
    assert trees.to_jsonable(trees.from_jsonable(there)) == there
    assert all(map(trees.contains, trees.from_jsonable(there)))
    assert texts.from_jsonable(json.loads(json.dumps(texts.to_jsonable(["ä☃", ""])))) == ["ä☃", ""]
    ids = TokenIds(300, 100, seed=3)
    some_ids = [ids.sample() for _ in range(5)]
    back = ids.from_jsonable(json.loads(json.dumps(ids.to_jsonable(some_ids))))
    assert all(map(np.array_equal, back, some_ids))
    assert all(map(ids.contains, back))


def _change(**fields: object) -> Callable[[ModelCall], ModelCall]:
    return lambda call: dataclasses.replace(call, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "damage",
    [
        _change(index=7),
        _change(prefix_parent=1),
        _change(lineage_parent=5),
        _change(prefix_len=10_000),
        _change(prefix_len=-1),
        _change(token_ids=np.array([-1], dtype=np.int32)),
        _change(token_ids=np.array([1, 2, 3], dtype=np.int64)),
        _change(logprobs=np.zeros(100, dtype=np.float32)),
        _change(policy_versions=()),
    ],
)
def test_a_malformed_tree_is_no_member(damage: Callable[[ModelCall], ModelCall]) -> None:
    space = TraceSpace(seed=3)
    while len(tree := space.sample()) < 2:
        pass
    assert space.contains(tree)
    calls = list(tree.calls)
    calls[1] = damage(calls[1])
    assert not space.contains(PrefixTree(calls))
    assert not space.contains(calls)


def test_equal_spaces_are_equal_and_copies_too() -> None:
    assert Unicode(3) == Unicode(3) != Unicode(4)
    assert TraceSpace() == copy.deepcopy(TraceSpace()) != Unicode(3)


def test_vectorised_spaces_are_tuples() -> None:
    batch = batch_space(Unicode(9), 3)
    assert batch.contains(("ä", "", "abc"))
    assert not batch.contains(("ä", ""))


@pytest.mark.parametrize("space", [Unicode(9), TraceSpace()], ids=repr)
def test_masks_are_refused(space: Unicode | TraceSpace) -> None:
    with pytest.raises(ValueError, match="no mask"):
        space.sample(mask=np.ones(1))  # type: ignore[arg-type]
