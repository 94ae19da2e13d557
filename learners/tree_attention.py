"""Ancestor attention: a token of a packed forest looks at the path from its root to itself, and at nothing else.

`forest` lays tokens out (`ForestLayout`), `forward` hands `inputs(module, layout)` to the model, and transformers'
attention registry brings every layer's queries, keys and values here; no model code is touched. Invariant: an enabled
module computes what it computed before in every call without a layout, since the layout travels as an argument of the
call (into activation checkpoints, too) and nothing is switched on or off around it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "clawgym_tree"
"""Of our entry in transformers' attention registry."""

CHUNK = 512
"""Queries per call of the segment kernel: bounds its mask, and the masked-out half that it computes in vain."""

Kernel: TypeAlias = Literal["segment", "flex", "varlen", "dense"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)

Span: TypeAlias = tuple[int, int]
"""Packed positions [start, stop)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of packed tokens without a fork: one child each, and one query block of the kernels."""

    start: int
    stop: int
    keys: tuple[Span, ...]
    """What its last token looks at, root first: the path above it, then the segment itself; neighbours are merged."""

    @property
    def num_keys(self) -> int:
        return sum(stop - start for start, stop in self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class ForestLayout:
    """Where the tokens of a forest stand, in depth-first preorder: `allowed(q, k) = k <= q < end[k]`."""

    position_ids: Tensor
    """Shape [T], int64: depth, the position that a token has in every flat row through it."""
    end: Tensor
    """Shape [T], int64, exclusive: where the subtree below a token ends."""
    segments: tuple[Segment, ...]
    """They cover [0, T) in order."""
    kernel: Kernel | None = None
    """None is the best one for the device and dtype."""

    def allowed(self) -> Tensor:
        """Return the whole mask, shape [T, T], True where a query (row) looks at a key."""
        index = torch.arange(len(self.end), device=self.end.device)
        return (index[None, :] <= index[:, None]) & (index[:, None] < self.end[None, :])


class TreeAttention(Protocol):
    """One forest's attention, the same in every layer."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attend: [1, heads, T, D] over [1, kv_heads, T, D] to [1, heads, T, D]."""


def reason_against(module: PreTrainedModel) -> str | None:
    """Return what in a model a forest cannot compute, naming the layer; None where all of it can be."""
    model: Any = module
    decoder: Any = model.get_decoder()
    config: Any = decoder.config
    if config._attn_implementation not in (NAME, "sdpa"):
        return f"attention implementation {config._attn_implementation!r} (load the model with 'sdpa')"
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    for index, layer_type in enumerate(layer_types):
        if layer_type != "full_attention":
            return f"layer {index} is {layer_type!r}"
    if not layer_types and getattr(config, "sliding_window", None) is not None:
        return f"layer 0 looks back over sliding_window={config.sliding_window} tokens"
    rope_type = getattr(getattr(decoder, "rotary_emb", None), "rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        return f"RoPE type {rope_type!r} depends on the longest row of a micro-batch"
    for index, layer in enumerate(getattr(decoder, "layers", ())):
        reason = _reason_against_layer(layer)
        if reason is not None:
            return f"layer {index} {reason}"
    return None if getattr(decoder, "layers", ()) else f"no list of layers in {type(decoder).__name__}"


def _reason_against_layer(layer: nn.Module) -> str | None:
    attentions: list[Any] = [part for part in layer.modules() if type(part).__name__.endswith("Attention")]
    if len(attentions) != 1:
        return f"has {len(attentions)} attention modules, not one ({type(layer).__name__})"
    (attention,) = attentions
    if not getattr(attention, "is_causal", False):
        return "is not causal"
    if getattr(attention, "sinks", None) is not None:
        return "has attention sinks"
    for setting in ("sliding_window", "attention_dropout", "attn_logit_softcapping"):
        if value := getattr(attention, setting, None):
            return f"has {setting}={value}"
    return None


def enable(module: PreTrainedModel) -> None:
    """Let a model take layouts; once and for all, and without effect on calls that bring none.

    Raises:
        ValueError: the model has layers that a forest cannot compute.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    model: Any = module
    if model.get_decoder().config._attn_implementation == NAME:
        return
    if reason := reason_against(module):
        raise ValueError(f"Expected a model whose layers are all full causal softmax attention, but {reason}.")
    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(NAME)


def inputs(module: PreTrainedModel, layout: ForestLayout) -> Mapping[str, object]:
    """Return what the trunk's forward needs beside the token ids, shape [1, T], of a forest.

    Raises:
        ValueError: as of `enable`.
    """
    enable(module)
    device = layout.position_ids.device
    return {
        "position_ids": layout.position_ids[None],
        # A mask of four dimensions is passed on as it is, so that no T x T mask is made. Having no size, it stops any
        # attention but ours, which would ignore the layout without a word.
        "attention_mask": torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device),
        "tree_attention": attention_of(layout, dtype=module.dtype),
    }


def attention_of(layout: ForestLayout, *, dtype: torch.dtype) -> TreeAttention:
    """Make the attention of a forest, by the layout's kernel or the best one for its device.

    Raises:
        ValueError: no such kernel.
    """
    kernel = layout.kernel or _best_kernel(layout.position_ids.device, dtype)
    if kernel == "segment":
        return SegmentAttention(layout)
    if kernel == "flex":
        return FlexAttention(layout)
    if kernel == "varlen":
        return VarlenAttention(layout)
    if kernel == "dense":
        return DenseAttention(layout)
    raise ValueError(f"Expected a kernel out of {KERNELS}, got {kernel!r}.")


def _best_kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    if device.type != "cuda":
        return "segment"
    return "varlen" if dtype in (torch.bfloat16, torch.float16) and _varlen_kernel() is not None else "flex"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    tree_attention: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Serve a layer, in the registry's form: [1, heads, T, D] in, [1, T, heads, D] out."""
    if tree_attention is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
        output: tuple[Tensor, None] = sdpa(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output
    return tree_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None


class DenseAttention:
    """The reference: every pair is computed, T² of them, and most are thrown away."""

    def __init__(self, layout: ForestLayout) -> None:
        self._mask = layout.allowed()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask, scale=scale, enable_gqa=True)


class SegmentAttention:
    """SDPA per segment over the keys of its path: exact, on any device, and only pairs that are allowed are computed.

    (But for half a chunk of each query: see `CHUNK`.)
    """

    def __init__(self, layout: ForestLayout) -> None:
        index = {segment.start: i for i, segment in enumerate(layout.segments)}
        index[len(layout.end)] = len(layout.segments)
        self._sizes = [segment.stop - segment.start for segment in layout.segments]
        self._paths = [
            [i for start, stop in segment.keys for i in range(index[start], index[stop])] for segment in layout.segments
        ]
        self._num_keys = max((segment.num_keys for segment in layout.segments), default=0)
        self._num_queries = min(CHUNK, max(self._sizes, default=0))
        self._last_mask: Tensor | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
            return F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )

        # Backward of a split joins the gradients; that of a slice would fill all T tokens with zeros, per segment.
        all_queries, all_keys, all_values = (torch.split(states, self._sizes, dim=2) for states in (query, key, value))
        outputs = []
        for queries, path in zip(all_queries, self._paths, strict=True):
            keys, values = (_joined([parts[i] for i in path]) for parts in (all_keys, all_values))
            if len(path) == 1:
                outputs.append(attend(queries, keys, values, None))
                continue
            seen = keys.shape[2] - queries.shape[2]
            for chunk in torch.split(queries, CHUNK, dim=2):
                seen += chunk.shape[2]
                mask = self._mask(chunk.shape[2], seen, query)
                outputs.append(attend(chunk, _first(keys, seen), _first(values, seen), mask))
        return torch.cat(outputs, dim=2)

    def _mask(self, num_queries: int, num_keys: int, like: Tensor) -> Tensor:
        """Return zeros where the last of `num_keys` positions look: a window on the lower right of one big mask."""
        mask = self._last_mask
        if mask is None or mask.dtype != like.dtype or mask.device != like.device:
            # Additive, in the queries' dtype: SDPA would convert a mask of booleans, once per layer, and keep it.
            mask = like.new_full((self._num_queries, self._num_keys), float("-inf"))
            mask = mask.triu(1 + self._num_keys - self._num_queries)
            self._last_mask = mask
        return mask[self._num_queries - num_queries :, self._num_keys - num_keys :]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


def _first(states: Tensor, size: int) -> Tensor:
    return states if states.shape[2] == size else states[:, :, :size]


class FlexAttention:
    """Blocks of the mask that hold no allowed pair are skipped. Trains on CUDA only: it has no backward on a CPU.

    Not run on a GPU.
    """

    def __init__(self, layout: ForestLayout) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        end = layout.end

        def allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (query < end[key])

        size, on_cuda = len(end), end.device.type == "cuda"
        self._mask = create_block_mask(allowed, None, None, size, size, device=end.device, _compile=on_cuda)
        self._attend = _compiled_flex() if on_cuda else _plain_flex()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        output: Tensor = self._attend(query, key, value, block_mask=self._mask, scale=scale, enable_gqa=True)
        return output


def _plain_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex() -> Any:
    return torch.compile(_plain_flex(), dynamic=True)


class VarlenAttention:
    """Flash attention of segments as sequences, each over a gathered copy of the keys of its path. Half precision.

    Not run on a GPU.
    """

    def __init__(self, layout: ForestLayout, kernel: Any = None) -> None:
        """Take `kernel` in place of `torch.nn.attention.varlen.varlen_attn`.

        Raises:
            ValueError: this torch has no such kernel.
        """
        kernel = kernel or _varlen_kernel()
        if kernel is None:
            raise ValueError("Expected torch with torch.nn.attention.varlen, got none. Use kernel='flex'.")
        self._kernel = kernel
        device = layout.end.device
        queries = [segment.stop - segment.start for segment in layout.segments]
        keys = [segment.num_keys for segment in layout.segments]
        spans = [torch.arange(*span, device=device) for segment in layout.segments for span in segment.keys]
        self._index = torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device=device)
        self._query_offsets, self._key_offsets = (
            F.pad(torch.tensor(sizes, dtype=torch.int32, device=device).cumsum(0, dtype=torch.int32), (1, 0))
            for sizes in (queries, keys)
        )
        self._max_queries, self._max_keys = max(queries, default=0), max(keys, default=0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
        output: Tensor = self._kernel(
            queries.contiguous(),
            keys.index_select(0, self._index),
            values.index_select(0, self._index),
            self._query_offsets,
            self._key_offsets,
            self._max_queries,
            self._max_keys,
            scale=scale,
            # Causal with the corner at the lower right, where a sequence has more keys than queries.
            window_size=(-1, 0),
            enable_gqa=True,
        )
        return output.transpose(0, 1)[None]


@cache
def _varlen_kernel() -> Any:
    """Return torch's flash attention over sequences of any length; None where torch has none that does all we need."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "enable_gqa"} <= signature(varlen_attn).parameters.keys() else None
