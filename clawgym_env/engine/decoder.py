"""The forward pass of a Llama-shaped transformers model over a flat batch of tokens.

Used by `torch_engine` for prompts and decode steps alike. It calls the trainer's own modules, so an optimizer step is
the weight update and adapters (LoRA) put into the projections just work; attention is left to `kv_cache`.
Invariant: logits equal those of the module's own forward up to floating-point order (1e-4 nats in fp32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clawgym_env.engine.kv_cache import KVShape, StepAttention
from clawgym_env.errors import EngineError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")


class Decoder:
    """A view of a causal language model; holds no weights of its own."""

    def __init__(self, module: PreTrainedModel) -> None:
        """Check that the model has the supported shape.

        Raises:
            EngineError: another architecture, sliding-window layers or length-dependent rotary scaling.
        """
        base: Any = module
        if hasattr(base, "get_base_model"):
            base = base.get_base_model()
        _check(base.config)
        self._model = base.model
        self._lm_head = base.lm_head
        attention = base.model.layers[0].self_attn
        weight = base.model.embed_tokens.weight
        self.vocab_size: int = weight.shape[0]
        self.shape = KVShape(
            num_layers=len(base.model.layers),
            num_kv_heads=base.config.num_key_value_heads,
            head_dim=attention.head_dim,
            dtype=weight.dtype,
            device=weight.device,
        )

    def forward(
        self, token_ids: Sequence[int], positions: Sequence[int], last: Sequence[int], attend: StepAttention
    ) -> Tensor:
        """Run the model.

        Args:
            token_ids: flat batch of all sequences' new tokens; `positions` are their places in their sequence.
            last: indices into the flat batch whose next-token logits are wanted.

        Returns:
            Logits, shape [len(last), vocab], float32.
        """
        device = self.shape.device
        hidden = self._model.embed_tokens(torch.tensor(token_ids, device=device))
        cos, sin = self._model.rotary_emb(hidden[None], torch.tensor([positions], device=device))
        cos, sin = cos[0, :, None], sin[0, :, None]
        for index, layer in enumerate(self._model.layers):
            hidden = hidden + self._attention(index, layer, hidden, cos, sin, attend)
            hidden = hidden + layer.mlp(_rms_norm(layer.post_attention_layernorm, hidden))
        if len(last) < len(token_ids):
            hidden = hidden[torch.tensor(last, dtype=torch.long, device=device)]
        logits: Tensor = self._lm_head(_rms_norm(self._model.norm, hidden))
        return logits.float()

    def _attention(
        self, index: int, layer: Any, hidden: Tensor, cos: Tensor, sin: Tensor, attend: StepAttention
    ) -> Tensor:
        attention = layer.self_attn
        normed = _rms_norm(layer.input_layernorm, hidden)
        q = attention.q_proj(normed).unflatten(-1, (-1, self.shape.head_dim))
        k = attention.k_proj(normed).unflatten(-1, (-1, self.shape.head_dim))
        v = attention.v_proj(normed).unflatten(-1, (-1, self.shape.head_dim))
        if hasattr(attention, "q_norm"):
            q, k = _rms_norm(attention.q_norm, q), _rms_norm(attention.k_norm, k)
        out = attend(index, _rotate(q, cos, sin), _rotate(k, cos, sin), v, attention.scaling)
        result: Tensor = attention.o_proj(out)
        return result


def _check(config: Any) -> None:
    if config.model_type not in SUPPORTED:
        raise EngineError(
            f"Expected a model of type {', '.join(SUPPORTED)}, got {config.model_type!r}. "
            "Serve another architecture with an engine of your own."
        )
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    if layer_types != {"full_attention"} or windowed:
        raise EngineError(
            "Expected full attention in every layer, got sliding windows. Switch them off in config.json."
        )
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _STATIC_ROPE:
        raise EngineError(f"Expected rotary scaling of type {', '.join(_STATIC_ROPE)}, got {rope!r}.")


def _rms_norm(norm: Any, x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        # The module rounds to half precision before it scales; one fused call would round elsewhere.
        normed: Tensor = norm(x)
        return normed
    return F.rms_norm(x, (x.shape[-1],), norm.weight, norm.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
