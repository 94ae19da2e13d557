"""From rollouts on, through whole updates: the step that forests take is the one that flat rows take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import pytest
import torch
from forest_fakes import (
    FAMILIES,
    VOCAB,
    Gradient,
    InFloat64,
    enable_checkpointing,
    make_forest_policy,
    worst,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import CountingEngine, Turn, make_rollout

from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection
from learners import tree_attention
from learners.advantages import Floats
from learners.grpo import TreeGRPO
from learners.policy_gradient import PolicyGradientLearner
from learners.ppo import TreePPO

PPO = MappingProxyType({"value_learning_rate": 1e-3, "gae_lambda": 0.9, "gamma": 0.95})
LEARNERS: Mapping[str, tuple[type[PolicyGradientLearner], Mapping[str, Any]]] = MappingProxyType(
    {
        "grpo": (TreeGRPO, {}),
        "ppo": (TreePPO, PPO),
        "ppo-trunk": (TreePPO, {**PPO, "value_trunk_gradient": True, "normalize_advantages": True}),
        "ppo-separate": (TreePPO, {**PPO, "critic": "separate"}),
    }
)


class Recording(CountingEngine):
    """Keeps the gradients of a critic, too."""

    learner: PolicyGradientLearner

    def update_weights(self, apply: Callable[[], None]) -> int:
        mine = {name: part.grad.clone() for name, part in critic_of(self.learner).items() if part.grad is not None}
        version = super().update_weights(apply)
        self.gradients[-1] |= mine
        return version


def critic_of(learner: PolicyGradientLearner) -> dict[str, torch.Tensor]:
    if not isinstance(learner, TreePPO):
        return {}
    return {f"critic.{name}": parameter for name, parameter in learner.critic.named_parameters()}


def make_learner(kind: str, *, family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    policy = make_forest_policy(family, dtype)
    engine: Any = Recording(policy)
    learner_type, own = LEARNERS[kind]
    learner = learner_type(policy, engine=engine, **{"max_grad_norm": math.inf, "packing": "forest", **own, **options})
    engine.learner = learner
    if isinstance(learner, TreePPO):
        torch.manual_seed(4)
        with torch.no_grad():
            learner.critic.head.weight.copy_(0.3 * torch.randn(16))
    return learner


def learn(rollouts: Sequence[Rollout], kind: str = "grpo", **options: Any) -> tuple[Gradient, dict[str, float]]:
    """One update from the same start: the gradient of its first step and the metrics."""
    learner = make_learner(kind, **options)
    metrics = learner.update(rollouts)
    return learner.engine().gradients[0], metrics


def parameters_after(rollouts: Sequence[Rollout], **options: Any) -> tuple[Gradient, Gradient]:
    """The gradient of the last step of an update, and all parameters after it."""
    learner = make_learner(**options)
    double = options["dtype"] == torch.float64
    if options["gradient_checkpointing"]:
        for module in (learner.policy.module, getattr(getattr(learner, "critic", None), "trunk", None)):
            if module is not None:
                enable_checkpointing(module)
    with InFloat64() if double else nullcontext():
        learner.update(rollouts)
    after = {**dict(learner.policy.module.named_parameters()), **critic_of(learner)}
    return learner.engine().gradients[-1], {name: part.detach() for name, part in after.items()}


@st.composite
def batches(draw: st.DrawFn) -> list[Rollout]:
    """Rollouts of two groups with trees up to 6 calls deep and 8 wide, each group with one of them sampled twice."""
    tokens = st.lists(st.integers(0, 3), max_size=3)

    def turn(delta: Sequence[int], reply: Sequence[int], **options: Any) -> Turn:
        return Turn(delta, reply, logprobs=[-3.0] * len(reply), **options)

    rollouts: list[Rollout] = []
    for group in ("g", "h"):
        prompt = [VOCAB - 1, *draw(tokens)]
        trees: list[list[Turn]] = []
        for index in range(draw(st.integers(2, 3))):
            # Never the same first token: gradients of equal trees with opposite advantages would cancel out.
            turns, depths = [turn(prompt, [4 + index, *draw(tokens)])], [1]
            for _ in range(draw(st.integers(0, 7))):
                parent = draw(st.sampled_from([place for place, depth in enumerate(depths) if depth < 6]))
                reply = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
                turns.append(
                    turn(draw(tokens), reply, parent=parent, state=draw(st.sampled_from(["live", "live", "dead"])))
                )
                depths.append(depths[parent] + 1)
            trees.append(turns)
        rewards = [draw(st.sampled_from([0.0, 0.2, 0.5, 1.0])) for _ in trees]
        for index, (tree, reward) in enumerate(zip([*trees, trees[0]], [*rewards, abs(rewards[0] - 0.3)], strict=True)):
            rollouts.append(make_rollout(tree, reward, group=group, index=index))
    return rollouts


PROMPT = [1, 2, 3, 1, 2, 3]
GOOD = [Turn(PROMPT, [4, 5]), Turn([6], [7, 8], parent=0)]
BAD = [Turn(PROMPT, [4, 9]), Turn([6, 6], [10, 11, 12], parent=0)]


def group(good: Sequence[Turn] = GOOD, bad: Sequence[Turn] = BAD, name: str = "g", **options: Any) -> list[Rollout]:
    return [
        make_rollout(good, 1.0, group=name, **options),
        make_rollout(bad, 0.0, index=1, group=name, **options),
        make_rollout(good, 0.25, index=2, group=name, **options),
    ]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("kind", LEARNERS)
@settings(max_examples=2)
@given(rollouts=batches(), max_tokens=st.sampled_from([12, 10_000]))
def test_updates_on_random_trees_are_those_of_flat_rows(
    kind: str, steps: int, checkpointing: bool, rollouts: list[Rollout], max_tokens: int
) -> None:
    shared = {
        "kind": kind,
        "updates_per_batch": steps,
        "gradient_checkpointing": checkpointing,
        "selection": Selection(dead="train"),
        "learning_rate": 1e-4,
    }
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        flat, flat_after = parameters_after(rollouts, dtype=dtype, packing="flat", micro_batch_tokens=64, **shared)
        for kernel in ("segment", "dense"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tree_attention, "_best_kernel", lambda device, dtype, kernel=kernel: kernel)
                mine, after = parameters_after(rollouts, dtype=dtype, micro_batch_tokens=max_tokens, **shared)
            assert worst(mine, flat, relative_to_all=dtype == torch.float32) <= bound
            assert worst(after, flat_after, relative_to_all=True) <= bound


@pytest.mark.parametrize("kind", LEARNERS)
def test_rollouts_of_the_same_ids_keep_their_rewards_apart(kind: str) -> None:
    def update(rewards: Sequence[float], packing: str) -> Gradient:
        alike = [make_rollout(GOOD, reward, index=index) for index, reward in enumerate(rewards)]
        how = {"dtype": torch.float64, "packing": packing, "gradient_checkpointing": False}
        return parameters_after([*alike, make_rollout(BAD, 0.0, index=2)], kind=kind, **how)[0]

    forest = update([1.0, 0.2], "forest")
    assert worst(forest, update([1.0, 0.2], "flat"), relative_to_all=False) <= 1e-9
    assert worst(update([1.0, 0.8], "forest"), forest, relative_to_all=True) > 1e-3


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"updates_per_batch": 2}, {"kl_coef": 0.1}])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_is_the_same_with_either_packing(family: str, settings: dict[str, Any]) -> None:
    flat, flat_metrics = learn(group(), family=family, packing="flat", **settings)
    mine, metrics = learn(group(), family=family, **settings)
    assert worst(mine, flat, relative_to_all=True) <= 1e-4
    timeless = {name for name in flat_metrics if not name.startswith("time/")}
    assert {name: metrics[name] for name in timeless} == pytest.approx(
        {name: flat_metrics[name] for name in timeless}, rel=1e-3, abs=1e-5
    )
    assert metrics["forest/dedup_ratio"] > 2
    assert metrics["forest/planted"] == 1.0


def test_adapters_get_the_same_gradient_with_either_packing() -> None:
    torch.manual_seed(3)
    flat, _ = learn(group(), packing="flat", lora=2)
    torch.manual_seed(3)
    mine, _ = learn(group(), lora=2)
    assert flat.keys() == mine.keys()
    assert all("lora" in name for name in mine)
    assert worst(mine, flat, relative_to_all=True) <= 1e-4


@pytest.mark.parametrize("kind", LEARNERS)
def test_a_duplicated_branch_changes_nothing(kind: str) -> None:
    plain, _ = learn(group(), kind)
    retried, metrics = learn(group(good=[*GOOD, Turn([6], [7, 8], parent=0, state="retry")]), kind)
    assert worst(retried, plain, relative_to_all=True) <= 1e-6
    assert metrics["tokens/trained"] == 4 + 5 + 4


@pytest.mark.parametrize("kind", LEARNERS)
def test_an_auxiliary_sub_agent_changes_nothing(kind: str) -> None:
    side = [Turn([2, 1], [14, 15], kind="subagent"), Turn([3], [14], parent=2, kind="auxiliary")]
    plain, before = learn(group(), kind)
    helped, after = learn(group(good=[*GOOD, *side]), kind, selection=Selection(subagent="context"))
    assert worst(helped, plain, relative_to_all=True) <= 1e-6
    assert after["tokens/sampled"] > before["tokens/sampled"]


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("kind", LEARNERS)
def test_the_order_of_arrival_changes_nothing(kind: str, order: list[int]) -> None:
    rollouts = group()
    plain, _ = learn(rollouts, kind)
    permuted, _ = learn([rollouts[i] for i in order], kind)
    assert worst(permuted, plain, relative_to_all=True) <= 1e-6


@pytest.mark.parametrize("max_tokens", [1, 12, 20])
@pytest.mark.parametrize("kind", LEARNERS)
def test_the_token_budget_changes_nothing(kind: str, max_tokens: int) -> None:
    whole, _ = learn(group(), kind, micro_batch_tokens=1000)
    cut, _ = learn(group(), kind, micro_batch_tokens=max_tokens)
    assert worst(cut, whole, relative_to_all=True) <= 1e-6


class KeepsAdvantages(TreeGRPO):
    """Keeps the advantages it gave."""

    seen: Floats

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        self.seen = super().advantages(rollouts)
        return self.seen


def test_rewards_through_one_harness_leave_advantages_through_another_alone() -> None:
    def advantages(reward: float) -> Floats:
        policy = make_forest_policy()
        engine: Any = CountingEngine(policy)
        learner: PolicyGradientLearner = KeepsAdvantages(policy, engine=engine)
        first = [make_rollout(GOOD, value, index=i, harness="pi") for i, value in enumerate((reward, 0.0, 0.5))]
        second = [make_rollout(BAD, value, index=i, harness="codex") for i, value in enumerate((1.0, 0.0, 0.2))]
        learner.update([*first, *second])
        assert isinstance(learner, KeepsAdvantages)
        return learner.seen

    before, after = advantages(1.0), advantages(0.1)
    assert (before[:3] != after[:3]).any()
    assert (before[3:] == after[3:]).all()
