"""Tree-GRPO: group-relative policy optimization on the prefix tree.

The learner of `examples/train_grpo.py`. All trained tokens of a rollout, on whatever branch, share one advantage, and a
token that several branches share counts once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clawgym_env.rollout import Rollout
from learners.advantages import Floats, group_key, group_relative
from learners.policy_gradient import PolicyGradientLearner


class TreeGRPO(PolicyGradientLearner):
    """GRPO whose groups are the rollouts of one task through one harness. See the base for the settings."""

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        """Return (R − μ) / (σ + ε) in each group; 0 without a second survivor to compare with."""
        rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
        return group_relative(rewards, [group_key(rollout) for rollout in rollouts])
