"""A starting point for very small Llamas in which copying from the context already works.

Used by the recipe of `tiny`: everything an agent of that size can do is copying, and growing the circuit for it from
random weights costs more than the whole rest of the training. Two attention heads are set by hand: one in layer 0
writes each token's predecessor beside it, one in layer 1 looks for the place whose predecessor is the current token
and predicts what stood there (an induction head). All other weights stay random, and all of them are trained.
Invariant: before any training, the second half of a random sequence repeated twice is predicted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CODE = 48
"""Width of the +-1 code of a token: dimensions [0, 48) hold what stands here, [48, 96) what comes next."""
PREVIOUS = slice(96, 127)
"""Dimensions that hold the first 31 places of the predecessor's code."""
CONSTANT = 127
"""One dimension that is the same everywhere, for attention by position alone."""
HEAD_DIM = 64


def give_copying_heads(module: LlamaForCausalLM) -> None:
    """Set the two heads, the embeddings and the output layer in place.

    Expects hidden size 128, head size 64, no grouped keys, untied embeddings and at least two layers.
    """
    config = module.config
    shape = (config.hidden_size, config.head_dim, config.num_key_value_heads, config.tie_word_embeddings)
    if shape != (128, HEAD_DIM, 2, False):
        raise ValueError(f"Expected hidden size 128 in 2 heads of 64 and untied embeddings, got {shape}.")
    with torch.no_grad():
        code = torch.randint(0, 2, (config.vocab_size, CODE)).float() * 2.0 - 1.0
        module.model.embed_tokens.weight[:, :CODE] = code
        module.model.embed_tokens.weight[:, CONSTANT] = 4.0
        module.lm_head.weight[:, CODE : 2 * CODE] = 0.2 * code
        first, second = module.model.layers[0].self_attn, module.model.layers[1].self_attn
        frequencies = module.model.rotary_emb.inv_freq
        half = HEAD_DIM // 2

        # Predecessor head: the key is the query turned by one position, in the fastest frequencies.
        fast = torch.arange(4)
        first.q_proj.weight[fast, CONSTANT] = 1.5
        first.k_proj.weight[fast, CONSTANT] = 1.5 * frequencies[fast].cos()
        first.k_proj.weight[fast + half, CONSTANT] = 1.5 * frequencies[fast].sin()
        places = torch.arange(PREVIOUS.stop - PREVIOUS.start)
        first.v_proj.weight[places, places] = 1.0
        first.o_proj.weight[PREVIOUS.start + places, places] = 0.7

        # Induction head: match by code in the slow frequencies, which hardly turn over a few hundred tokens.
        slow = torch.cat([torch.arange(14, half), torch.arange(14, half) + half])[: len(places)]
        second.q_proj.weight[slow, places] = 2.0
        second.k_proj.weight[slow, PREVIOUS.start + places] = 2.0
        dims = torch.arange(CODE)
        second.v_proj.weight[dims, dims] = 1.0
        second.o_proj.weight[CODE + dims, dims] = 1.0
