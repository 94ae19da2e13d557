from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.evaluation.statistics import attempt_counts, bootstrap_interval, expected_best

SCORES = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=7)


def test_the_interval_of_a_coin_is_that_of_the_binomial() -> None:
    """Resampling 50 zeros and 50 ones draws from Binomial(100, 1/2), whose 2.5 and 97.5 % quantiles are 40 and 60."""
    low, high = bootstrap_interval([0.0, 1.0] * 50, seed=0)
    assert (low, high) == pytest.approx((0.40, 0.60), abs=0.011)


def test_a_wider_level_gives_a_wider_interval() -> None:
    values = np.linspace(0.0, 1.0, 30).tolist()
    narrow, wide = (bootstrap_interval(values, seed=1, level=level) for level in (0.5, 0.95))
    assert wide[0] < narrow[0] < np.mean(values) < narrow[1] < wide[1]


def test_the_interval_depends_on_values_and_seed_alone() -> None:
    values = np.random.default_rng(0).random(40).tolist()
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


def test_equal_values_have_no_width_and_none_at_all_are_refused() -> None:
    assert bootstrap_interval([0.25] * 9, seed=0) == (0.25, 0.25)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap_interval([], seed=0)


@given(SCORES, st.integers(1, 7))
def test_the_expected_best_is_the_mean_over_all_choices(scores: list[float], k: int) -> None:
    if k > len(scores):
        with pytest.raises(ValueError, match=f"between 1 and {len(scores)}"):
            expected_best(scores, k)
        return
    choices = [max(chosen) for chosen in itertools.combinations(scores, k)]
    assert expected_best(scores, k) == pytest.approx(sum(choices) / len(choices))


def test_on_zeros_and_ones_it_is_the_unbiased_pass_at_k() -> None:
    n, passed, k = 10, 3, 4
    scores = [1.0] * passed + [0.0] * (n - passed)
    assert expected_best(scores, k) == pytest.approx(1.0 - math.comb(n - passed, k) / math.comb(n, k))


@pytest.mark.parametrize(("attempts", "shown"), [(1, ()), (2, (2,)), (3, (2, 3)), (8, (2, 4, 8)), (10, (2, 4, 8, 10))])
def test_powers_of_two_and_all_attempts_are_shown(attempts: int, shown: tuple[int, ...]) -> None:
    assert attempt_counts(attempts) == shown
