from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learners.callbacks import without_progress
from learners.schedules import constant, cosine, linear_warmup


def test_a_warm_up_rises_evenly_to_what_comes_after() -> None:
    assert [linear_warmup(4)(update) for update in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert linear_warmup(0)(1) == constant(1) == 1.0


@given(num_updates=st.integers(2, 500), floor=st.floats(0, 1))
def test_a_cosine_falls_from_one_to_its_floor_and_stays(num_updates: int, floor: float) -> None:
    factor = cosine(num_updates, floor=floor)
    values = [factor(update) for update in range(1, num_updates + 3)]
    assert values[0] == pytest.approx(1.0)
    assert values[num_updates - 1] == values[-1] == pytest.approx(floor)
    assert all(a >= b - 1e-12 for a, b in pairwise(values))


def test_both_together() -> None:
    assert linear_warmup(2, cosine(3))(1) == 0.5
    assert linear_warmup(2, cosine(3))(2) == pytest.approx(0.5)


@pytest.mark.parametrize("make", [lambda: cosine(0), lambda: cosine(3, floor=2.0), lambda: linear_warmup(-1)])
def test_a_schedule_that_cannot_be_is_refused(make: object) -> None:
    with pytest.raises(ValueError, match="Expected"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("values", "stops"),
    [([0.1], False), ([0.1, 0.2, 0.3], False), ([0.3, 0.2, 0.3], True), ([0.3, 0.2], False), ([0.1, 0.3, 0.2], False)],
)
def test_no_progress_is_patience_values_without_a_better_one(values: list[float], stops: bool) -> None:
    records = [record for value in values for record in ({"eval/reward": value}, {"reward/mean": 1.0})]
    assert without_progress("eval/reward", patience=2)(records) is stops
