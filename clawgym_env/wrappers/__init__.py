"""Gymnasium wrappers for learners of the decisions around the model; `wrappers.vector` has their vector forms.

The call clock has no vector form of its own, so neither have `RouteCalls` and `CallFeatures`.
"""

from clawgym_env.wrappers.calls import CallFeatures, RouteCalls
from clawgym_env.wrappers.features import TaskFeatures
from clawgym_env.wrappers.harness_action import HarnessAction
from clawgym_env.wrappers.rewards import RewardComponents

__all__ = ["CallFeatures", "HarnessAction", "RewardComponents", "RouteCalls", "TaskFeatures"]
