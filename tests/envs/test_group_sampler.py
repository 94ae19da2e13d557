from __future__ import annotations

from collections import Counter

import pytest
from env_fakes import SOUND_TASKS, Other
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.envs.sampler import Draw, GroupSampler
from clawgym_env.testing import InProcessHarness

HARNESSES = [InProcessHarness(), Other()]


def draws(seed: int, count: int) -> list[Draw]:
    sampler = GroupSampler(SOUND_TASKS, HARNESSES)
    sampler.reseed(seed)
    return [sampler.draw() for _ in range(count)]


@given(st.integers(0, 2**31), st.integers(0, 40))
def test_going_on_from_a_position_gives_what_an_uninterrupted_run_draws(seed: int, position: int) -> None:
    sampler = GroupSampler(SOUND_TASKS, HARNESSES)
    sampler.reseed(seed)
    sampler.position = position
    assert sampler.draw() == draws(seed, position + 1)[-1]


@given(st.integers(0, 2**31))
def test_every_epoch_holds_every_pair_once(seed: int) -> None:
    drawn = draws(seed, 24)
    for epoch in range(3):
        pairs = Counter((draw.task.id, draw.harness) for draw in drawn[8 * epoch : 8 * epoch + 8])
        assert set(pairs.values()) == {1}
        assert len(pairs) == 8


def test_epochs_are_shuffled_anew() -> None:
    drawn = [(draw.task.id, draw.harness) for draw in draws(0, 16)]
    assert drawn[:8] != drawn[8:]


@given(st.integers(0, 2**31))
def test_rollout_seeds_differ_within_and_across_groups(seed: int) -> None:
    seeds = [draw.rollout_seed(index) for draw in draws(seed, 10) for index in range(8)]
    assert len(set(seeds)) == 80
    assert all(0 <= one < 2**48 for one in seeds)


def test_an_unseeded_or_empty_sampler_is_refused() -> None:
    with pytest.raises(RuntimeError, match="reseed"):
        GroupSampler(SOUND_TASKS, HARNESSES).draw()
    with pytest.raises(ValueError, match="got 0 and 2"):
        GroupSampler([], HARNESSES)
