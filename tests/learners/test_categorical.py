from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from learners import categorical
from learners.categorical import logprobs_and_entropies


def example(*, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    logits = (4 * torch.randn(7, 11, dtype=torch.float64)).to(dtype).requires_grad_()
    return logits, torch.randint(11, (7,)), torch.linspace(0.5, 1.5, 7)


def by_autograd(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits / temperatures[:, None], dim=-1)
    return logprobs.gather(-1, targets[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(dim=-1)


@pytest.mark.parametrize("block", [1, 22, 1000], ids=["a row", "two rows", "whole"])
@pytest.mark.parametrize("use", [(1.0, 0.0), (0.0, 1.0), (0.7, -0.3)], ids=["logprobs", "entropies", "both"])
def test_results_and_gradients_are_those_of_autograd(
    use: tuple[float, float], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(categorical, "BLOCK", block)
    inputs = example()
    weights = torch.linspace(-1, 1, 7, dtype=torch.float64)
    found = []
    for function in (by_autograd, logprobs_and_entropies):
        results = function(inputs[0].clone(), *inputs[1:])
        terms = [share * (weights * result).sum() for share, result in zip(use, results, strict=True) if share]
        found.append([*results, *torch.autograd.grad(sum(terms, torch.zeros(())), inputs[:1])])
    for theirs, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


def test_half_precision_is_rounded_once() -> None:
    logits, targets, temperatures = example(dtype=torch.bfloat16)
    logprobs, entropies = logprobs_and_entropies(logits.clone(), targets, temperatures)
    assert logprobs.dtype == entropies.dtype == torch.float32
    (mine,) = torch.autograd.grad(logprobs.sum(), [logits])
    wide = logits.detach().float().requires_grad_()
    (theirs,) = torch.autograd.grad(by_autograd(wide, targets, temperatures)[0].sum(), [wide])
    assert torch.equal(mine, theirs.to(torch.bfloat16))


def test_the_entropy_of_the_uniform_distribution_is_the_log_of_its_size() -> None:
    _, entropies = logprobs_and_entropies(torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), torch.ones(3))
    assert entropies.tolist() == pytest.approx([math.log(8)] * 3)


def test_hopeless_tokens_and_large_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, 0.0, -1e4]], requires_grad=True)
    logprobs, entropies = logprobs_and_entropies(logits.clone(), torch.tensor([2]), torch.ones(1))
    assert logprobs.item() == -2e4
    assert entropies.item() == pytest.approx(0.0, abs=1e-6)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[-1.0, 0.0, 1.0]]


def test_a_second_use_of_overwritten_logits_is_an_error() -> None:
    logits, targets, temperatures = example()
    used = logits.clone()
    both = logprobs_and_entropies(used, targets, temperatures)[0].sum()
    both.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()  # type: ignore[no-untyped-call]


def test_no_rows_have_no_results() -> None:
    logits = torch.zeros(0, 8, requires_grad=True)
    logprobs, entropies = logprobs_and_entropies(logits, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert logprobs.shape == entropies.shape == (0,)
    logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
