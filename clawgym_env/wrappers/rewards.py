"""Another reward out of the same rollout: parts of the grade weighed against what the rollout cost.

For learners of decisions around the model (which policy, which harness), which read the reward of `step`. Invariant:
the rollout keeps its grade, which is what learners of the model itself train on; give those a grader instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, SupportsFloat

import gymnasium as gym
from gymnasium.utils import RecordConstructorArgs

from clawgym_env.envs.rollout_vector import rollouts
from clawgym_env.rollout import Rollout

GRADE = "reward"
"""The name of the whole grade among the weights."""
COSTS: Mapping[str, Callable[[Rollout], float]] = MappingProxyType(
    {
        "num_calls": lambda rollout: len(rollout.tree),
        "num_prompt_tokens": lambda rollout: rollout.tree.num_prompt_tokens,
        "num_completion_tokens": lambda rollout: rollout.tree.num_completion_tokens,
        "seconds": lambda rollout: rollout.timing.get("total", 0.0),
    }
)
"""What a rollout can be charged for."""


@dataclass(frozen=True, slots=True)
class WeighedReward:
    """The reward of a rollout: sum of weight x part of the grade, less sum of price x cost."""

    weights: Mapping[str, float]
    costs: Mapping[str, float]

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.costs) - set(COSTS)):
            raise ValueError(f"Expected costs out of {', '.join(COSTS)}, got {', '.join(unknown)}.")

    def __call__(self, rollout: Rollout) -> float:
        """Return the reward; 0.0 without a grade, as everywhere.

        Raises:
            ValueError: the grade has no such part.
        """
        if rollout.grade is None:
            return 0.0
        parts = {**rollout.grade.components, GRADE: rollout.grade.reward}
        if missing := sorted(set(self.weights) - set(parts)):
            raise ValueError(
                f"Expected the grade of task {rollout.task_id!r} to have {', '.join(missing)}, "
                f"got {', '.join(sorted(parts))}."
            )
        worth = sum(weight * parts[name] for name, weight in self.weights.items())
        return float(worth - sum(price * COSTS[name](rollout) for name, price in self.costs.items()))


class RewardComponents(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Reward the weighted sum of parts of the grade, less what the rollout cost.

    Steps that finish no rollout are worth 0, and so is a rollout without a grade.

    Args:
        weights: by name of the part: "reward" is the whole grade (and alone the default), any other a component that
            the grader gives, as in `info["reward_components"]`.
        costs: prices of `num_calls`, `num_prompt_tokens`, `num_completion_tokens` and `seconds`.

    Raises:
        ValueError: an unknown cost; at a step, a part that the grade does not have.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        weights: Mapping[str, float] | None = None,
        *,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        RecordConstructorArgs.__init__(self, weights=weights, costs=costs)
        gym.Wrapper.__init__(self, env)
        self._worth = WeighedReward({GRADE: 1.0} if weights is None else weights, costs or {})

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Step, and weigh the finished rollout."""
        observation, _, terminated, truncated, info = self.env.step(action)
        return observation, sum(map(self._worth, rollouts(info)), 0.0), terminated, truncated, info
