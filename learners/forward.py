"""The trainer's own forward pass: log-probabilities and entropies of the trained tokens.

Used by every policy-gradient learner on the micro-batches of `rows`. Invariant: only the trained positions reach the
output layer, and never more than `LOGITS` of its outputs exist at once, whatever the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learners.losses import entropy
from learners.rows import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = 1 << 24
"""Logits alive at once: 64 MiB in fp32, and a few times that with their softmax."""


def token_logprobs(module: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Recompute what the policy thinks of the tokens it sampled, at the temperature of each.

    Returns:
        Log-probabilities, shape [M], nats, with gradient where enabled; entropies, shape [M], without.
    """
    model: Any = module
    hidden: Tensor = model.get_decoder()(input_ids=batch.token_ids, use_cache=False).last_hidden_state
    hidden = hidden.flatten(0, 1)[batch.predictors]
    head: nn.Module = model.get_output_embeddings()
    size = max(1, LOGITS // model.config.get_text_config().vocab_size)
    parts = (torch.split(part, size) for part in (hidden, batch.targets, batch.temperatures))
    chunks = list(zip(*parts, strict=True))
    # Backward keeps the logits of a single chunk; those of several are computed again instead.
    if len(chunks) > 1 and torch.is_grad_enabled():
        results = [checkpoint(_chunk, head, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        results = [_chunk(head, *chunk) for chunk in chunks]
    logprobs, entropies = zip(*results, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(head: nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logits: Tensor = head(hidden).float() / temperatures[:, None]
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropies = entropy(logits.detach())
    return chosen - torch.logsumexp(logits, dim=-1), entropies
