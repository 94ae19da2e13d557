"""Forests: rows that begin alike, packed so that each shared token is computed once.

Takes the rows of `rows.training_rows` (any rollouts; those of a group share a prompt of thousands of tokens) in place
of `rows.pack`; `tree_attention` computes what it lays out. Everything comes from one order: rows sorted by their tokens
are the leaves of a trie from left to right, and a row adds to the packed tokens what it does not share with the one
before. Invariant: a forest shares computation only. Each row keeps its loss terms, its positions and its context.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from learners import tree_attention
from learners.rows import MicroBatch, TrainingRow, micro_batch, pack
from learners.tree_attention import ForestLayout, Kernel, Segment, Span

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Packing: TypeAlias = Literal["auto", "forest", "flat"]
PACKINGS: tuple[Packing, ...] = get_args(Packing)

BREAK_EVEN = 1.05
"""Flat tokens per packed token from which on a forest is faster than flat rows.

CPU time of flat rows over that of forests at ratios of 1.00, 1.03, 1.06, 1.12 and 1.28, best of interleaved runs on
two cores that others shared, so each is good to some hundredths: 0.93, 0.92, 1.05, 1.02 and 1.26 for SmolLM2 cut to 8
layers (`benchmarks/forest.py --part break-even --row-tokens 512 --repeats 3 --no-per-call`); 0.92, 1.09, 1.03, 1.09 and
1.09 for tiny (`--policy tiny`, 5 repeats).
"""

Ints: TypeAlias = npt.NDArray[np.int64]

logger = logging.getLogger(__name__)


def supported(packing: Packing, module: PreTrainedModel) -> Packing:
    """Return "flat" in place of "auto" where a model cannot be computed as a forest, and log why.

    Raises:
        ValueError: "forest" for such a model, or no packing at all.
    """
    if packing not in PACKINGS:
        raise ValueError(f"Expected packing out of {PACKINGS}, got {packing!r}.")
    reason = tree_attention.reason_against(module) if packing != "flat" else None
    if reason is None:
        return packing
    if packing == "forest":
        raise ValueError(
            f"Expected a model of full causal softmax attention for packing='forest', but {reason}. "
            "Use packing='auto' or 'flat'."
        )
    logger.info("Rows of %s are trained one by one, not as a forest: %s", type(module).__name__, reason)
    return "flat"


def packed(
    rows: Sequence[TrainingRow], *, packing: Packing, max_tokens: int, module: PreTrainedModel
) -> tuple[list[MicroBatch], dict[str, float]]:
    """Pack rows for a model, as `supported` allows; "auto" is flat below `BREAK_EVEN`.

    Returns:
        The micro-batches; and unless flat was asked for, `forest/dedup_ratio`, `forest/ideal_saving` (see `Sharing`)
        and `forest/planted`, 1 where the micro-batches are forests and 0 where sharing is too low to pay.
    """
    if packing == "flat":
        return pack(rows, max_tokens=max_tokens, device=module.device), {}
    forests = plant(rows, max_tokens=max_tokens, device=module.device)
    saved = sharing(rows, forests)
    planted = packing == "forest" or saved.dedup_ratio >= BREAK_EVEN
    metrics = {
        "forest/dedup_ratio": saved.dedup_ratio,
        "forest/ideal_saving": saved.ideal_saving(Flops.of(module)),
        "forest/planted": float(planted),
    }
    return (forests if planted else pack(rows, max_tokens=max_tokens, device=module.device)), metrics


def plant(
    rows: Sequence[TrainingRow],
    *,
    max_tokens: int,
    device: torch.device | str = "cpu",
    kernel: Kernel | None = None,
) -> list[MicroBatch]:
    """Pack rows into forests of at most `max_tokens` tokens, the largest first; takes O(tokens of all rows).

    What does not fit together is cut where the fewest tokens have to be computed twice, so that rows which share most
    stay together. A row longer than the budget gets a forest of its own.

    Args:
        kernel: of the attention; None is the best one for the device.
    """
    rows = sorted(rows, key=_key)
    shared = _shared(rows)
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    pieces = _pieces(lengths, shared, max_tokens)
    forests = _bins(pieces, [int(_sizes(piece, lengths, shared).sum()) for piece in pieces], max_tokens)
    return [_grow([rows[i] for i in forest], _overlaps(forest, shared), device, kernel) for forest in forests]


@dataclass(frozen=True, slots=True)
class Flops:
    """What a forward pass costs in matrix products; a training step is a multiple of it."""

    per_token: float
    """In the trunk's matrices."""
    per_pair: float
    """Of a query and a key, over all layers and heads."""
    per_target: float
    """In the output layer."""

    @classmethod
    def of(cls, module: PreTrainedModel) -> Flops:
        """Count a model's own."""
        model: Any = module
        decoder: nn.Module = model.get_decoder()
        config: Any = model.config.get_text_config()
        embedding = model.get_input_embeddings().weight
        matrices = sum(
            weight.numel() for weight in decoder.parameters() if weight.ndim == 2 and weight is not embedding
        )
        experts = sum(weight.numel() for weight in decoder.parameters() if weight.ndim == 3)
        num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 1
        used = getattr(config, "num_experts_per_tok", 1) / num_experts
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            per_token=2.0 * (matrices + experts * used),
            per_pair=4.0 * config.num_hidden_layers * config.num_attention_heads * head_dim,
            per_target=2.0 * config.vocab_size * config.hidden_size,
        )


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much a batch saves as forests."""

    flat_tokens: int
    """Of the rows, each alone and without padding."""
    packed_tokens: int
    flat_pairs: int
    """Of a query and a key that it looks at."""
    packed_pairs: int
    targets: int
    """Loss terms, which nothing shares."""

    @property
    def dedup_ratio(self) -> float:
        """Flat tokens per packed token; 1 where nothing is shared."""
        return self.flat_tokens / self.packed_tokens if self.packed_tokens else 1.0

    def ideal_saving(self, flops: Flops) -> float:
        """Return how many times faster than flat rows a step would be if time were FLOPs."""
        flat, packed = (
            flops.per_token * tokens + flops.per_pair * pairs + flops.per_target * self.targets
            for tokens, pairs in ((self.flat_tokens, self.flat_pairs), (self.packed_tokens, self.packed_pairs))
        )
        return flat / packed if packed else 1.0


def sharing(rows: Sequence[TrainingRow], forests: Sequence[MicroBatch]) -> Sharing:
    """Compare forests with the rows they were planted from."""
    lengths = [len(row) for row in rows]
    depths = [forest.layout.position_ids for forest in forests if forest.layout is not None]
    return Sharing(
        flat_tokens=sum(lengths),
        packed_tokens=sum(len(depth) for depth in depths),
        flat_pairs=sum(length * (length + 1) // 2 for length in lengths),
        packed_pairs=sum(int((depth + 1).sum()) for depth in depths),
        targets=sum(len(forest.targets) for forest in forests),
    )


def _key(row: TrainingRow) -> tuple[bytes, int]:
    """Order rows by their tokens: as big-endian bytes, they compare like the numbers. Equal ones, by rollout."""
    return row.tokens.token_ids.astype(">u4").tobytes(), row.rollout


def _shared(rows: Sequence[TrainingRow]) -> Ints:
    """Return how many tokens each row begins with like the one before it, shape [R]."""
    shared = np.zeros(len(rows), dtype=np.int64)
    for index in range(1, len(rows)):
        before, here = rows[index - 1].tokens.token_ids, rows[index].tokens.token_ids
        size = min(len(before), len(here))
        different = before[:size] != here[:size]
        first = int(different.argmax()) if size else 0
        shared[index] = first if size and different[first] else size
    return shared


def _sizes(piece: range, lengths: Ints, shared: Ints) -> Ints:
    """Return what each row of a trie adds to it."""
    sizes = lengths[piece.start : piece.stop] - shared[piece.start : piece.stop]
    sizes[0] = lengths[piece.start]
    return sizes


def _pieces(lengths: Ints, shared: Ints, max_tokens: int) -> list[range]:
    """Cut sorted rows into runs within the budget: the fewest tokens computed twice, then the most runs.

    Where a cut costs nothing, smaller runs fill micro-batches better.
    """
    count = len(lengths)
    added = np.concatenate(([0], np.cumsum(lengths - shared)))
    # best[i]: tokens computed twice, in units larger than any number of runs, less runs, of the first i rows.
    best = np.zeros(count + 1, dtype=np.int64)
    through = np.zeros(count, dtype=np.int64)  # the same with a run that begins at row i
    start_of = np.zeros(count + 1, dtype=np.int64)
    low = 0
    for stop in range(1, count + 1):
        through[stop - 1] = best[stop - 1] + shared[stop - 1] * (count + 1) - 1
        while low < stop - 1 and lengths[low] + added[stop] - added[low + 1] > max_tokens:
            low += 1
        start = low + int(through[low:stop].argmin())
        best[stop], start_of[stop] = through[start], start
    pieces = []
    stop = count
    while stop:
        pieces.append(range(int(start_of[stop]), stop))
        stop = int(start_of[stop])
    return pieces[::-1]


def _bins(pieces: Sequence[range], sizes: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Fill micro-batches with pieces, first fit, the largest first; return the rows of each, sorted."""
    bins: list[list[int]] = []
    room: list[int] = []
    for size, piece in sorted(zip(sizes, pieces, strict=True), key=lambda pair: (-pair[0], pair[1].start)):
        place = next((i for i, free in enumerate(room) if size <= free), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(max_tokens)
        bins[place] += piece
        room[place] -= size
    return [sorted(rows) for rows in bins]


def _overlaps(forest: Sequence[int], shared: Ints) -> list[int]:
    """Return how many tokens each row of a forest shares with the one before it there: the least on the way."""
    return [0, *(int(shared[i + 1 : j + 1].min()) for i, j in pairwise(forest))]


def _grow(
    rows: Sequence[TrainingRow], shared: Sequence[int], device: torch.device | str, kernel: Kernel | None
) -> MicroBatch:
    size = sum(len(row) - overlap for row, overlap in zip(rows, shared, strict=True))
    token_ids, positions, end = (np.empty(size, dtype=np.int64) for _ in range(3))
    places: list[Ints] = []
    starts = [0]
    path = np.empty(0, dtype=np.int64)  # packed positions of the row before
    offset = 0
    for row, overlap in zip(rows, shared, strict=True):
        if overlap < len(path):
            if overlap:
                starts.append(int(path[overlap]))
            if offset:
                starts.append(offset)
        end[path[overlap:]] = offset
        stop = offset + len(row) - overlap
        token_ids[offset:stop] = row.tokens.token_ids[overlap:]
        positions[offset:stop] = np.arange(overlap, len(row))
        path = np.concatenate((path[:overlap], np.arange(offset, stop)))
        places.append(path)
        offset = stop
    end[path] = size
    layout = ForestLayout(
        position_ids=torch.as_tensor(positions, device=device),
        end=torch.as_tensor(end, device=device),
        segments=_segments(sorted(set(starts)), end),
        kernel=kernel,
    )
    return micro_batch(rows, token_ids[None], places, device=device, layout=layout)


def _segments(starts: Sequence[int], end: Ints) -> tuple[Segment, ...]:
    """Cut [0, T) at `starts` and find the path above each segment, whose tokens have one subtree's end in common."""
    segments = []
    path: list[Span] = []
    for start, stop in zip(starts, [*starts[1:], len(end)], strict=True):
        while path and end[path[-1][0]] <= start:
            path.pop()
        path.append((start, stop))
        keys: list[Span] = []
        for span in path:
            if keys and keys[-1][1] == span[0]:
                span = (keys.pop()[0], span[1])
            keys.append(span)
        segments.append(Segment(start, stop, tuple(keys)))
    return tuple(segments)
