"""Rows from plain lists of ids, random tries of them, and tiny models of every family that forests are meant for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from clawgym_env.policy import Policy
from clawgym_env.trace.prefix_tree import TokenRow
from learners.rows import TrainingRow

Gradient = dict[str, Tensor]

VOCAB = 16

SHAPE = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
    }
)


def _qwen3_moe() -> PreTrainedModel:
    sparse = {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **sparse, head_dim=8))


FAMILIES: Mapping[str, Callable[[], PreTrainedModel]] = MappingProxyType(
    {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, attention_bias=True)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=8, attention_bias=True)),
        "qwen3_moe": _qwen3_moe,
    }
)


def make_model(family: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Biases start at 0 and norms at 1, where a mistake in them would not show.
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif name.endswith("gate.weight"):
                # Far from ties, so that rounding does not send a token to another expert.
                parameter.copy_(torch.randn_like(parameter))
    if family == "qwen3_moe" and dtype == torch.float64:
        # The grouped product of transformers' default does not know float64.
        model.set_experts_implementation("eager")
    return model.to(dtype).eval()


def make_forest_policy(family: str = "llama", dtype: torch.dtype = torch.float32) -> Policy:
    fake: Any = None
    return Policy(
        module=make_model(family, dtype), tokenizer=fake, renderer=fake, name=family, path=None, context_length=256
    )


def make_row(token_ids: Sequence[int], trained: Sequence[int] = (), *, rollout: int = 0) -> TrainingRow:
    """A row that trains its last token, or those at `trained`."""
    length = len(token_ids)
    mask = np.zeros(length, dtype=bool)
    mask[list(trained) or [length - 1]] = True
    tokens = TokenRow(
        token_ids=np.array(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -2.0 - 0.1 * rollout, 0.0).astype(np.float32),
        policy_versions=np.zeros(length, dtype=np.int32),
        temperatures=np.full(length, 0.7 + 0.2 * (rollout % 3), dtype=np.float32),
        call_indices=np.zeros(length, dtype=np.int32),
    )
    advantages = np.where(mask, 1.0 - 0.7 * rollout, 0.0).astype(np.float32)
    return TrainingRow(tokens, advantages, 1.0 / (1 + rollout), rollout, np.where(mask, np.cumsum(mask) - 1, -1))


@st.composite
def tries(draw: st.DrawFn) -> list[TrainingRow]:
    """Rows of a random trie: depth up to 6 nodes, up to 8 children, empty and equal nodes, single tokens."""
    node = st.lists(st.integers(0, 3), max_size=4)
    paths: list[list[int]] = [draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))]
    level = list(paths)
    for _ in range(draw(st.integers(0, 5))):
        parent = draw(st.sampled_from(level))
        level = [parent + child for child in draw(st.lists(node, min_size=1, max_size=8))]
        paths += level
    chosen = draw(st.lists(st.sampled_from(paths), min_size=1, max_size=12))
    rows = []
    for path in chosen:
        token_ids = [4, *path]
        trained = draw(st.sets(st.integers(1, len(token_ids) - 1), min_size=1))
        rows.append(make_row(token_ids[: max(trained) + 1], sorted(trained), rollout=draw(st.integers(0, 4))))
    return rows


class InFloat64(TorchFunctionMode):
    """Computes in float64 what models compute in float32 whatever their dtype: norms, routers, rotary angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        wide_kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].to(torch.float64)
        return func(*map(wide, args), **wide_kwargs)


def enable_checkpointing(module: Any) -> None:
    """Make a module compute activations twice, in training mode."""
    enable = getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable
    # Backward runs outside of the modes that were on in the forward pass.
    modes = (InFloat64, InFloat64) if module.dtype == torch.float64 else (nullcontext, nullcontext)
    enable({"use_reentrant": False, "context_fn": lambda: (modes[0](), modes[1]())})


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
