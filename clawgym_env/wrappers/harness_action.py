"""An action that picks the harness as well as the policy: the whole decision around a rollout.

Invariant: what the action decides is not observed before it, so harnesses are taken out of observations and of the
infos of resets; the infos of finished rollouts name the one that ran.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from clawgym_env.envs.rollout import RolloutEnv

HARNESS = "harness"


class Choices:
    """The numbered pairs of harness and policy, all policies of the first harness first."""

    def __init__(self, harnesses: Sequence[str], policies: Sequence[str]) -> None:
        self.names = tuple((harness, policy) for harness in harnesses for policy in policies)
        self.space = spaces.Discrete(len(self.names))
        self._num_policies = len(policies)

    def split(self, action: np.integer[Any] | int) -> tuple[int, int]:
        """Return the numbers of harness and policy of an action."""
        if not self.space.contains(action):
            raise ValueError(f"Expected an action of {self.space}, got {action!r}.")
        harness, policy = divmod(int(action), self._num_policies)
        return harness, policy


def without_harness(space: gym.Space[Any]) -> spaces.Dict:
    """Return the space of observations without the harness."""
    if not isinstance(space, spaces.Dict) or HARNESS not in space.spaces:
        raise TypeError(f"Expected observations with a harness, got {space}. Put HarnessAction inside other wrappers.")
    return spaces.Dict({key: part for key, part in space.spaces.items() if key != HARNESS})


class HarnessAction(gym.Wrapper[dict[str, Any], Any, dict[str, Any], Any], RecordConstructorArgs):
    """Choose harness and policy for the drawn task: `action_space` is `Discrete(harnesses x policies)`.

    `choices[action]` names the pair. A task that the chosen harness cannot do raises `HarnessUnsuitable` at the step.
    """

    def __init__(self, env: gym.Env[dict[str, Any], Any]) -> None:
        RecordConstructorArgs.__init__(self)
        gym.Wrapper.__init__(self, env)
        base = env.unwrapped
        if not isinstance(base, RolloutEnv):
            raise TypeError(f"Expected an environment on the rollout clock, got {base}.")
        self._base = base
        self._choices = Choices(base.harness_names, base.policy_names)
        self.choices = self._choices.names
        self.action_space = self._choices.space
        self.observation_space = without_harness(env.observation_space)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Draw a task; the harness is the next action's choice."""
        observation, info = self.env.reset(seed=seed, options=options)
        return _without(observation), _without(info)

    def step(self, action: Any) -> tuple[dict[str, Any], SupportsFloat, bool, bool, dict[str, Any]]:
        """Run the drawn task with the chosen harness and policy."""
        harness, policy = self._choices.split(action)
        self._base.choose_harness(harness)
        observation, reward, terminated, truncated, info = self.env.step(policy)
        return _without(observation), reward, terminated, truncated, info


def _without(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != HARNESS}
