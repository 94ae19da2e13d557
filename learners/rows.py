"""From rollouts to micro-batches: the token paths that are trained, and how they are packed side by side.

Sits between `PrefixTree.rows` and the forward pass; `forest` packs the same rows so that they share what they begin
with. Everything after the forward pass is flat in the M trained tokens of a micro-batch, and only
`MicroBatch.predictors` says which hidden state predicts which of them: nothing behind it knows how rows were packed.
Invariant: every trained token of a rollout is in exactly one micro-batch, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clawgym_env.rollout import Exclusion, Rollout
from clawgym_env.trace.prefix_tree import Selection, TokenRow
from learners.advantages import Floats
from learners.tree_attention import ForestLayout


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One token path with what the loss needs beside the tokens."""

    tokens: TokenRow
    """Ends with a trained token."""
    advantages: npt.NDArray[np.float32]
    """Shape [T]; 0 where `tokens.loss_mask` is False."""
    weight: float
    """Of each trained token in the loss of the whole batch."""
    rollout: int
    """Position in the batch's survivors."""
    index: npt.NDArray[np.int64]
    """Shape [T]: which of the whole batch's trained tokens each is, counted row by row; -1 where none is trained."""

    def __len__(self) -> int:
        return len(self.tokens.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows that share one forward pass.

    A loss term belongs to a trained token of one row: where rows of a forest share a position, each has a term of its
    own there, with its own advantage, log-probability and weight.
    """

    token_ids: Tensor
    """Shape [B, L], int64, padded on the right: a causal model never looks at the padding from a real position. A
    forest is one row of T tokens."""
    predictors: Tensor
    """Shape [M], int64: the index, in the flattened [B * L] hidden states, of the one that predicts a trained token."""
    targets: Tensor
    """Shape [M], int64: the trained tokens."""
    rollout_logprobs: Tensor
    """Shape [M], nats, as sampled."""
    temperatures: Tensor
    """Shape [M]."""
    advantages: Tensor
    """Shape [M]."""
    weights: Tensor
    """Shape [M]."""
    index: Tensor
    """Shape [M], int64: which of the whole batch's trained tokens each is (`TrainingRow.index`)."""
    layout: ForestLayout | None = None
    """Of a forest; None where each row of `token_ids` is a sequence of its own."""
    old_logprobs: Tensor | None = None
    """Shape [M], nats, before the first of several steps on the batch; None where a single step sees them itself."""
    old_values: Tensor | None = None
    """Shape [M]: V(s_t) of a critic, likewise."""
    returns: Tensor | None = None
    """Shape [M]: what V(s_t) is to become, likewise."""


def trained_rows(rollout: Rollout, selection: Selection) -> tuple[TokenRow, ...]:
    """Return the rows of a rollout that train something, each cut after its last trained token.

    Raises:
        ValueError: the rollout was relayed, or a trained call was sampled in a way whose log-probabilities cannot be
            recomputed.
    """
    refuse_relayed(rollout)
    rows = []
    for row in rollout.tree.rows(selection):
        trained = np.flatnonzero(row.loss_mask)
        if not trained.size:
            continue
        for index in np.unique(row.call_indices[trained]):
            _require_trainable(rollout, int(index))
        end = int(trained[-1]) + 1
        rows.append(
            TokenRow(
                row.token_ids[:end],
                row.loss_mask[:end],
                row.logprobs[:end],
                row.policy_versions[:end],
                row.temperatures[:end],
                row.call_indices[:end],
            )
        )
    return tuple(rows)


def exclusion_under(rollout: Rollout, selection: Selection) -> Exclusion | None:
    """Return why a rollout does not count for a learner, if so.

    Branching is judged by the learner's own selection: the runner, which marks rollouts, only knows the default.
    """
    if not rollout.graded:
        return "ungraded"
    if rollout.tree.relayed:
        return "relayed"
    if rollout.exclusion not in (None, "over_branched"):
        return rollout.exclusion
    return "over_branched" if rollout.tree.over_branched(selection) else None


def refuse_relayed(rollout: Rollout) -> None:
    """Raise ValueError where an API model answered: the ids of such a rollout are nobody's."""
    if rollout.tree.relayed:
        raise ValueError(
            f"Expected rollouts of a policy of ours, got {rollout.id!r}, which was relayed to {rollout.policy!r}: no "
            "token ids of that model are known. Leave out rollouts with exclusion 'relayed'."
        )


def _require_trainable(rollout: Rollout, index: int) -> None:
    call = rollout.tree[index]
    if call.sampling.given:
        raise ValueError(
            f"Expected replies that an engine sampled, got call {index} of rollout {rollout.id!r}, whose tokens were "
            "given by the caller of step. Train on such rollouts by SFT, or sample with RouteCalls or CallEnv.sample."
        )
    if not call.sampling.trainable:
        raise ValueError(
            f"Expected rollouts sampled with temperature > 0, top_p=1 and top_k=0, got call {index} of rollout "
            f"{rollout.id!r} with {call.sampling}. Make the training environments with sampling=SamplingParams()."
        )
    if not call.prompt_len:
        raise ValueError(f"Expected a prompt before every trained token, got none in call {index} of {rollout.id!r}.")


def num_trained(rows: Sequence[TokenRow]) -> int:
    """Count the trained tokens of one rollout, |U_i|."""
    return sum(int(row.loss_mask.sum()) for row in rows)


def training_rows(rows_of: Sequence[Sequence[TokenRow]], advantages: Floats, weights: Floats) -> list[TrainingRow]:
    """Attach each survivor's advantage and token weight to its rows.

    Args:
        rows_of: the trained rows of each survivor, length N.
        advantages: shape [N].
        weights: shape [N], of one trained token each.
    """
    training: list[TrainingRow] = []
    seen = 0
    for rollout, (rows, advantage, weight) in enumerate(zip(rows_of, advantages, weights, strict=True)):
        for row in rows:
            signal = np.where(row.loss_mask, advantage, 0.0).astype(np.float32)
            index = np.where(row.loss_mask, seen + np.cumsum(row.loss_mask) - 1, -1)
            training.append(TrainingRow(row, signal, float(weight), rollout, index))
            seen += num_trained([row])
    return training


def pack(rows: Sequence[TrainingRow], *, max_tokens: int, device: torch.device | str = "cpu") -> list[MicroBatch]:
    """Group rows of similar length into padded micro-batches of at most `max_tokens` positions.

    A row longer than that gets a micro-batch of its own.
    """
    batches: list[MicroBatch] = []
    group: list[TrainingRow] = []
    # Longest first: the batch that needs the most memory comes at once, and each row pads to its batch's first.
    for row in sorted(rows, key=len, reverse=True):
        if group and (len(group) + 1) * len(group[0]) > max_tokens:
            batches.append(_collate(group, device))
            group = []
        group.append(row)
    if group:
        batches.append(_collate(group, device))
    return batches


def _collate(rows: Sequence[TrainingRow], device: torch.device | str) -> MicroBatch:
    width = len(rows[0])
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        token_ids[index, : len(row)] = row.tokens.token_ids
    places = [np.arange(len(row)) + index * width for index, row in enumerate(rows)]
    return micro_batch(rows, token_ids, places, device=device)


def nothing(*, device: torch.device | str = "cpu") -> MicroBatch:
    """Return a micro-batch of one token that trains none: what a process without rows takes through the model.

    Its loss is 0 with a gradient of 0 on every parameter, where collective operations wait for all processes.
    """
    return micro_batch([], np.zeros((1, 1), dtype=np.int64), [], device=device)


def micro_batch(
    rows: Sequence[TrainingRow],
    token_ids: npt.NDArray[np.int64],
    places: Sequence[npt.NDArray[np.int64]],
    *,
    device: torch.device | str,
    layout: ForestLayout | None = None,
) -> MicroBatch:
    """Collect the loss terms of packed rows.

    Args:
        rows: length R.
        token_ids: shape [B, L].
        places: of each row, where its tokens are in the flattened [B * L].
    """
    trained = [np.flatnonzero(row.tokens.loss_mask) for row in rows]

    def flat(arrays: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype, offset: int = 0) -> Tensor:
        parts = [array[index + offset] for array, index in zip(arrays, trained, strict=True)]
        return torch.as_tensor(np.concatenate(parts) if parts else np.empty(0), dtype=dtype, device=device)

    return MicroBatch(
        token_ids=torch.as_tensor(token_ids, device=device),
        predictors=flat(places, torch.int64, offset=-1),
        targets=flat([row.tokens.token_ids for row in rows], torch.int64),
        rollout_logprobs=flat([row.tokens.logprobs for row in rows], torch.float32),
        temperatures=flat([row.tokens.temperatures for row in rows], torch.float32),
        advantages=flat([row.advantages for row in rows], torch.float32),
        weights=flat([np.full(len(row), row.weight) for row in rows], torch.float32),
        index=flat([row.index for row in rows], torch.int64),
        layout=layout,
    )
