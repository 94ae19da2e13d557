"""Controls: what an experiment changes to show that it learns from what it claims to learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from clawgym_env.rollout import Rollout
from learners.advantages import group_key, group_members


def shuffle_rewards(
    rollouts: Sequence[Rollout], rng: np.random.Generator, *, within_groups: bool = True
) -> list[Rollout]:
    """Permute the grades among the graded rollouts of each group; means and deviations stay, the signal goes.

    Args:
        within_groups: else among all of the batch, for learners that need no groups.
    """
    graded = [rollout for rollout in rollouts if rollout.graded]
    source = {rollout: rollout for rollout in rollouts}
    keys = [group_key(rollout) if within_groups else "batch" for rollout in graded]
    for members in group_members(keys).values():
        source |= {graded[a]: graded[b] for a, b in zip(members, rng.permutation(members), strict=True)}
    return [dataclasses.replace(rollout, grade=source[rollout].grade) for rollout in rollouts]
