"""Every test compares a forest with flat rows: what they share is the packing's only difference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from forest_fakes import FAMILIES, InFloat64, make_forest_policy, make_model, make_row, tries
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_fakes import CountingEngine, Turn, make_rollout
from torch import Tensor, nn
from transformers import PreTrainedModel

from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection
from learners import forward
from learners.advantages import Floats
from learners.forest import plant
from learners.forward import logprobs_of, token_logprobs, trained_hidden
from learners.grpo import TreeGRPO
from learners.losses import clipped_policy_loss
from learners.policy_gradient import PolicyGradientLearner
from learners.rows import MicroBatch, TrainingRow, nothing, pack
from learners.tree_attention import Kernel

Gradient = dict[str, Tensor]

SAMPLED_ALIKE = [make_row([1, 2, 3, 4, 5], [2, 3, 4], rollout=index) for index in range(2)]
"""Two rollouts of the same ids, with other rewards, temperatures, log-probabilities and weights."""

ROWS = [
    *SAMPLED_ALIKE,
    make_row([1, 2, 3, 4, 6, 7], [2, 3, 5], rollout=2),
    make_row([1, 2, 3, 8], [3], rollout=3),
    make_row([1, 2], [1], rollout=4),
    make_row([9, 9, 9], [1, 2], rollout=1),
]


def enable_checkpointing(module: Any) -> None:
    """Make a module compute activations twice, in training mode."""
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    # Backward runs outside of the modes that were on in the forward pass.
    modes = (InFloat64, InFloat64) if module.dtype == torch.float64 else (nullcontext, nullcontext)
    enable({"use_reentrant": False, "context_fn": lambda: (modes[0](), modes[1]())})


class ActorCritic(nn.Module):
    """A model with a value head on its trunk."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        self.module = module
        enable_checkpointing(module)
        torch.manual_seed(2)
        self.value = nn.Linear(module.config.hidden_size, 1).to(module.dtype)

    def loss(self, batch: MicroBatch) -> Tensor:
        """A clipped surrogate and a value loss that depend on everything that a term carries."""
        hidden = trained_hidden(self.module, batch)
        logprobs, _ = logprobs_of(self.module, hidden, batch)
        surrogate = clipped_policy_loss(
            logprobs, batch.rollout_logprobs, batch.advantages, clip_low=0.2, clip_high=0.28
        )
        values = self.value(hidden).squeeze(-1)
        return (batch.weights * (surrogate + (values - batch.advantages).square())).sum()


def gradient(actor: ActorCritic, batches: Sequence[MicroBatch]) -> Gradient:
    actor.zero_grad()
    for batch in batches:
        actor.loss(batch).backward()  # type: ignore[no-untyped-call]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in actor.named_parameters()}


def worst(mine: Gradient, theirs: Gradient, *, relative_to_all: bool) -> float:
    """The largest L2 difference of a parameter's gradient, relative to its own norm or that of all."""
    assert mine.keys() == theirs.keys()
    whole = math.sqrt(sum(float(part.square().sum()) for part in theirs.values()))
    assert whole > 1e-3
    differences = []
    for name, part in theirs.items():
        # A part that is all but zero has no direction to compare (keys' biases: softmax does not see them).
        own = max(float(part.norm()), 1e-6 * whole)
        differences.append(float((mine[name] - part).norm()) / (whole if relative_to_all else own))
    return max(differences)


MODELS = {
    (family, dtype): ActorCritic(make_model(family, dtype))
    for family in FAMILIES
    for dtype in (torch.float64, torch.float32)
}


@pytest.mark.parametrize("kernel", ["segment", "dense"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5, deadline=None)
@given(rows=tries(), max_tokens=st.sampled_from([10, 30, 10_000]))
def test_gradients_of_random_trees_are_those_of_flat_rows(
    family: str, checkpointed: bool, kernel: Kernel, rows: list[TrainingRow], max_tokens: int
) -> None:
    for dtype, bound in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        double = dtype == torch.float64
        actor = MODELS[family, dtype]
        actor.module.train(checkpointed)
        with InFloat64() if double else nullcontext():
            flat = gradient(actor, pack(rows, max_tokens=64))
            mine = gradient(actor, plant(rows, max_tokens=max_tokens, kernel=kernel))
        actor.module.eval()
        assert worst(mine, flat, relative_to_all=not double) <= bound


@pytest.mark.parametrize("kernel", ["segment", "dense"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_of_the_same_ids_keep_their_rewards_apart(family: str, kernel: Kernel) -> None:
    actor = MODELS[family, torch.float64]
    with InFloat64():
        (forest,) = plant(SAMPLED_ALIKE, max_tokens=100, kernel=kernel)
        assert forest.token_ids.numel() == 5
        both = gradient(actor, [forest])
        flat = gradient(actor, pack(SAMPLED_ALIKE, max_tokens=100))
        alone = [gradient(actor, pack([row], max_tokens=100)) for row in SAMPLED_ALIKE]
    assert worst(both, flat, relative_to_all=False) <= 1e-9
    added = {name: alone[0][name] + alone[1][name] for name in both}
    assert worst(both, added, relative_to_all=False) <= 1e-9
    assert worst({name: 2 * part for name, part in alone[0].items()}, both, relative_to_all=True) > 1e-3


def test_small_chunks_of_logits_do_not_change_a_forests_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = MODELS["llama", torch.float64]
    with InFloat64():
        whole = gradient(actor, plant(ROWS, max_tokens=100))
        monkeypatch.setattr(forward, "LOGITS", 32)
        chunked = gradient(actor, plant(ROWS, max_tokens=100))
    assert worst(chunked, whole, relative_to_all=False) <= 1e-9


def test_a_process_without_rows_takes_part_with_a_gradient_of_zero() -> None:
    actor = MODELS["llama", torch.float32]
    actor.zero_grad()
    batch = nothing()
    loss = actor.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0.0
    for name, parameter in actor.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


# From rollouts on, through a learner.


def learn(rollouts: Sequence[Rollout], **options: Any) -> tuple[Gradient, dict[str, float]]:
    """One GRPO update from the same start: the gradient of its step and the metrics."""
    policy = make_forest_policy(options.pop("family", "llama"))
    engine: Any = CountingEngine(policy)
    options = {"max_grad_norm": math.inf, "packing": "forest", **options}
    metrics = TreeGRPO(policy, engine=engine, **options).update(rollouts)
    return engine.gradients[0], metrics


PROMPT = [1, 2, 3, 1, 2, 3]
GOOD = [Turn(PROMPT, [4, 5]), Turn([6], [7, 8], parent=0)]
BAD = [Turn(PROMPT, [4, 9]), Turn([6, 6], [10, 11, 12], parent=0)]


def group(good: Sequence[Turn] = GOOD, bad: Sequence[Turn] = BAD, name: str = "g", **options: Any) -> list[Rollout]:
    return [
        make_rollout(good, 1.0, group=name, **options),
        make_rollout(bad, 0.0, index=1, group=name, **options),
        make_rollout(good, 0.25, index=2, group=name, **options),
    ]


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


def test_a_duplicated_branch_changes_nothing() -> None:
    plain, _ = learn(group())
    retried, metrics = learn(group(good=[*GOOD, Turn([6], [7, 8], parent=0, state="retry")]))
    assert worst(retried, plain, relative_to_all=True) <= 1e-6
    assert metrics["tokens/trained"] == 4 + 5 + 4


def test_an_auxiliary_sub_agent_changes_nothing() -> None:
    side = [Turn([2, 1], [14, 15], kind="subagent"), Turn([3], [14], parent=2, kind="auxiliary")]
    plain, before = learn(group())
    helped, after = learn(group(good=[*GOOD, *side]), selection=Selection(subagent="context"))
    assert worst(helped, plain, relative_to_all=True) <= 1e-6
    assert after["tokens/sampled"] > before["tokens/sampled"]


@pytest.mark.parametrize("order", [[2, 1, 0], [1, 2, 0]])
def test_the_order_of_arrival_changes_nothing(order: list[int]) -> None:
    rollouts = group()
    plain, _ = learn(rollouts)
    permuted, _ = learn([rollouts[i] for i in order])
    assert worst(permuted, plain, relative_to_all=True) <= 1e-6


@pytest.mark.parametrize("max_tokens", [1, 12, 20])
def test_the_token_budget_changes_nothing(max_tokens: int) -> None:
    whole, _ = learn(group(), micro_batch_tokens=1000)
    cut, _ = learn(group(), micro_batch_tokens=max_tokens)
    assert worst(cut, whole, relative_to_all=True) <= 1e-6


class Recording(TreeGRPO):
    """Keeps the advantages it gave."""

    seen: Floats

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        self.seen = super().advantages(rollouts)
        return self.seen


def test_rewards_through_one_harness_leave_advantages_through_another_alone() -> None:
    def advantages(reward: float) -> Floats:
        policy = make_forest_policy()
        engine: Any = CountingEngine(policy)
        learner: PolicyGradientLearner = Recording(policy, engine=engine)
        first = [make_rollout(GOOD, value, index=i, harness="pi") for i, value in enumerate((reward, 0.0, 0.5))]
        second = [make_rollout(BAD, value, index=i, harness="codex") for i, value in enumerate((1.0, 0.0, 0.2))]
        learner.update([*first, *second])
        assert isinstance(learner, Recording)
        return learner.seen

    before, after = advantages(1.0), advantages(0.1)
    assert (before[:3] != after[:3]).any()
    assert (before[3:] == after[3:]).all()


def test_logprobs_of_a_forest_are_those_of_flat_rows() -> None:
    module = make_model("qwen3", torch.float64)
    with InFloat64(), torch.no_grad():
        terms = []
        for batches in (plant(ROWS, max_tokens=100), pack(ROWS, max_tokens=100)):
            (batch,) = batches
            logprobs, entropies = token_logprobs(module, batch)
            columns = (batch.weights, batch.advantages, batch.targets, logprobs, entropies)
            terms.append(sorted(zip(*(column.tolist() for column in columns), strict=True)))
    for mine, theirs in zip(*terms, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)
