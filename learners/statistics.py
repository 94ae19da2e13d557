"""What an update saw, averaged over the trained tokens of its micro-batches.

Filled by `policy_gradient`, read into the metrics dict. Invariant: it holds sums only, so the averages do not depend on
how the batch is cut, nor over how many processes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.losses import k3
from learners.sharding import Processes

AVERAGED = (
    "tis/clip_fraction",
    "tis/mean_abs_w_minus_1",
    "kl/rollout_old_k3",
    "ratio/clip_fraction",
    "entropy",
)
"""What `TokenStatistics` sums up, in this order."""


class ValueStatistics:
    """Running sums over what a critic said of tokens, and what it should have said."""

    def __init__(self) -> None:
        self._sums = torch.zeros(6, dtype=torch.float64)

    @torch.no_grad()
    def add(self, values: Tensor, returns: Tensor) -> None:
        """Add the tokens of one micro-batch: V(s_t) and G_t, each of shape [M]."""
        value, target = values.double(), returns.double()
        error = target - value
        parts = (torch.ones_like(value), value, target, target.square(), error, error.square())
        self._sums += torch.stack([part.sum() for part in parts]).cpu()

    def metrics(self, processes: Processes) -> dict[str, float]:
        """Return means, and 1 − Var(G − V) / Var(G) where returns differ; nothing without tokens."""
        tokens, *sums = processes.total(self._sums).tolist()
        if not tokens:
            return {}
        value, target, target_square, error, error_square = (total / tokens for total in sums)
        means = {"value/mean": value, "value/return_mean": target}
        variance = target_square - target**2
        if variance < 1e-12:
            return means
        return {**means, "value/explained_variance": 1.0 - (error_square - error**2) / variance}


class TokenStatistics:
    """Running sums over tokens; a token counts once per pass over the batch."""

    def __init__(self) -> None:
        self.values = ValueStatistics()
        self._sums = torch.zeros(1 + len(AVERAGED), dtype=torch.float64)
        self._max_abs_diff = 0.0

    @torch.no_grad()
    def add(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        importance: Tensor,
        entropies: Tensor,
        clip_low: float,
        clip_high: float,
    ) -> None:
        """Add the tokens of one micro-batch; every tensor has shape [M]."""
        if not len(logprobs):
            return
        shift = old_logprobs - rollout_logprobs
        ratio = torch.exp(logprobs - old_logprobs)
        self._max_abs_diff = max(self._max_abs_diff, float(shift.abs().max()))
        columns = (
            torch.ones_like(shift),
            importance != shift.exp(),  # cut to the cap, or left out
            (importance - 1.0).abs(),
            k3(shift),
            (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high),
            entropies,
        )
        self._sums += torch.stack([column.double().sum() for column in columns]).cpu()

    def metrics(self, processes: Processes) -> dict[str, float]:
        """Return the averages over all processes; nothing when no token was trained."""
        values = self.values.metrics(processes)
        tokens, *sums = processes.total(self._sums).tolist()
        largest = processes.largest(self._max_abs_diff)
        if not tokens:
            return {}
        averages = {name: total / tokens for name, total in zip(AVERAGED, sums, strict=True)}
        return {**averages, "logprob/max_abs_diff": largest, **values}
