"""Stable-baselines3 on top of ClawGym: a router, not a trainer of the language model.

SB3 knows no text and its networks have a few thousand weights: it cannot train the model behind the harness (the other
learners here do). It can learn the decision around it: which policy, in which harness, answers which task.

    envs = gym.make_vec("ClawGym-Mix-v0", num_envs=16, policies={"small": ..., "large": ...})
    envs = TaskFeatures(HarnessAction(envs))        # both from clawgym_env.wrappers.vector
    PPO("MlpPolicy", as_vec_env(envs), gamma=1.0).learn(1000)

Episodes of the rollout clock are one step long, so `gamma` weighs nothing but a rollout that infrastructure left
without a grade: those alone are reported as `TimeLimit.truncated`, for which SB3 puts its own estimate of the value in
the reward's place; to PPO at `gamma=1` that is an advantage of zero. A budget cut has its grade and is final. (A single
environment given to SB3 is wrapped by SB3 itself, which adds its estimate to every cut: take `gamma=0` there.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium import Space, spaces
from gymnasium.vector import AutoresetMode, VectorEnv

from clawgym_env.extras import require_package

require_package("stable_baselines3")

from stable_baselines3.common.vec_env import VecEnv, VecMonitor  # noqa: E402
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices, VecEnvObs, VecEnvStepReturn  # noqa: E402

Infos: TypeAlias = Mapping[str, Any]
_READABLE = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def as_vec_env(envs: VectorEnv[Any, Any, npt.NDArray[Any]]) -> VecMonitor:
    """Return vector environments in SB3's own convention, with the statistics of episodes.

    Finished observations come as `terminal_observation`, `is_success` feeds `rollout/success_rate`, and each info is
    that of one rollout. Closing it closes `envs`.

    Args:
        envs: with observations and actions of numbers: see `clawgym_env.wrappers.vector`. Autoreset DISABLED (they are
            reset here) or SAME_STEP.

    Raises:
        TypeError: spaces that SB3 cannot read, with the wrapper that helps.
        ValueError: autoreset NEXT_STEP.
    """
    return VecMonitor(_VectorEnvAsVecEnv(envs))


class _VectorEnvAsVecEnv(VecEnv):
    def __init__(self, envs: VectorEnv[Any, Any, npt.NDArray[Any]]) -> None:
        if not _readable(envs.single_observation_space):
            raise TypeError(
                f"Expected observations of numbers, got {envs.single_observation_space}. "
                "Wrap the environments in clawgym_env.wrappers.vector.TaskFeatures."
            )
        mode = envs.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.DISABLED, AutoresetMode.SAME_STEP):
            raise ValueError(
                f"Expected autoreset DISABLED or SAME_STEP, got {mode}. Pass autoreset_mode to gym.make_vec "
                "(in vector_kwargs, with Gymnasium's own vectorisation)."
            )
        self._same_step = mode is AutoresetMode.SAME_STEP
        self._envs = envs
        self._actions: npt.NDArray[Any] = np.zeros(0)
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> VecEnvObs:
        if any(options != self._options[0] for options in self._options):
            raise ValueError("Expected the same reset options for all environments. Pass set_options one dictionary.")
        # One seed and one set of options: the vector environment makes those of its members itself.
        observations: VecEnvObs
        observations, infos = self._envs.reset(seed=self._seeds[0], options=self._options[0] or None)
        self.reset_infos = [_info_of(infos, i) for i in range(self.num_envs)]
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: npt.NDArray[Any]) -> None:
        self._actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        observations, rewards, terminations, truncations, infos = self._envs.step(self._actions)
        done = terminations | truncations
        last, of_last, next_infos = observations, infos, infos
        if self._same_step:
            last, of_last = infos.get("final_obs"), infos.get("final_info", {})
        elif done.any():
            observations, next_infos = self._envs.reset(options={"reset_mask": done})
        finished = []
        for i in range(self.num_envs):
            info = _info_of(of_last if done[i] else infos, i)
            if done[i]:
                cut = bool(truncations[i] and not terminations[i] and not info.get("graded", False))
                info |= {"terminal_observation": _member(last, i), "TimeLimit.truncated": cut}
                self.reset_infos[i] = _info_of(next_infos, i)
            finished.append(info)
        return observations, rewards.astype(np.float32), done, finished

    def close(self) -> None:
        self._envs.close()

    # One object plays all members: what is asked of several is asked once.

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        value = getattr(self._envs if hasattr(self._envs, attr_name) else self._envs.unwrapped, attr_name)
        return [value for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        setattr(self._envs.unwrapped, attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        [method] = self.get_attr(method_name, 0)
        result = method(*method_args, **method_kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: VecEnvIndices = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]


def _readable(space: Space[Any]) -> bool:
    parts: Sequence[Space[Any]] = list(space.spaces.values()) if isinstance(space, spaces.Dict) else [space]
    return all(isinstance(part, _READABLE) for part in parts)


def _member(batch: Any, i: int) -> Any:
    """Return observation i out of a batch, or out of an array of finished observations."""
    return {key: part[i] for key, part in batch.items()} if isinstance(batch, Mapping) else batch[i]


def _info_of(infos: Infos, i: int) -> dict[str, Any]:
    """Return the info of member i, as its single environment would give it."""
    info: dict[str, Any] = {}
    for key, values in infos.items():
        if key.startswith("_") or key in ("final_obs", "final_info") or not infos[f"_{key}"][i]:
            continue
        value = _info_of(values, i) if isinstance(values, dict) else values[i]
        info[key] = value.item() if isinstance(value, np.generic) else value
    return info
