"""The vector forms of the wrappers, under the same names, as in `gymnasium.wrappers.vector`.

Each does to every sub-environment what its single form does. Invariant: with SAME_STEP autoreset the finished
observations in `infos["final_obs"]` are changed in the same way as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import batch_space

from clawgym_env.envs.rollout_vector import RolloutVectorEnv, rollouts
from clawgym_env.wrappers.features import DEFAULT_SIZE, Features, TaskEncoder
from clawgym_env.wrappers.harness_action import HARNESS, Choices, without_harness
from clawgym_env.wrappers.rewards import GRADE, WeighedReward

Batch = dict[str, Any]
Infos = dict[str, Any]
Step = tuple[Any, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], Infos]


class TaskFeatures(VectorWrapper[Features, Any, Batch, Any, npt.NDArray[Any]]):
    """Observe features of task and harness, shape [num_envs, size + number of harnesses]; see the single form."""

    def __init__(self, env: VectorEnv[Batch, Any, npt.NDArray[Any]], *, size: int = DEFAULT_SIZE) -> None:
        super().__init__(env)
        self._encode = TaskEncoder(env.single_observation_space, size)
        self.single_observation_space = self._encode.space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Features, Infos]:
        """Draw tasks and return their features."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return self._features(observations), infos

    def step(self, actions: Any) -> Step:
        """Step; the features are those of the observations after it."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        infos = _with_final(infos, lambda one: self._encode(one["instruction"], one.get(HARNESS)))
        return self._features(observations), rewards, terminations, truncations, infos

    def _features(self, observations: Batch) -> Features:
        harnesses = observations.get(HARNESS, [None] * self.num_envs)
        return np.stack(list(map(self._encode, observations["instruction"], harnesses)))


class RewardComponents(VectorWrapper[Any, Any, Any, Any, npt.NDArray[Any]]):
    """Reward parts of the grades, less what the rollouts cost; see the single form."""

    def __init__(
        self,
        env: VectorEnv[Any, Any, npt.NDArray[Any]],
        weights: Mapping[str, float] | None = None,
        *,
        costs: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(env)
        self._worth = WeighedReward({GRADE: 1.0} if weights is None else weights, costs or {})

    def step(self, actions: Any) -> Step:
        """Step, and weigh the finished rollouts."""
        observations, rewards, terminations, truncations, infos = self.env.step(actions)
        worth = np.zeros_like(rewards)
        finished = np.flatnonzero(terminations | truncations)
        worth[finished] = list(map(self._worth, rollouts(infos)))
        return observations, worth, terminations, truncations, infos


class HarnessAction(VectorWrapper[Batch, Any, Batch, Any, npt.NDArray[Any]]):
    """Choose harness and policy for every drawn task; see the single form.

    Needs groups of one: members of a larger group share the harness, so they could not choose one each.
    """

    def __init__(self, env: VectorEnv[Batch, Any, npt.NDArray[Any]]) -> None:
        super().__init__(env)
        base = env.unwrapped
        if not isinstance(base, RolloutVectorEnv):
            raise TypeError(f"Expected vector environments on the rollout clock, got {base}.")
        if base.group_size != 1:
            raise ValueError(f"Expected group_size=1, where each rollout has a harness, got {base.group_size}.")
        self._base = base
        self._choices = Choices(base.harness_names, base.policy_names)
        self.choices = self._choices.names
        self.single_action_space = self._choices.space
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.single_observation_space = without_harness(env.single_observation_space)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Batch, Infos]:
        """Draw tasks; the harnesses are the next action's choice."""
        observations, infos = self.env.reset(seed=seed, options=options)
        return _without(observations), _without(infos)

    def step(self, actions: Any) -> Step:
        """Run the drawn tasks with the chosen harnesses and policies."""
        chosen = np.array(list(map(self._choices.split, actions)), dtype=np.int64).reshape(-1, 2)
        self._base.choose_harnesses(chosen[:, 0])
        observations, rewards, terminations, truncations, infos = self.env.step(chosen[:, 1])
        if "final_info" in infos:  # What is left are the infos of the next tasks' reset.
            infos = _without(infos)
        return _without(observations), rewards, terminations, truncations, _with_final(infos, _without)


def _without(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in (HARNESS, f"_{HARNESS}")}


def _with_final(infos: Infos, change: Callable[[Batch], object]) -> Infos:
    """Return the infos of a step with the finished observations changed."""
    if "final_obs" not in infos:
        return infos
    final = np.full(len(infos["final_obs"]), None, dtype=object)
    for i, observation in enumerate(infos["final_obs"]):
        final[i] = None if observation is None else change(observation)
    return {**infos, "final_obs": final}
