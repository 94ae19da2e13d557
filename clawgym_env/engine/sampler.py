"""Draws one token per sequence from a batch of logits.

Used by `torch_engine` after every step. Invariant: the returned log-probability is that of the distribution the token
was drawn from (temperature, then top-k, then top-p, renormalised), and a sequence's tokens depend on its own logits
and seed only, whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from torch import Tensor

from clawgym_env.engine.base import SamplingParams


def sample(
    logits: Tensor, params: Sequence[SamplingParams], randoms: Sequence[Random]
) -> tuple[list[int], list[float]]:
    """Draw one token per row.

    Args:
        logits: [rows, vocab], float32. Temperature 0 takes the largest, with log-probability 0.

    Returns:
        Token ids and their log-probabilities in nats; NaN marks a row whose logits are not finite.
    """
    temperatures = torch.tensor([p.temperature or 1.0 for p in params], device=logits.device)
    scaled = logits / temperatures[:, None]
    for row, param in enumerate(params):
        if param.temperature > 0.0 and (param.top_k or param.top_p < 1.0):
            scaled[row] = _truncate(scaled[row], param)
    logprobs = torch.log_softmax(scaled, dim=-1)
    # Inverse CDF in double precision: one uniform number a token, and float32 sums drift over large vocabularies.
    cdf = logprobs.exp().double().cumsum(dim=-1)
    uniform = torch.tensor([[random.random() * (1.0 - 1e-12)] for random in randoms], dtype=torch.double)
    drawn = torch.searchsorted(cdf, uniform.to(logits.device) * cdf[:, -1:], right=True).clamp_max(logits.shape[1] - 1)
    chosen = logprobs.gather(1, drawn)[:, 0].tolist()
    tokens: list[int] = drawn[:, 0].tolist()
    for row, param in enumerate(params):
        if param.temperature == 0.0:
            tokens[row] = int(logits[row].argmax())
            chosen[row] = chosen[row] * 0.0  # keeps NaN
    return tokens, chosen


def _truncate(scaled: Tensor, params: SamplingParams) -> Tensor:
    """Mask all but the top-k tokens, then all but the smallest set whose mass reaches top-p."""
    values, order = scaled.sort(descending=True)
    if params.top_k:
        values[params.top_k :] = -torch.inf
    if params.top_p < 1.0:
        mass_before = values.softmax(dim=-1).cumsum(dim=-1).roll(1)
        mass_before[0] = 0.0
        values[mass_before >= params.top_p] = -torch.inf
    return torch.empty_like(scaled).scatter_(0, order, values)
