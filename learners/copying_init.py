"""A starting point for very small Llamas in which copying from the context already works.

Used by the recipe of `tiny`: everything an agent of that size can do is copying, and growing the circuit for it from
random weights costs more than the whole rest of the training. Three attention heads are set by hand: two in layer 0
write each token's predecessor and pre-predecessor beside it, one in layer 1 looks for the place whose predecessor is
the current token and predicts what stood there (an induction head). All other weights stay random, and all are trained.
Invariant: before any training, the second half of a random sequence repeated twice is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaForCausalLM

HEAD_DIM = 64
CODE = 32
"""Width of the +-1 code of a token: dimensions [0, 32) hold what stands here, [32, 64) what is predicted."""
MATCH = 24
"""Places of a code that are matched; dimensions [64, 88) hold the predecessor's, [88, 112) the one's before it."""
CONSTANT = 127
"""One dimension that is the same everywhere, for attention by position alone."""


def give_copying_heads(module: LlamaForCausalLM, alike: Sequence[int] = ()) -> None:
    """Set the heads, the embeddings and the output layer in place.

    Args:
        module: hidden size 128 in two heads of 64, untied embeddings, at least two layers.
        alike: ids that count as the same token when it comes to what stood after them, such as two opening quotes.
    """
    config = module.config
    shape = (config.hidden_size, config.head_dim, config.num_key_value_heads, config.tie_word_embeddings)
    if shape != (128, HEAD_DIM, 2, False):
        raise ValueError(f"Expected hidden size 128 in 2 heads of 64 and untied embeddings, got {shape}.")
    with torch.no_grad():
        code = torch.randint(0, 2, (config.vocab_size, CODE)).float() * 2.0 - 1.0
        for index in alike:
            code[index, :MATCH] = code[alike[0], :MATCH]
        module.model.embed_tokens.weight[:, :CODE] = code
        module.model.embed_tokens.weight[:, CONSTANT] = 4.0
        # The gain sits in the norm: Adam moves every weight at the same pace, which would blur a small code at once.
        module.lm_head.weight[:, CODE : 2 * CODE] = code
        module.model.norm.weight[CODE : 2 * CODE] = 0.4
        frequencies = module.model.rotary_emb.inv_freq
        for distance in (1, 2):
            _look_back(module, distance, frequencies)
        _induce(module)


def _look_back(module: LlamaForCausalLM, distance: int, frequencies: Tensor) -> None:
    """Make head `distance - 1` of layer 0 write the code that stood `distance` places before."""
    attention = module.model.layers[0].self_attn
    head, half = (distance - 1) * HEAD_DIM, HEAD_DIM // 2
    # The key is the query turned by `distance` positions, in the fastest frequencies.
    fast = torch.arange(5)
    turn = frequencies[fast] * distance
    attention.q_proj.weight[head + fast, CONSTANT] = 1.5
    attention.k_proj.weight[head + fast, CONSTANT] = 1.5 * turn.cos()
    attention.k_proj.weight[head + fast + half, CONSTANT] = 1.5 * turn.sin()
    places = torch.arange(MATCH)
    attention.v_proj.weight[head + places, places] = 1.0
    attention.o_proj.weight[2 * CODE + (distance - 1) * MATCH + places, head + places] = 0.7


def _induce(module: LlamaForCausalLM) -> None:
    """Make head 0 of layer 1 predict what stood after the current token before."""
    attention = module.model.layers[1].self_attn
    # The slow frequencies hardly turn over a few hundred tokens, so they compare content.
    half = HEAD_DIM // 2
    slow = torch.cat([torch.arange(14, half), torch.arange(14, half) + half])[:MATCH]
    places = torch.arange(MATCH)
    attention.q_proj.weight[slow, places] = 2.0
    attention.k_proj.weight[slow, 2 * CODE + places] = 2.0
    dims = torch.arange(CODE)
    attention.v_proj.weight[dims, dims] = 1.0
    attention.o_proj.weight[CODE + dims, dims] = 1.0
