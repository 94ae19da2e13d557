"""What an update saw, averaged over the trained tokens of its micro-batches.

Filled by `policy_gradient`, read into the metrics dict. Invariant: it holds sums only, so the averages do not depend on
how the batch is cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from learners.losses import k3


class ValueStatistics:
    """Running sums over what a critic said of tokens, and what it should have said."""

    def __init__(self) -> None:
        self._sums = torch.zeros(5, dtype=torch.float64)
        self._tokens = 0

    @torch.no_grad()
    def add(self, values: Tensor, returns: Tensor) -> None:
        """Add the tokens of one micro-batch: V(s_t) and G_t, each of shape [M]."""
        value, target = values.double(), returns.double()
        error = target - value
        sums = torch.stack([part.sum() for part in (value, target, target.square(), error, error.square())])
        self._sums += sums.cpu()
        self._tokens += len(values)

    def metrics(self) -> dict[str, float]:
        """Return means, and 1 − Var(G − V) / Var(G) where returns differ; nothing without tokens."""
        if not self._tokens:
            return {}
        value, target, target_square, error, error_square = (self._sums / self._tokens).tolist()
        means = {"value/mean": value, "value/return_mean": target}
        variance = target_square - target**2
        if variance < 1e-12:
            return means
        return {**means, "value/explained_variance": 1.0 - (error_square - error**2) / variance}


class TokenStatistics:
    """Running sums over tokens; a token counts once per pass over the batch."""

    def __init__(self) -> None:
        self.values = ValueStatistics()
        self._sums: dict[str, float] = {}
        self._max_abs_diff = 0.0
        self._tokens = 0

    @torch.no_grad()
    def add(
        self,
        *,
        logprobs: Tensor,
        old_logprobs: Tensor,
        rollout_logprobs: Tensor,
        importance: Tensor,
        entropies: Tensor,
        tis_cap: float,
        clip_low: float,
        clip_high: float,
    ) -> None:
        """Add the tokens of one micro-batch; every tensor has shape [M]."""
        if not len(logprobs):
            return
        shift = old_logprobs - rollout_logprobs
        ratio = torch.exp(logprobs - old_logprobs)
        self._tokens += len(logprobs)
        self._max_abs_diff = max(self._max_abs_diff, float(shift.abs().max()))
        for name, values in (
            ("tis/clip_fraction", shift.exp() > tis_cap),
            ("tis/mean_abs_w_minus_1", (importance - 1.0).abs()),
            ("kl/rollout_old_k3", k3(shift)),
            ("ratio/clip_fraction", (ratio < 1.0 - clip_low) | (ratio > 1.0 + clip_high)),
            ("entropy", entropies),
        ):
            self._sums[name] = self._sums.get(name, 0.0) + float(values.double().sum())

    def metrics(self) -> dict[str, float]:
        """Return the averages; nothing when no token was trained."""
        if not self._tokens:
            return {}
        averages = {name: total / self._tokens for name, total in self._sums.items()}
        return {**averages, "logprob/max_abs_diff": self._max_abs_diff, **self.values.metrics()}
