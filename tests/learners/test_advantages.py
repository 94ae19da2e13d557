import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import Turn, make_rollout

from learners.advantages import group_key, group_metrics, group_relative, leave_one_out, whitened

REWARDS = st.lists(st.floats(0, 1), min_size=1, max_size=8)


def test_advantage_uses_the_population_deviation() -> None:
    advantages = group_relative(np.array([0.0, 0.0, 1.0, 1.0]), ["g"] * 4, epsilon=0.0)
    assert advantages.tolist() == [-1.0, -1.0, 1.0, 1.0]


def test_epsilon_is_added_to_the_deviation() -> None:
    advantages = group_relative(np.array([0.0, 1.0]), ["g", "g"], epsilon=0.5)
    assert advantages.tolist() == [-0.5, 0.5]


def test_groups_may_be_interleaved() -> None:
    advantages = group_relative(np.array([0.0, 0.2, 1.0, 0.4]), ["a", "b", "a", "b"], epsilon=0.0)
    assert advantages == pytest.approx([-1.0, -1.0, 1.0, 1.0])


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_relative(np.array([0.7]), ["g"]).tolist() == [0.0]


def test_equal_rewards_give_exactly_zero_whatever_their_mean_rounds_to() -> None:
    rewards = np.full(7, 0.1)
    assert rewards.mean() != 0.1
    assert group_relative(rewards, ["g"] * 7).tolist() == [0.0] * 7


@given(first=REWARDS, second=REWARDS, other=REWARDS)
def test_rewards_of_one_group_do_not_move_the_advantages_of_another(
    first: list[float], second: list[float], other: list[float]
) -> None:
    def advantages_of_a(b: list[float]) -> list[float]:
        keys = ["a"] * len(first) + ["b"] * len(b)
        return group_relative(np.array(first + b), keys).tolist()[: len(first)]

    assert advantages_of_a(second) == advantages_of_a(other)


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero(rewards: list[float]) -> None:
    assert group_relative(np.array(rewards), ["g"] * len(rewards)).sum() == pytest.approx(0.0, abs=1e-6)


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    advantages = leave_one_out(np.array([0.0, 0.7, 1.0, 0.5]), ["a", "b", "a", "a"])
    assert advantages == pytest.approx([0.0 - 0.75, 0.0, 1.0 - 0.25, 0.5 - 0.5])


@given(REWARDS, st.integers(0, 7), st.floats(0, 1))
def test_no_reward_is_in_its_own_leave_one_out_baseline(rewards: list[float], place: int, other: float) -> None:
    place %= len(rewards)
    changed = [*rewards[:place], other, *rewards[place + 1 :]]
    before, after = (leave_one_out(np.array(values), ["g"] * len(values))[place] for values in (rewards, changed))
    expected = 0.0 if len(rewards) == 1 else other - rewards[place]
    assert after - before == pytest.approx(expected, abs=1e-9)


def test_whitening_is_under_the_weights_of_the_loss() -> None:
    advantages, weights = np.array([1.0, 2.0, 5.0]), np.array([0.5, 0.25, 0.25])
    white = whitened(advantages, weights)
    assert weights @ white == pytest.approx(0.0)
    assert weights @ white**2 == pytest.approx(1.0)
    assert np.diff(white) == pytest.approx(
        np.diff(advantages) / np.sqrt(0.5 * 1.25**2 + 0.25 * 0.25**2 + 0.25 * 2.75**2)
    )
    assert whitened(np.full(3, 0.1), weights).tolist() == [0.0] * 3
    assert whitened(np.empty(0), np.empty(0)).tolist() == []


def test_whitening_leaves_a_critics_errors_small_where_rewards_are_equal() -> None:
    errors, weights = 0.03 * np.array([1.0, -1.0, 1.0, -1.0]), np.full(4, 0.25)
    assert np.abs(whitened(errors, weights, floor=0.0)) == pytest.approx(1.0)
    assert np.abs(whitened(errors, weights)) == pytest.approx(0.15)


def test_one_failure_among_many_is_not_made_louder_than_it_is_worth() -> None:
    rewards, weights = np.array([0.0] + [1.0] * 99), np.full(100, 0.01)
    assert whitened(rewards, weights, floor=0.0)[0] == pytest.approx(-0.99 / np.sqrt(0.01 * 0.99))  # nearly 10
    assert whitened(rewards, weights)[0] == pytest.approx(-0.99 / 0.2)
    half = np.array([0.0, 1.0] * 50)
    assert (whitened(half, weights) == whitened(half, weights, floor=0.0)).all()


def test_metrics_count_groups_that_teach_nothing() -> None:
    metrics = group_metrics(np.array([0.0, 1.0, 0.5, 0.5, 0.3]), ["a", "a", "b", "b", "c"])
    assert metrics == {
        "groups/total": 3.0,
        "groups/zero_variance": pytest.approx(2 / 3),
        "groups/singleton": pytest.approx(1 / 3),
    }


def test_one_task_through_two_harnesses_is_two_groups() -> None:
    turns = [Turn([1], [2])]
    assert group_key(make_rollout(turns, 1.0, harness="pi")) != group_key(make_rollout(turns, 1.0, harness="mini"))
