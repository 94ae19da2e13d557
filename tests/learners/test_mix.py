"""One policy, several harnesses: what keeps them apart, and what is told of each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout

from clawgym_env.rollout import Rollout
from learners.grpo import TreeGRPO
from learners.mix import harness_metrics

PLAIN = [Turn(delta=[1, 2, 3], reply=[4, 5])]


def learner() -> TreeGRPO:
    policy = make_policy()
    engine: Any = CountingEngine(policy)
    return TreeGRPO(policy, engine=engine)


def batch(first: list[float], second: list[float]) -> list[Rollout]:
    """Return the groups of one task with two harnesses."""
    return [
        make_rollout(PLAIN, reward, group="g", index=index, harness=harness)
        for harness, rewards in (("mini", first), ("pi", second))
        for index, reward in enumerate(rewards)
    ]


REWARDS = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3)


@given(first=REWARDS, second=REWARDS, other=REWARDS)
def test_rewards_of_one_pair_never_move_advantages_of_another(
    first: list[float], second: list[float], other: list[float]
) -> None:
    trainer = learner()
    before, after = trainer.advantages(batch(first, second)), trainer.advantages(batch(first, other))
    assert np.array_equal(before[:3], after[:3])
    assert np.array_equal(trainer.advantages(batch(second, other))[:3], before[3:])


def test_a_failed_group_of_one_harness_moves_nothing_of_the_other() -> None:
    trainer = learner()
    whole = trainer.advantages(batch([0.0, 1.0], [0.5, 1.0]))
    assert np.array_equal(trainer.advantages(batch([0.0, 1.0], [])), whole[:2])


def test_each_harness_has_metrics_of_its_own() -> None:
    branched = [
        Turn(delta=[1, 2], reply=[3, 4, 5], state="dead"),
        Turn(delta=[1, 2], reply=[3]),
        Turn(delta=[6], reply=[7, 8], parent=1),
        Turn(delta=[9], reply=[9], kind="compaction"),
    ]
    rollouts = [
        make_rollout(branched, 0.5, harness="pi"),
        make_rollout(PLAIN, None, harness="pi", index=1),
        make_rollout(PLAIN, 1.0, harness="mini"),
    ]
    metrics = harness_metrics(rollouts, [rollouts[0], rollouts[2]])
    assert {name: value for name, value in metrics.items() if name.startswith("harness/pi/")} == {
        "harness/pi/rollouts": 2.0,
        "harness/pi/reward": 0.5,
        "harness/pi/turns": 2.0,
        "harness/pi/leaves": 1.5,
        "harness/pi/tokens": 4.5,
        "harness/pi/dead_fraction": pytest.approx(3 / 9),
        "harness/pi/excluded_fraction": 0.5,
    }
    assert metrics["harness/mini/reward"] == 1.0
    assert metrics["harness/mini/excluded_fraction"] == 0.0


def test_a_harness_without_any_grade_has_no_reward() -> None:
    metrics = harness_metrics([make_rollout([], None, harness="pi")], [])
    assert metrics["harness/pi/excluded_fraction"] == 1.0
    assert metrics["harness/pi/dead_fraction"] == 0.0
    assert "harness/pi/reward" not in metrics


def test_an_update_tells_of_every_harness() -> None:
    metrics = learner().update(batch([0.0, 1.0], [0.5, 0.5]))
    assert metrics["harness/mini/reward"] == metrics["harness/pi/reward"] == metrics["reward/mean"] == 0.5
    assert metrics["groups/total"] == 2.0
    assert metrics["groups/zero_variance"] == 0.5
