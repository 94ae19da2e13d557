"""Every test compares a forest with flat rows: what they share is the packing's only difference.

`test_forest_learners` does the same from rollouts on, through whole updates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from forest_fakes import FAMILIES, Gradient, InFloat64, enable_checkpointing, make_model, make_row, tries, worst
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

from learners import forward
from learners.forest import plant
from learners.forward import logprobs_of, token_logprobs, trained_hidden
from learners.losses import clipped_policy_loss
from learners.rows import MicroBatch, TrainingRow, nothing, pack
from learners.tree_attention import Kernel

SAMPLED_ALIKE = [make_row([1, 2, 3, 4, 5], [2, 3, 4], rollout=index) for index in range(2)]
"""Two rollouts of the same ids, with other rewards, temperatures, log-probabilities and weights."""

ROWS = [
    *SAMPLED_ALIKE,
    make_row([1, 2, 3, 4, 6, 7], [2, 3, 5], rollout=2),
    make_row([1, 2, 3, 8], [3], rollout=3),
    make_row([1, 2], [1], rollout=4),
    make_row([9, 9, 9], [1, 2], rollout=1),
]


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


MODELS = {
    (family, dtype): ActorCritic(make_model(family, dtype))
    for family in FAMILIES
    for dtype in (torch.float64, torch.float32)
}


@pytest.mark.parametrize("kernel", ["segment", "dense"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=5)
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
