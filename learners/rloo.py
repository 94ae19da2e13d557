"""Tree-RLOO: REINFORCE with a leave-one-out baseline on the prefix tree.

A rollout's advantage is what it earned beyond the mean of the others in its group: as tree-GRPO, but not divided by the
deviation, so that groups where rewards hardly differ hardly count.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clawgym_env.rollout import Rollout
from learners.advantages import Floats, group_key, leave_one_out
from learners.policy_gradient import PolicyGradientLearner


class TreeRLOO(PolicyGradientLearner):
    """RLOO whose groups are the rollouts of one task through one harness. See the base for the settings."""

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        """Return R − mean(R of the others) in each group; 0 without a second survivor to compare with."""
        rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
        return leave_one_out(rewards, [group_key(rollout) for rollout in rollouts])
