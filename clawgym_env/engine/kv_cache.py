"""Keys and values of running sequences, and attention over them.

Used by `torch_engine` between `decoder` (which makes queries, keys and values) and memory. A sequence owns one row of
a *bucket*: a tensor whose rows hold up to `capacity` tokens. Short sequences of like capacity share a bucket and one
attention call; a long one has a bucket to itself, since growing a shared one would copy gigabytes.
Invariant: the rows of a bucket are compact (0..n-1), so that a decode step reads views and copies nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

MIN_CAPACITY = 512
LONG = 4096
"""Tokens. Up to here capacities double and buckets are shared; beyond they are multiples of it and private."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token's keys and values look like."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence's place: row `row` of `bucket`. `length` tokens are filled."""

    bucket: Bucket
    row: int
    length: int = 0

    @property
    def capacity(self) -> int:
        """Tokens it has room for."""
        return self.bucket.kv.shape[4]


@dataclass(slots=True, eq=False)
class Bucket:
    """Rows of one capacity."""

    kv: Tensor
    """[2, layers, rows, kv_heads, capacity, head_dim]."""
    serial: int
    slots: list[Slot] = field(default_factory=list)


class KVCache:
    """Rows for running sequences. Used from the decode thread only."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._shared: dict[int, Bucket] = {}
        self._serials = itertools.count()

    def allocate(self, num_tokens: int) -> Slot:
        """Return an empty slot with room for `num_tokens`."""
        bucket = self._bucket(capacity_for(num_tokens))
        slot = Slot(bucket, len(bucket.slots))
        bucket.slots.append(slot)
        return slot

    def reserve(self, slot: Slot, num_tokens: int) -> None:
        """Make room for `num_tokens` in all, moving the sequence to a larger bucket where needed."""
        if num_tokens <= slot.capacity:
            return
        filled = self.read(slot, 0, slot.length).clone()
        self.free(slot)
        slot.bucket = self._bucket(capacity_for(num_tokens))
        slot.row = len(slot.bucket.slots)
        slot.bucket.slots.append(slot)
        self.write(slot, 0, filled)

    def free(self, slot: Slot) -> None:
        """Give the row back. The last row of the bucket takes its place."""
        bucket = slot.bucket
        last = bucket.slots.pop()
        if last is not slot:
            bucket.kv[:, :, slot.row, :, : last.length] = bucket.kv[:, :, last.row, :, : last.length]
            last.row = slot.row
            bucket.slots[slot.row] = last
        if not bucket.slots:
            self._shared.pop(slot.capacity, None)

    def read(self, slot: Slot, start: int, stop: int) -> Tensor:
        """Return a view of tokens [start, stop): shape [2, layers, kv_heads, stop - start, head_dim]."""
        return slot.bucket.kv[:, :, slot.row, :, start:stop]

    def write(self, slot: Slot, start: int, kv: Tensor) -> None:
        """Fill tokens from `start` on with `kv`, shaped as `read` returns it."""
        slot.bucket.kv[:, :, slot.row, :, start : start + kv.shape[3]] = kv

    def attention(self, decodes: Sequence[Slot], chunks: Sequence[tuple[Slot, int]]) -> StepAttention:
        """Plan the attention of one step over the flat token batch `decodes + chunks`.

        Args:
            decodes: slots that get one token each; neighbours must share a bucket (see `decode_order`).
            chunks: (slot, number of tokens) of sequences still reading their prompt.
        """
        plan = StepAttention()
        position = 0
        for _, members in itertools.groupby(decodes, key=lambda slot: slot.bucket.serial):
            group = list(members)
            plan.add_decodes(group[0].bucket, position, group)
            position += len(group)
        for slot, count in chunks:
            plan.add_chunk(slot.bucket.kv[:, :, slot.row], position, slot.length, count)
            position += count
        return plan

    def _bucket(self, capacity: int) -> Bucket:
        """Return a bucket with a free row."""
        bucket = self._shared.get(capacity)
        if bucket is None:
            bucket = Bucket(self._rows(1, capacity), next(self._serials))
            if capacity <= LONG:
                self._shared[capacity] = bucket
        elif len(bucket.slots) == bucket.kv.shape[2]:
            grown = self._rows(2 * bucket.kv.shape[2], capacity)
            grown[:, :, : bucket.kv.shape[2]] = bucket.kv
            bucket.kv = grown
        return bucket

    def _rows(self, rows: int, capacity: int) -> Tensor:
        # Zeros, not empty: a NaN in a masked position still poisons the softmax.
        shape = self.shape
        size = (2, shape.num_layers, rows, shape.num_kv_heads, capacity, shape.head_dim)
        return torch.zeros(size, dtype=shape.dtype, device=shape.device)


class StepAttention:
    """Writes one step's keys and values and attends to them, layer by layer."""

    def __init__(self) -> None:
        self._decodes: list[_DecodeGroup] = []
        self._chunks: list[_Chunk] = []

    def add_decodes(self, bucket: Bucket, start: int, slots: Sequence[Slot]) -> None:
        """Add sequences of one bucket that get one token each."""
        device = bucket.kv.device
        lengths = [slot.length + 1 for slot in bucket.slots]
        span = max(slot.length for slot in slots) + 1
        mask = torch.arange(span, device=device) < torch.tensor(lengths, device=device)[:, None]
        rows = torch.tensor([slot.row for slot in slots], device=device)
        positions = torch.tensor([slot.length for slot in slots], device=device)
        dense = len(slots) == len(bucket.slots) and all(slot.row == i for i, slot in enumerate(slots))
        kv = bucket.kv[:, :, : len(bucket.slots)]
        self._decodes.append(_DecodeGroup(kv, start, rows, positions, span, mask[:, None, None], dense))

    def add_chunk(self, kv: Tensor, start: int, length: int, count: int) -> None:
        """Add `count` prompt tokens of a sequence that holds `length` already; kv: [2, layers, kv_heads, cap, dim]."""
        mask = None
        if length and count > 1:
            mask = torch.ones(count, length + count, dtype=torch.bool, device=kv.device).tril(length)
        self._chunks.append(_Chunk(kv, start, length, count, mask))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend.

        Args:
            q: [tokens, heads, head_dim]; k, v: [tokens, kv_heads, head_dim], all with rotary positions applied.

        Returns:
            [tokens, heads * head_dim].
        """
        parts = [group.attend(layer, q, k, v, scale) for group in self._decodes]
        parts += [chunk.attend(layer, q, k, v, scale) for chunk in self._chunks]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(q.shape[0], -1)


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGroup:
    kv: Tensor
    start: int
    rows: Tensor
    positions: Tensor
    span: int
    mask: Tensor
    dense: bool
    """Every row of the bucket decodes, in order: no gather or scatter."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch = slice(self.start, self.start + len(self.rows))
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[self.rows, :, self.positions] = k[batch]
        values[self.rows, :, self.positions] = v[batch]
        # A GQA group becomes query length: keys and values need no repeat.
        queries = q[batch].view(len(self.rows), keys.shape[1], -1, q.shape[2])
        if not self.dense:
            scattered = queries.new_zeros(keys.shape[0], *queries.shape[1:])
            scattered[self.rows] = queries
            queries = scattered
        out = F.scaled_dot_product_attention(
            queries, keys[:, :, : self.span], values[:, :, : self.span], attn_mask=self.mask, scale=scale
        )
        return (out if self.dense else out[self.rows]).flatten(1)


@dataclass(frozen=True, slots=True, eq=False)
class _Chunk:
    kv: Tensor
    start: int
    length: int
    count: int
    mask: Tensor | None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        batch, stop = slice(self.start, self.start + self.count), self.length + self.count
        keys, values = self.kv[0, layer], self.kv[1, layer]
        keys[:, self.length : stop] = k[batch].transpose(0, 1)
        values[:, self.length : stop] = v[batch].transpose(0, 1)
        out = F.scaled_dot_product_attention(
            q[batch].transpose(0, 1)[None],
            keys[None, :, :stop],
            values[None, :, :stop],
            attn_mask=self.mask,
            is_causal=self.mask is None and self.count > 1,
            scale=scale,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1).flatten(1)


def capacity_for(num_tokens: int) -> int:
    """Return the capacity of a row that holds `num_tokens`."""
    if num_tokens > LONG:
        return -(-num_tokens // LONG) * LONG
    capacity = MIN_CAPACITY
    while capacity < num_tokens:
        capacity *= 2
    return capacity


def decode_order(slot: Slot) -> tuple[int, int]:
    """Sort key under which a decode batch reads whole buckets as views."""
    return slot.bucket.serial, slot.row
