"""Tree-REINFORCE: the plain policy gradient on the prefix tree, with the batch as its baseline.

Needs no groups: with one rollout a task, what a rollout earned is compared with what the others of the batch did. It
does not tell a lucky rollout from an easy task, which groups (`grpo`, `rloo`) and critics (`ppo`) do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clawgym_env.rollout import Rollout
from learners.advantages import Floats, leave_one_out
from learners.policy_gradient import PolicyGradientLearner


class TreeReinforce(PolicyGradientLearner):
    """REINFORCE (Williams 1992) with a baseline. See the base for the settings."""

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        """Return R − mean(R of all others in the batch), a baseline that no rollout has a part in itself."""
        rewards = np.array([rollout.reward for rollout in rollouts], dtype=np.float64)
        return leave_one_out(rewards, ["batch"] * len(rollouts))
