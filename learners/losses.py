"""The loss of a policy-gradient update, token by token.

Pure functions on flat tensors of the M trained tokens of a micro-batch; `policy_gradient` puts them together.
Everything is in nats and at the temperature a token was sampled with. Invariant: a token's weight depends on the whole
batch and never on how it is cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from learners.advantages import Floats, group_members

LossWeight: TypeAlias = Literal["rollout", "token", "group"]
LOSS_WEIGHTS: tuple[LossWeight, ...] = get_args(LossWeight)

TisMode: TypeAlias = Literal["truncate", "mask"]
TIS_MODES: tuple[TisMode, ...] = get_args(TisMode)


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Return the clipped surrogate, negated to be minimised, shape [M].

    −min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â) with ρ = π_θ / π_old: the ratio term of ClawGym II equation 6, its ε
    split in two as in DAPO (0.2 and 0.28 in the authors' released trainer).
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Return the squared error of a critic that may not go far in one update, shape [M].

    max((V − G)², (V_old + clip(V − V_old, −ε, ε) − G)²): the masked squared error of ClawGym II equation 4, clipped as
    in the code released with PPO (Schulman et al. 2017). Beyond ε a value has no gradient towards its return, but one
    that moved away from it is pulled back. `math.inf` leaves (V − G)².
    """
    clipped = old_values + (values - old_values).clamp(-clip, clip)
    return torch.maximum((values - returns).square(), (clipped - returns).square())


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float, mode: TisMode = "truncate"
) -> Tensor:
    """Return how much each token counts, given that another program sampled it, shape [M], without gradient.

    With r = π_old / π_rollout:

    - "truncate": w = min(r, c̄), ClawGym II equation 10. c̄ is not published; 2 is the default of the trainer its first
      version used.
    - "mask": w = r where 1/c̄ ≤ r ≤ c̄, else 0: a token on which the two programs disagree by more teaches nothing (as
      in IcePop, whose bounds are set apart).
    """
    ratio = torch.exp(old_logprobs - rollout_logprobs).detach()
    if mode == "mask":
        return torch.where((ratio <= cap) & (ratio * cap >= 1.0), ratio, 0.0)
    return ratio.clamp(max=cap)


def k3(log_ratio: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(q ‖ p) for each sample of q, shape of the input, never negative.

    exp(r) − 1 − r with r = log p − log q: unbiased, with less variance than −r (Schulman 2020, "Approximating KL
    divergence"). As a penalty q is π_θ and p the reference, ClawGym II equation 6.
    """
    return torch.expm1(log_ratio) - log_ratio


def token_weights(num_tokens: npt.NDArray[np.int64], keys: Sequence[Hashable], mode: LossWeight) -> Floats:
    """Return the weight of one trained token of each surviving rollout, shape [N].

    With U_i the distinct trained tokens of rollout i, each counted once however many branches share it:

    - "rollout": 1 / (N |U_i|), the mean over rollouts of the per-rollout token mean (ClawGym II equation 6);
    - "token": 1 / Σ_j |U_j|, the mean over tokens (DAPO);
    - "group": 1 / (G Σ_{j in the group of i} |U_j|), the mean over G groups of the token mean of the group.

    Args:
        num_tokens: |U_i|, shape [N], each at least 1.
        keys: the group of each rollout, length N.
    """
    counts = num_tokens.astype(np.float64)
    if mode == "rollout":
        return 1.0 / (len(counts) * counts)
    if mode == "token":
        return np.full_like(counts, 1.0 / max(counts.sum(), 1.0))
    groups = group_members(keys)
    weights = np.zeros_like(counts)
    for members in groups.values():
        weights[members] = 1.0 / (len(groups) * counts[members].sum())
    return weights
