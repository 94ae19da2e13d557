"""What a prompt is known to share by the way it was made is what a comparison of all tokens finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from test_accounting import deeds, rollout

from clawgym_env.trace.builder import RELATIVES
from clawgym_env.trace.prefix_tree import PrefixTree


def shared_by_comparison(tree: PrefixTree, index: int) -> int:
    """Compare a prompt with every token of its parent and its latest siblings."""
    prompt, parent = tree.prompt(index), tree[index].lineage_parent
    siblings = [call.index for call in tree.calls[:index] if call.lineage_parent == parent][-RELATIVES:]
    longest = 0
    for other in siblings if parent is None else [*siblings, parent]:
        history = tree.history(other)
        length = min(len(history), len(prompt))
        different = np.flatnonzero(history[:length] != prompt[:length])
        shared = int(different[0]) if len(different) else length
        longest = max(longest, shared if shared == len(history) else min(shared, tree[other].prompt_len))
    return longest


@settings(max_examples=100)
@given(deeds)
def test_a_prompt_shares_all_it_can_with_its_relatives(doings: list[str]) -> None:
    tree = rollout(doings)
    for call in tree:
        assert call.prefix_len == shared_by_comparison(tree, call.index)
