from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import Turn, make_tree

from clawgym_env.trace.prefix_tree import PrefixTree
from learners.gae import gae, trained_trajectories, tree_gae

VALUES = st.lists(st.floats(-1, 1), min_size=1, max_size=12)


def calls_of(*indices: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(indices, dtype=np.int32)


def test_advantages_by_hand() -> None:
    # δ = (0.9 * 0.4 - 0.2, 0.9 * 0.6 - 0.4, 1 - 0.6) = (0.16, 0.14, 0.4), each step back discounted by 0.45.
    advantages = gae(np.array([0.2, 0.4, 0.6]), 1.0, gamma=0.9, gae_lambda=0.5)
    assert advantages.tolist() == pytest.approx([0.16 + 0.45 * (0.14 + 0.45 * 0.4), 0.14 + 0.45 * 0.4, 0.4])


@given(VALUES, st.floats(0, 1))
def test_without_discounts_the_advantage_is_reward_minus_value(values: list[float], reward: float) -> None:
    advantages = gae(np.array(values), reward, gamma=1.0, gae_lambda=1.0)
    assert advantages == pytest.approx(reward - np.array(values))


@given(VALUES, st.floats(0, 1))
def test_with_lambda_zero_only_the_next_value_counts(values: list[float], reward: float) -> None:
    advantages = gae(np.array(values), reward, gamma=0.9, gae_lambda=0.0)
    assert advantages == pytest.approx(np.array([*(0.9 * v for v in values[1:]), reward]) - np.array(values))


FORK = [Turn([1], [2, 3]), Turn([4], [5], parent=0), Turn([6], [7, 8], parent=0)]
"""Call 0 with two tokens, then two branches of one and two tokens."""
FORK_CALLS = calls_of(0, 0, 1, 2, 2)


def test_a_shared_token_takes_the_mean_over_the_trajectories_through_it() -> None:
    trajectories = trained_trajectories(make_tree(FORK), FORK_CALLS)
    assert trajectories == [(0, 1), (0, 2)]
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.5])
    settings = {"gamma": 0.9, "gae_lambda": 0.8}
    short = gae(values[[0, 1, 2]], 1.0, **settings)
    long = gae(values[[0, 1, 3, 4]], 1.0, **settings)
    expected = [(short[0] + long[0]) / 2, (short[1] + long[1]) / 2, short[2], long[2], long[3]]
    advantages = tree_gae(values, 1.0, FORK_CALLS, trajectories, **settings)
    assert advantages.tolist() == pytest.approx(expected)
    assert short[0] != pytest.approx(long[0])  # else this would show nothing


@given(
    st.lists(st.floats(-1, 1), min_size=5, max_size=5),
    st.floats(-1, 1),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
def test_no_signal_crosses_from_one_branch_into_another(
    values: list[float], other: float, gamma: float, gae_lambda: float
) -> None:
    def advantages(first_branch: float) -> list[float]:
        changed = np.array([*values[:2], first_branch, *values[3:]])
        trajectories = trained_trajectories(make_tree(FORK), FORK_CALLS)
        return tree_gae(changed, 1.0, FORK_CALLS, trajectories, gamma=gamma, gae_lambda=gae_lambda).tolist()

    assert advantages(values[2])[3:] == advantages(other)[3:]


@given(st.lists(st.floats(-1, 1), min_size=5, max_size=5), st.floats(0, 1))
def test_without_discounts_a_fork_changes_nothing(values: list[float], reward: float) -> None:
    trajectories = trained_trajectories(make_tree(FORK), FORK_CALLS)
    advantages = tree_gae(np.array(values), reward, FORK_CALLS, trajectories, gamma=1.0, gae_lambda=1.0)
    assert advantages == pytest.approx(reward - np.array(values))


def test_tokens_may_come_in_any_order_of_their_calls() -> None:
    values = np.array([0.3, 0.4, 0.5, 0.1, 0.2])
    shuffled = calls_of(1, 2, 2, 0, 0)
    trajectories = trained_trajectories(make_tree(FORK), shuffled)
    settings = {"gamma": 0.9, "gae_lambda": 0.8}
    plain = tree_gae(values[[3, 4, 0, 1, 2]], 1.0, FORK_CALLS, trajectories, **settings)
    assert tree_gae(values, 1.0, shuffled, trajectories, **settings).tolist() == plain[[2, 3, 4, 0, 1]].tolist()


def test_calls_that_train_nothing_neither_end_nor_double_a_trajectory() -> None:
    side = [Turn([9], [9], parent=1, kind="subagent"), Turn([9], [9], parent=0, kind="compaction")]
    tree = make_tree([*FORK[:2], *side, Turn([4], [5], parent=3)])
    assert trained_trajectories(tree, calls_of(0, 0, 1, 4)) == [(0, 1), (0, 4)]
    assert trained_trajectories(tree, calls_of(0, 1)) == [(0, 1)]


def test_a_trajectory_goes_on_where_the_harness_rendered_its_prompt_anew() -> None:
    first, second = make_tree(FORK[:2])
    anew = dataclasses.replace(second, prefix_parent=None, prefix_len=0)
    assert trained_trajectories(PrefixTree([first, anew]), calls_of(0, 0, 1)) == [(0, 1)]
