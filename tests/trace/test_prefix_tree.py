"""The prefix tree: tokens come back whole, every sampled token has one fate, a trained one is trained once."""

from __future__ import annotations

import copy
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import call, random_trees

from clawgym_env.trace.prefix_tree import PrefixTree, Selection, TokenRow, read_tokens

uses = st.sampled_from(["train", "context", "drop"])
selections = st.builds(Selection, main=uses, compaction=uses, subagent=uses, auxiliary=uses, dead=uses)


def trained_places(rows: tuple[TokenRow, ...]) -> list[tuple[tuple[int, ...], int, float]]:
    """For each trained token its whole context, itself and its logprob."""
    return sorted(
        (tuple(row.token_ids[: at + 1].tolist()), int(row.token_ids[at]), float(row.logprobs[at]))
        for row in rows
        for at in np.flatnonzero(row.loss_mask)
    )


def test_an_append_only_conversation_is_one_row() -> None:
    tree = PrefixTree(
        [
            call(0, [1, 2], [3, 4], temperature=0.7),
            call(1, [5], [6], prefix=(0, 4), lineage=0),
            call(2, [7], [8, 9], prefix=(1, 6), lineage=1),
        ]
    )
    assert tree.prompt(2).tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert tree.history(2).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    (row,) = tree.rows()
    assert row.token_ids.tolist() == tree.history(2).tolist()
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, False, True, True]
    assert row.call_indices.tolist() == [-1, -1, 0, 0, -1, 1, -1, 2, 2]
    assert row.policy_versions.tolist() == [-1, -1, 3, 4, -1, 4, -1, 3, 4]
    assert row.temperatures.tolist() == pytest.approx([1, 1, 0.7, 0.7, 1, 1, 1, 1, 1])
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.003, -0.004, 0, -0.006, 0, -0.008, -0.009])
    assert [path.calls for path in tree.trajectories()] == [(0, 1, 2)]


@given(random_trees(), st.data())
def test_any_part_of_a_history_is_read_the_same_with_a_prompt_at_hand(tree: PrefixTree, data: st.DataObject) -> None:
    if not len(tree):
        return
    index, near = (data.draw(st.integers(0, len(tree) - 1)) for _ in range(2))
    end = data.draw(st.integers(0, tree[index].history_len))
    start = data.draw(st.integers(0, end))
    part = read_tokens(tree.calls, index, end, start=start, at_hand=(near, tree.prompt(near)))
    assert part.tolist() == tree.history(index)[start:end].tolist()
    assert part.dtype == np.int32


def test_lineage_goes_on_where_tokens_branch_at_a_moved_transient_suffix() -> None:
    """Prompt 0 ends in a suffix 90 that prompt 1 moves behind reply 0: each call is trained where it was sampled."""
    tree = PrefixTree(
        [
            call(0, [1, 2, 90], [3]),
            call(1, [3, 4, 91], [5], prefix=(0, 2), lineage=0),
        ]
    )
    assert tree.prompt(1).tolist() == [1, 2, 3, 4, 91]
    assert [path.calls for path in tree.trajectories()] == [(0, 1)]
    first, second = tree.rows()
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 90, 3], [False, False, False, True])
    assert second.token_ids[second.loss_mask].tolist() == [5]
    assert not tree.over_branched(Selection(max_leaves=1))


def test_a_shared_reply_is_trained_in_the_first_of_two_parallel_branches() -> None:
    tree = PrefixTree(
        [
            call(0, [1], [2]),
            call(1, [3], [4], prefix=(0, 2), lineage=0),
            call(2, [5], [6], prefix=(0, 2), lineage=0),
        ]
    )
    first, second = tree.rows()
    assert first.token_ids[first.loss_mask].tolist() == [2, 4]
    assert second.token_ids[second.loss_mask].tolist() == [6]
    assert second.call_indices.tolist() == [-1, -1, -1, 2]
    assert [path.calls for path in tree.trajectories()] == [(0, 1), (0, 2)]


def test_a_prefix_cut_inside_the_grandparent_does_not_contain_the_parent() -> None:
    """Links: 2 takes all of 1, but 1 takes only the first token of 0; reply 0 is on no longer path."""
    tree = PrefixTree(
        [
            call(0, [1, 2], [3]),
            call(1, [4], [5], prefix=(0, 1)),
            call(2, [6], [7], prefix=(1, 3)),
        ]
    )
    assert [row.token_ids.tolist() for row in tree.rows()] == [[1, 2, 3], [1, 4, 5, 6, 7]]


@pytest.mark.parametrize("through_a_whole_link", [False, True])
def test_a_prefix_longer_than_an_ancestors_cut_does_not_contain_what_the_ancestor_left(
    through_a_whole_link: bool,
) -> None:
    """Call 2 shares one token with 1, hence not reply 0; one that shares five tokens with 2 does not either."""
    calls = [
        call(0, [1, 2], [3]),
        call(1, [4], [5], prefix=(0, 3), kind="auxiliary"),
        call(2, [6, 7, 8, 9], [10], prefix=(1, 1)),
    ]
    if through_a_whole_link:
        calls.append(call(3, [11], [12], prefix=(2, 6)))
    calls.append(call(len(calls), [13], [14], prefix=(len(calls) - 1, 5)))
    tree = PrefixTree(calls)
    tree.validate()
    rows = [row.token_ids.tolist() for row in tree.rows()]
    assert rows[0] == [1, 2, 3]
    assert rows[-1] == [1, 6, 7, 8, 9, 13, 14]


def test_every_fate_of_a_token_has_a_named_bucket() -> None:
    tree = PrefixTree(
        [
            call(0, [1], [2]),
            call(1, [1], [3, 3], state="dead"),
            call(2, [1], [4], state="retry"),
            call(3, [1], [5], state="undelivered", delivered=False),
            call(4, [1], [6], starved=True),
            call(5, [1], [7], kind="subagent"),
            call(6, [1], [8], kind="compaction"),
            call(7, [1], [9], kind="auxiliary", state="dead"),
        ]
    )
    assert {name: count for name, count in tree.buckets().items() if count} == {
        "trained": 1,
        "dead": 2,
        "retry": 1,
        "undelivered": 1,
        "starved": 1,
        "subagent": 1,
        "compaction": 1,
        "auxiliary": 1,
    }
    assert tree.buckets(Selection(dead="train"))["trained"] == 4
    assert tree.buckets(Selection(subagent="context"))["context"] == 1
    assert tree.buckets(Selection(main="drop"))["main"] == 6
    assert tree.delivered_fraction == pytest.approx(8 / 9)


@given(random_trees(), selections)
def test_buckets_sum_to_all_sampled_tokens(tree: PrefixTree, selection: Selection) -> None:
    assert sum(tree.buckets(selection).values()) == tree.num_completion_tokens


@given(random_trees(), selections)
def test_rows_train_every_trained_token_once_in_the_context_it_was_sampled_in(
    tree: PrefixTree, selection: Selection
) -> None:
    rows = tree.rows(selection)
    expected = []
    for node in tree:
        if selection.bucket(node) == "trained":
            history = tree.history(node.index).tolist()
            for at in range(node.prompt_len, node.history_len):
                expected.append((tuple(history[: at + 1]), history[at], float(node.logprobs[at - node.prompt_len])))
    assert trained_places(rows) == sorted(expected)
    assert sum(int(row.loss_mask.sum()) for row in rows) == tree.buckets(selection)["trained"]


@given(random_trees(), selections)
def test_no_row_is_the_beginning_of_another(tree: PrefixTree, selection: Selection) -> None:
    rows = [tuple(row.token_ids.tolist()) for row in tree.rows(selection)]
    for i, short in enumerate(rows):
        assert not any(i != j and long[: len(short)] == short for j, long in enumerate(rows))


@given(random_trees(), st.randoms(use_true_random=False))
def test_the_order_in_which_calls_arrived_does_not_matter(tree: PrefixTree, random: object) -> None:
    """Commit the same calls in another order that keeps parents first."""
    assert hasattr(random, "random")
    depth: list[int] = []
    for node in tree:
        parents = [depth[p] for p in (node.prefix_parent, node.lineage_parent) if p is not None]
        depth.append(1 + max(parents, default=-1))
    order = sorted(range(len(tree)), key=lambda index: (depth[index], random.random()))
    place = {old: new for new, old in enumerate(order)}
    moved = PrefixTree(
        [
            dataclasses.replace(
                tree[old],
                index=new,
                prefix_parent=None if tree[old].prefix_parent is None else place[tree[old].prefix_parent],
                lineage_parent=None if tree[old].lineage_parent is None else place[tree[old].lineage_parent],
            )
            for new, old in enumerate(order)
        ]
    )
    moved.validate()
    assert trained_places(moved.rows()) == trained_places(tree.rows())
    assert moved.buckets() == tree.buckets()
    paths = {tuple(tree[i].id for i in path.calls) for path in tree.trajectories()}
    assert {tuple(moved[i].id for i in path.calls) for path in moved.trajectories()} == paths


@given(random_trees())
def test_a_side_call_or_a_repeated_branch_changes_nothing_of_the_trained_tokens(tree: PrefixTree) -> None:
    side = call(len(tree), [901], [902], kind="auxiliary")
    extra = [side]
    if len(tree):
        last = tree[len(tree) - 1]
        extra.append(dataclasses.replace(last, id="again", index=len(tree) + 1, state="dead"))
    grown = PrefixTree([*tree.calls, *extra])
    grown.validate()
    assert trained_places(grown.rows()) == trained_places(tree.rows())


@given(random_trees())
def test_json_keeps_a_tree_whole(tree: PrefixTree) -> None:
    again = PrefixTree.from_json(json.loads(json.dumps(tree.to_json())))
    assert again == tree
    for one, other in zip(again, tree, strict=True):
        for field in dataclasses.fields(one):
            left, right = getattr(one, field.name), getattr(other, field.name)
            if isinstance(left, np.ndarray):
                assert left.dtype == right.dtype
                assert left.tobytes() == right.tobytes()
                assert not left.flags.writeable
            else:
                assert left == right


def test_logprobs_survive_json_bit_for_bit() -> None:
    odd = np.array([-0.1, -1e-30, -np.inf, -0.0], dtype=np.float32)
    tree = PrefixTree([dataclasses.replace(call(0, [1], [2, 3, 4, 5]), logprobs=odd)])
    assert PrefixTree.from_json(tree.to_json())[0].logprobs.tobytes() == odd.tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"index": 5}, "index"),
        ({"lineage_parent": 1}, "lineage parent"),
        ({"prefix_parent": 1}, "prefix parent"),
        ({"prefix_parent": None}, "prefix_len"),
        ({"prefix_len": 4}, "prefix_len"),
        ({"logprobs": np.zeros(3, np.float32)}, "one logprob"),
        ({"logprobs": np.zeros(1, np.float64)}, "logprobs"),
        ({"token_ids": np.zeros((1, 1), np.int32)}, "token_ids"),
        ({"policy_versions": ()}, "version spans"),
    ],
)
def test_a_tree_whose_parts_do_not_fit_is_refused_with_the_reason(change: dict[str, object], message: str) -> None:
    good = call(1, [4], [5], prefix=(0, 3), lineage=0)
    tree = PrefixTree([call(0, [1, 2], [3]), dataclasses.replace(good, **change)])
    with pytest.raises(ValueError, match=message):
        tree.validate()
    PrefixTree([call(0, [1, 2], [3]), good]).validate()


@pytest.mark.parametrize("value", [{}, {"calls": 3}, {"calls": [{}]}, {"calls": [1]}])
def test_from_json_refuses_what_is_no_tree(value: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"calls|StoredCall"):
        PrefixTree.from_json(value)  # type: ignore[arg-type]


def test_main_leaves_count_against_the_limit_whatever_their_state_but_side_calls_do_not() -> None:
    root = call(0, [1], [2])
    dead = [call(i, [i], [i], prefix=(0, 2), lineage=0, state="dead") for i in range(1, 4)]
    side = [call(i, [i], [i], kind="auxiliary") for i in range(4, 9)]
    tree = PrefixTree([root, *dead, *side])
    assert tree.over_branched(Selection(max_leaves=2))
    assert not tree.over_branched(Selection(max_leaves=3))


def test_an_empty_tree_is_well_behaved() -> None:
    tree = PrefixTree()
    assert (len(tree), tree.rows(), tree.trajectories(), tree.outline()) == (0, (), (), "")
    assert tree.delivered_fraction == 1.0
    assert PrefixTree.from_json(tree.to_json()) == tree


def test_a_tree_is_its_own_deep_copy() -> None:
    tree = PrefixTree([call(0, [1], [2])])
    assert copy.deepcopy(tree) is tree


def test_the_outline_shows_one_line_a_call_and_indents_branches_only() -> None:
    tree = PrefixTree(
        [
            call(0, [1], [2]),
            call(1, [3], [4], prefix=(0, 2), lineage=0),
            call(2, [3], [5], prefix=(0, 2), lineage=0, state="dead"),
            call(3, [6], [7], prefix=(1, 4), lineage=1),
            call(4, [9], [9], kind="auxiliary", starved=True),
        ]
    )
    assert tree.outline(lambda ids: f"say {ids}").splitlines() == [
        "#0 main 1+1 stop say [2]",
        "  #1 main 3+1 stop say [4]",
        "  #3 main 5+1 stop say [7]",
        "  #2 main/dead 3+1 stop say [5]",
        "#4 auxiliary 1+1 stop starved say [9]",
    ]


def test_ten_thousand_calls_in_one_chain_need_no_recursion() -> None:
    calls = [call(0, [1], [2])]
    for index in range(1, 10_000):
        calls.append(call(index, [1], [2], prefix=(index - 1, 2 * index), lineage=index - 1))
    tree = PrefixTree(calls)
    tree.validate()
    assert len(tree.history(9_999)) == 20_000
    (row,) = tree.rows()
    assert int(row.loss_mask.sum()) == 10_000
    assert len(tree.trajectories()[0].calls) == 10_000
    assert not tree.over_branched()
    assert tree.outline().count("\n") == 9_999


def test_a_thousand_calls_off_a_moving_suffix_each_get_their_row() -> None:
    calls = [call(0, [1, 9], [2])]
    for index in range(1, 1_000):
        calls.append(call(index, [2, 1, 9], [2], prefix=(index - 1, 2 * index - 1), lineage=index - 1))
    tree = PrefixTree(calls)
    tree.validate()
    rows = tree.rows()
    assert len(rows) == 1_000
    assert all(int(row.loss_mask.sum()) == 1 for row in rows)
