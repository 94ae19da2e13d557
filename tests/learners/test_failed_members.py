"""A group stays well defined whichever of its members fail."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout

from clawgym_env.rollout import Rollout
from learners.grpo import TreeGRPO

START = Turn([1, 2], [3, 4])
BRANCHES = [START, *(Turn([6], [7], parent=0, state="dead") for _ in range(17))]

MEMBERS: Mapping[str, Callable[[int], Rollout]] = {
    "good": lambda index: make_rollout([START], 1.0, index=index),
    "bad": lambda index: make_rollout([Turn([1, 2], [9])], 0.0, index=index),
    "ungraded": lambda index: make_rollout([Turn([1, 2], [10, 11])], None, index=index),
    "stale": lambda index: make_rollout([Turn([1, 2], [12, 13])], 1.0, index=index, exclusion="stale"),
    "over_branched": lambda index: make_rollout(BRANCHES, 1.0, index=index),
    "silent": lambda index: make_rollout([], 0.5, index=index),
}
SURVIVE = {"good", "bad"}


def gradient_of(kinds: tuple[str, ...], **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    policy = make_policy()
    engine: Any = CountingEngine(policy)
    metrics = TreeGRPO(policy, engine=engine, max_grad_norm=math.inf, **settings).update(
        [MEMBERS[kind](index) for index, kind in enumerate(kinds)]
    )
    return (engine.gradients[0] if engine.gradients else {}), metrics


@pytest.mark.parametrize("loss_weight", ["rollout", "token", "group"])
def test_members_that_fail_move_nothing_and_no_number_is_nan(loss_weight: str) -> None:
    alone = {
        kinds: gradient_of(kinds, loss_weight=loss_weight)[0]
        for size in range(4)
        for kinds in itertools.combinations_with_replacement(sorted(SURVIVE), size)
    }
    for kinds in itertools.combinations_with_replacement(MEMBERS, 3):
        gradient, metrics = gradient_of(kinds, loss_weight=loss_weight)
        survivors = tuple(sorted(kind for kind in kinds if kind in SURVIVE))
        assert all(math.isfinite(value) for value in metrics.values()), kinds
        assert metrics["rollouts/excluded"] == len(kinds) - len(survivors), kinds
        assert metrics["groups/total"] == float(bool(survivors)), kinds
        assert metrics["groups/singleton"] == float(len(survivors) == 1), kinds
        assert bool(gradient) == (len(set(survivors)) > 1), kinds
        for name, expected in alone[survivors].items():
            torch.testing.assert_close(gradient[name], expected, rtol=1e-4, atol=1e-6, msg=f"{kinds} {name}")
