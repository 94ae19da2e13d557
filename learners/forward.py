"""The trainer's own forward pass: log-probabilities and entropies of the trained tokens.

Used by every policy-gradient learner on the micro-batches of `rows` and `forest`. Invariant: only the trained positions
reach the output layer, and never more than `LOGITS` of its outputs exist at once, whatever the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from learners import tree_attention
from learners.categorical import logprobs_and_entropies
from learners.rows import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOGITS = 1 << 26
"""Logits alive at once: 256 MiB in fp32, which their gradient overwrites.

A micro-batch whose trained tokens have more is computed in chunks, each twice: a third more time in the output layer,
which costs as much as eight layers of a small model with a vocabulary of fifty thousand.
"""


def trained_hidden(module: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Run the trunk over a micro-batch and return the hidden states that predict its trained tokens, shape [M, H].

    What the output layer reads, and what a value head may read beside it: V(s_t) belongs to the same position as the
    logits of token t.
    """
    model: Any = module
    extra = {} if batch.layout is None else tree_attention.inputs(module, batch.layout)
    hidden: Tensor = model.get_decoder()(input_ids=batch.token_ids, use_cache=False, **extra).last_hidden_state
    return hidden.flatten(0, 1)[batch.predictors]


def token_logprobs(module: PreTrainedModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Recompute what the policy thinks of the tokens it sampled, at the temperature of each.

    Returns:
        Log-probabilities, shape [M], nats, with gradient where enabled; entropies, shape [M], without.
    """
    return logprobs_of(module, trained_hidden(module, batch), batch)


def logprobs_of(
    module: PreTrainedModel, hidden: Tensor, batch: MicroBatch, *, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Do the second half of `token_logprobs`: from the hidden states of `trained_hidden`, shape [M, H], on.

    Args:
        entropy_gradient: whether the entropies have a gradient, too.
    """
    model: Any = module
    head: nn.Module = model.get_output_embeddings()
    num_logits = len(hidden) * model.config.get_text_config().vocab_size
    # Of equal size: a last chunk of one row would read and write as much of the output layer as one of hundreds.
    count = max(1, min(len(hidden), -(-num_logits // LOGITS)))
    parts = (torch.tensor_split(part, count) for part in (hidden, batch.targets, batch.temperatures))
    chunks = list(zip(*parts, strict=True))
    # Backward keeps the logits of a single chunk; those of several are computed again instead.
    if len(chunks) > 1 and torch.is_grad_enabled():
        results = [checkpoint(_chunk, head, *chunk, use_reentrant=False) for chunk in chunks]
    else:
        results = [_chunk(head, *chunk) for chunk in chunks]
    logprobs, entropies = (torch.cat(parts) for parts in zip(*results, strict=True))
    return logprobs, entropies if entropy_gradient else entropies.detach()


def _chunk(head: nn.Module, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    return logprobs_and_entropies(head(hidden), targets, temperatures)
