from __future__ import annotations

from collections import Counter

import pytest
from env_fakes import SOUND_TASKS, Other
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.envs.sampler import Draw, GroupSampler
from clawgym_env.tasks.task import Task, TaskSet, Turn
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


class Wordless(InProcessHarness):
    """Cannot go on with a session."""

    name = "wordless"
    supports_resume = False


LONG = Task(id="long", instruction="Say ten", turns=(Turn(text="and on", new_session=False),))


def pairs(sampler: GroupSampler, count: int) -> Counter[tuple[str, int]]:
    return Counter((draw.task.id, draw.harness) for draw in (sampler.draw() for _ in range(count)))


@given(
    seed=st.integers(0, 2**31),
    weights=st.lists(st.floats(0.05, 20.0), min_size=2, max_size=2),
    position=st.integers(0, 60),
)
def test_pairs_come_by_weight_and_any_position_can_be_gone_on_from(
    seed: int, weights: list[float], position: int
) -> None:
    sampler = GroupSampler(SOUND_TASKS, HARNESSES, weights=weights)
    sampler.reseed(seed)
    drawn = [sampler.draw() for _ in range(80)]
    for count in (40, 80):
        seen = Counter((draw.task.id, draw.harness) for draw in drawn[:count])
        epochs = max(seen.values())
        for harness, weight in enumerate(weights):
            for task in SOUND_TASKS:
                # Whole epochs before this one, and this one may be half done.
                assert abs(seen[task.id, harness] - epochs * weight / max(weights)) <= 2
    resumed = GroupSampler(SOUND_TASKS, HARNESSES, weights=weights)
    resumed.reseed(seed)
    resumed.position = position
    assert resumed.draw() == drawn[position]
    sampler.position = position  # back, too
    assert sampler.draw() == drawn[position]


def test_an_epoch_of_unequal_weights_holds_a_share_of_the_lighter_pairs_in_turn() -> None:
    sampler = GroupSampler(SOUND_TASKS, HARNESSES, weights=[0.5, 1.0])
    sampler.reseed(3)
    first, second = pairs(sampler, 6), pairs(sampler, 6)
    assert sum(count for (_, harness), count in first.items() if harness == 0) == 2
    assert set((first + second).values()) == {1, 2}
    assert all((first + second)[task.id, 0] == 1 for task in SOUND_TASKS)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="Expected a positive weight for each of 2 harnesses"):
        GroupSampler(SOUND_TASKS, HARNESSES, weights=weights)


def test_a_pair_that_cannot_be_is_never_drawn_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    tasks = TaskSet.of([*SOUND_TASKS, LONG, LONG.model_copy(update={"id": "longer", "instruction": "Say more"})])
    sampler = GroupSampler(tasks, [Wordless(), InProcessHarness()])
    sampler.reseed(0)
    seen = pairs(sampler, 40)
    assert {harness for (task, harness) in seen if task.startswith("long")} == {1}
    assert {harness for (task, harness) in seen if not task.startswith("long")} == {0, 1}
    [record] = caplog.records
    assert "not drawn with wordless" in record.message
    assert "Expected a harness that can go on with its session" in record.message
    # Asked for by name, the task finds the harness that can, whatever the turn.
    assert {sampler.draw("long").harness for _ in range(6)} == {1}


def test_passing_over_a_pair_keeps_positions() -> None:
    tasks = TaskSet.of([*SOUND_TASKS, LONG])
    drawn: dict[int, Draw] = {}
    sampler = GroupSampler(tasks, [Wordless(), InProcessHarness()])
    sampler.reseed(0)
    for _ in range(25):
        start = sampler.position
        drawn[start] = sampler.draw()
    assert sampler.position > 25
    for start, draw in drawn.items():
        resumed = GroupSampler(tasks, [Wordless(), InProcessHarness()])
        resumed.reseed(0)
        resumed.position = start
        assert resumed.draw() == draw


def test_a_task_that_no_harness_can_do_is_drawn_so_that_its_step_says_why(caplog: pytest.LogCaptureFixture) -> None:
    sampler = GroupSampler([LONG], [Wordless()])
    sampler.reseed(0)
    assert sampler.draw().task is LONG
    assert sampler.draw("long").task is LONG
    assert not caplog.records
