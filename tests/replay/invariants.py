"""What must hold for every replay, whatever the harness did: nothing the engine drew is lost, doubled or altered."""

from __future__ import annotations

import itertools

import numpy as np
from recorded_policy import RecordedPolicy, Sample

from clawgym_env.trace.prefix_tree import BUCKETS, PrefixTree, Selection

EVERYTHING = Selection(compaction="train", subagent="train", auxiliary="train", dead="train")


def check(tree: PrefixTree, policy: RecordedPolicy, *, append_only: bool) -> None:
    """Hold a frozen tree to what the engine noted down."""
    tree.validate()
    drawn = _drawn(tree, policy)
    for selection in (Selection(), EVERYTHING):
        _check_buckets(tree, selection)
        _check_rows(tree, selection, drawn)
    _check_paths(tree, append_only=append_only)
    delivered = sum(len(call.token_ids) for call in tree if call.timing.delivered_s is not None)
    assert tree.delivered_fraction * tree.num_completion_tokens == (delivered or tree.num_completion_tokens)


def _drawn(tree: PrefixTree, policy: RecordedPolicy) -> dict[int, Sample]:
    """Return for each call what the engine drew for it, having checked that they are the same to the last bit."""
    by_mark = {sample.generation.logprobs.tobytes(): sample for sample in policy.samples}
    assert len(by_mark) == len(policy.samples)
    assert len(tree) == len(policy.samples)
    drawn = {}
    for call in tree:
        sample = by_mark.pop(call.logprobs.tobytes())
        assert call.token_ids.tobytes() == sample.generation.token_ids.tobytes()
        assert len(call.logprobs) == len(call.token_ids)
        assert tree.prompt(call.index).tobytes() == sample.prompt.tobytes()
        drawn[call.index] = sample
    return drawn


def _check_buckets(tree: PrefixTree, selection: Selection) -> None:
    counts = tree.buckets(selection)
    assert set(counts) == set(BUCKETS)
    assert sum(counts.values()) == tree.num_completion_tokens


def _check_rows(tree: PrefixTree, selection: Selection, drawn: dict[int, Sample]) -> None:
    """Every trained token is trained once, in the very context it was drawn in, with its own log-probability."""
    trained: set[int] = set()
    for row in tree.rows(selection):
        for index in np.unique(row.call_indices[row.loss_mask]).tolist():
            assert index not in trained
            trained.add(index)
            sample = drawn[index]
            start, end = len(sample.prompt), len(sample.prompt) + len(sample.generation.token_ids)
            assert row.loss_mask[start:end].all()
            assert np.flatnonzero(row.call_indices == index).tolist() == list(range(start, end))
            assert row.token_ids[:start].tobytes() == sample.prompt.tobytes()
            assert row.token_ids[start:end].tobytes() == sample.generation.token_ids.tobytes()
            assert row.logprobs[start:end].tobytes() == sample.generation.logprobs.tobytes()
    assert trained == {call.index for call in tree if selection.bucket(call) == "trained" and len(call.token_ids)}


def _check_paths(tree: PrefixTree, *, append_only: bool) -> None:
    """Along a kept path each prompt holds the replies before it by their ids.

    Of an append-only harness it is the whole history of the reply before it, and what is new.
    """
    for path in tree.trajectories():
        for parent, child in itertools.pairwise(path.calls):
            if tree[child].drift_reason is None:
                prompt = tree.prompt(child).tobytes()
                if append_only:
                    assert prompt.startswith(tree.history(parent).tobytes())
                else:
                    assert tree[parent].token_ids.tobytes() in prompt
