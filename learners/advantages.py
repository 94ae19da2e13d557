"""Advantages of whole rollouts, from their rewards alone.

Pure functions between `Rollout.reward` and `rows.training_rows`; those of a critic are in `gae`. Invariant: statistics
are taken inside one group of trainable survivors, so a reward never moves the advantages of another group.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clawgym_env.rollout import Rollout

Floats: TypeAlias = npt.NDArray[np.float64]
GroupKey: TypeAlias = tuple[str, str, str]

DEVIATION_FLOOR = 0.2
"""Of `whitened`: the deviation of rewards of 0 and 1 when one rollout in 24 fails.

A policy better than that is not taught louder. The bandit of two steps a batch in `tests/learners/test_learning.py`
lost within 60 updates what it had learned on 2 of 5 seeds with a floor of 0 and with 0.1, on 1 of 15 with 0.2.
"""


def group_key(rollout: Rollout) -> GroupKey:
    """Return what the members of a group share: the draw, its task and its harness."""
    return rollout.group_id, rollout.task_id, rollout.harness


def group_members(keys: Sequence[Hashable]) -> Mapping[Hashable, list[int]]:
    """Return the positions that hold each key, in order of first appearance."""
    members: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        members.setdefault(key, []).append(position)
    return members


def group_relative(rewards: Floats, keys: Sequence[Hashable], *, epsilon: float = 1e-6) -> Floats:
    """Normalise each reward inside its group (GRPO).

    Â_i = (R_i − μ) / (σ + ε), with μ and the *population* σ (1/n) of the group: ClawGym II section 2.3, where the
    value is computed once per rollout and given to every trainable token of it.

    Args:
        rewards: shape [n], of trainable survivors only.
        keys: the group of each, length n.

    Returns:
        Shape [n]. Exactly 0 in a group of one and in a group whose rewards are all equal.
    """
    advantages = np.zeros_like(rewards)
    for members in group_members(keys).values():
        group = rewards[members]
        # Equality, not σ > 0: the mean of equal floats can differ from them by a rounding error.
        if group.min() < group.max():
            advantages[members] = (group - group.mean()) / (group.std() + epsilon)
    return advantages


def leave_one_out(rewards: Floats, keys: Sequence[Hashable]) -> Floats:
    """Compare each reward with the mean of the others in its group (RLOO).

    Â_i = R_i − (Σ_{j≠i} R_j) / (n − 1) = (R_i − μ) n / (n − 1): Kool et al. 2019; Ahmadian et al. 2024 for language
    models. Without a division by σ, and unbiased, since no reward is in its own baseline.

    Args:
        rewards: shape [n], of trainable survivors only.
        keys: the group of each, length n.

    Returns:
        Shape [n]. Exactly 0 in a group of one and in a group whose rewards are all equal.
    """
    advantages = np.zeros_like(rewards)
    for members in group_members(keys).values():
        group = rewards[members]
        if group.min() < group.max():
            advantages[members] = (group - group.mean()) * (len(group) / (len(group) - 1))
    return advantages


def whitened(advantages: Floats, weights: Floats, *, floor: float = DEVIATION_FLOOR) -> Floats:
    """Shift the advantages of a batch's tokens to mean 0 and scale them to deviation 1, under the weights of the loss.

    Â' = (Â − μ) / max(σ, floor). Where rewards are nearly equal, σ is the size of the critic's errors: divided by it
    they would push as hard as true differences do.

    Args:
        advantages: shape [U].
        weights: shape [U], of each token in the loss; they sum to 1.
        floor: the least deviation to divide by, in the unit of rewards; 0 is plain whitening.

    Returns:
        Shape [U]; its deviation is σ / floor where that is less than 1. Exactly 0 where all advantages are equal.
    """
    if not len(advantages) or advantages.min() == advantages.max():
        return np.zeros_like(advantages)
    centred = advantages - weights @ advantages
    return centred / max(float(np.sqrt(weights @ centred**2)), floor)


def group_metrics(rewards: Floats, keys: Sequence[Hashable]) -> dict[str, float]:
    """Count the groups of a batch and those that teach nothing.

    Returns:
        `groups/total`; `groups/zero_variance`, the share of groups with equal rewards, which includes
        `groups/singleton`, the share with a single survivor.
    """
    groups = [rewards[members] for members in group_members(keys).values()]
    total = max(len(groups), 1)
    return {
        "groups/total": float(len(groups)),
        "groups/zero_variance": sum(group.min() == group.max() for group in groups) / total,
        "groups/singleton": sum(len(group) == 1 for group in groups) / total,
    }
