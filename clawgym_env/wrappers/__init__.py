"""Gymnasium wrappers for learners of the decisions around the model; `wrappers.vector` has their vector forms."""

from clawgym_env.wrappers.features import TaskFeatures
from clawgym_env.wrappers.harness_action import HarnessAction
from clawgym_env.wrappers.rewards import RewardComponents

__all__ = ["HarnessAction", "RewardComponents", "TaskFeatures"]
