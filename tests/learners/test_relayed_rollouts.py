"""Rollouts that an API model answered are refused by name wherever something could learn from them."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from learner_fakes import Turn, make_rollout

from clawgym_env.engine.base import ApiUsage
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import PrefixTree, Selection
from clawgym_env.trace.store import RolloutStore
from learners.export import trl_rows
from learners.grpo import TreeGRPO
from learners.registry import LEARNERS, make_learner
from learners.rows import trained_rows
from learners.sft import examples_of
from learners.testing import ScriptedPolicy, small_policy

GOOD = [Turn([1, 2], [12, 13])]


def relayed(rollout: Rollout, *, marked: bool = True) -> Rollout:
    """Return a rollout as if an API model had answered; unmarked is what a careless caller makes of it."""
    tree = PrefixTree([dataclasses.replace(call, api_usage=ApiUsage()) for call in rollout.tree])
    return dataclasses.replace(rollout, tree=tree, exclusion="relayed" if marked else None)


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_counts_them_and_leaves_them_out_of_statistics_and_loss(name: str, marked: bool) -> None:
    policy = small_policy()
    learner = make_learner(name, policy, engine=ScriptedPolicy(policy, ["x"]), learning_rate=0.01)
    before = {key: value.clone() for key, value in policy.module.state_dict().items()}
    api = [relayed(make_rollout(GOOD, reward, index=i), marked=marked) for i, reward in enumerate((0.0, 1.0))]
    metrics = learner.update([*api, make_rollout(GOOD, None, index=2)])
    assert metrics["rollouts/excluded_relayed"] == 2
    assert metrics["rollouts/excluded_ungraded"] == 1
    assert metrics["tokens/trained"] == 0
    assert all(value.equal(before[key]) for key, value in policy.module.state_dict().items())


def test_a_mixed_batch_trains_on_the_others_alone() -> None:
    def update(*others: Rollout) -> dict[str, float]:
        policy = small_policy()
        learner = TreeGRPO(policy, engine=ScriptedPolicy(policy, ["x"]), learning_rate=0.01)
        own = [make_rollout(GOOD, 0.0), make_rollout([Turn([1, 2], [14, 15])], 1.0, index=1)]
        return learner.update([*own, *others])

    alone, mixed = update(), update(relayed(make_rollout(GOOD, 0.0, index=2)))
    for name in ("loss/policy", "grad/norm", "tokens/trained", "groups/total"):
        assert mixed[name] == alone[name]


def test_what_reads_rows_directly_refuses_them_by_name() -> None:
    rollout = relayed(make_rollout(GOOD, 1.0), marked=False)
    with pytest.raises(ValueError, match=r"'g/0', which was relayed to 'fake'.*Leave out rollouts with exclusion"):
        trained_rows(rollout, Selection())
    with pytest.raises(ValueError, match="which was relayed"):
        examples_of([rollout])
    with pytest.raises(ValueError, match="which was relayed"):
        list(trl_rows([rollout]))
    assert list(trl_rows([relayed(make_rollout(GOOD, 1.0))])) == []
    assert rollout.tree.rows(Selection(dead="train")) == ()


def test_the_mark_is_kept_in_the_store_and_refused_from_there(tmp_path: Path) -> None:
    rollout = relayed(make_rollout(GOOD, 1.0))
    with RolloutStore(tmp_path) as store:
        asyncio.run(store.add_rollout(rollout))
        kept = store.load(rollout.id)
    assert (kept.exclusion, kept.tree.relayed, kept.tree) == ("relayed", True, rollout.tree)
    with pytest.raises(ValueError, match="which was relayed"):
        examples_of(tmp_path)
