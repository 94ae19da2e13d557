"""Wrappers of the call clock: which policy answers the next call, and what a small learner sees of it.

`RouteCalls` makes the model call a decision among engines, `CallFeatures` makes the call that waits a vector; together
they are a decision process of many steps for stable-baselines3 and the like. Invariant: a routed call is recorded as
its engine sampled it, so what trains the engines can train on routed rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, SupportsFloat, get_args

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from clawgym_env._loop import shared_loop
from clawgym_env.engine.base import SamplingParams
from clawgym_env.envs._shared import share, unshare
from clawgym_env.envs.arms import Arms, Policies
from clawgym_env.envs.call import CallEnv
from clawgym_env.trace.calls import CallKind
from clawgym_env.wrappers.hashing import hashed_text

Features = npt.NDArray[np.float32]
DEFAULT_SIZE = 256
KINDS: tuple[CallKind, ...] = get_args(CallKind)
NUMBERS = 4
"""Features that are neither words nor kinds; see `CallFeatures`."""


class RouteCalls(gym.Wrapper[Any, Any, Any, Any], RecordConstructorArgs):
    """Choose which policy answers the call that waits: `action_space` is `Discrete(number of policies)`.

    Infos of steps name the policy that answered as `policy`; the last one counts them as `calls_by_policy`. A policy
    that fails is asked no more: its call waits once more for a choice, and a second failure ends the episode as
    `engine_error`.

    Args:
        env: an environment on the call clock, made with `policy=` whose tokens all of `policies` read and write.
        policies: by name: an embedded policy, an engine (a live one is not closed here), or `ServedPolicy`s.
        sampling: of policies that bring none of their own.

    Raises:
        TypeError: another clock.
        PolicyNotBuilt, ValueError: when a policy is first chosen: it is not there, or reads and writes other tokens.
    """

    def __init__(
        self,
        env: gym.Env[Any, Any],
        policies: Policies,
        *,
        sampling: SamplingParams | Mapping[str, float] | None = None,
    ) -> None:
        RecordConstructorArgs.__init__(self, policies=share(policies), sampling=sampling)
        gym.Wrapper.__init__(self, env)
        self._base = _call_env(env)
        self._arms = Arms(unshare(policies), sampling=SamplingParams.model_validate(sampling or {}))
        self._answered: Counter[str] = Counter()
        self.action_space = spaces.Discrete(len(self.policy_names))

    @property
    def policy_names(self) -> tuple[str, ...]:
        """What the action chooses from, in order."""
        return self._arms.names

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode."""
        self._answered.clear()
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, SupportsFloat, bool, bool, dict[str, Any]]:
        """Let policy number `action` answer the call that waits."""
        if not self.action_space.contains(action):
            raise ValueError(f"Expected an action of {self.action_space}, got {action!r}.")
        served = self._arms.served(int(action))
        reply = self._base.sample(served.engine, served.sampling)
        observation, reward, terminated, truncated, info = self.env.step(reply)
        self._answered[served.name] += 1
        info = {**info, "policy": served.name}
        if terminated or truncated:
            info["calls_by_policy"] = {name: self._answered[name] for name in self.policy_names}
        return observation, reward, terminated, truncated, info

    def close(self) -> None:
        """End the episode, and the engines made here. Idempotent."""
        super().close()
        shared_loop().run(self._arms.close())


class CallFeatures(gym.Wrapper[Features, Any, Any, Any], RecordConstructorArgs):
    """Observe the call that waits as a `Box` of shape [size + 4 + 4], float32 in [-1, 1]; zeros at the end.

    Words of the conversation's latest message are hashed into `size` places (see `wrappers.hashing`). Then come the
    number of calls answered so far and the tokens of the prompt (each as a logarithm), whether the message is a tool's
    result, whether the call opens a conversation, and one place for each kind of call.

    Args:
        size: places for words; more of them make fewer words share one.

    Raises:
        TypeError: another clock.
        ValueError: `size` is not positive.
    """

    def __init__(self, env: gym.Env[Any, Any], *, size: int = DEFAULT_SIZE) -> None:
        if size < 1:
            raise ValueError(f"Expected size >= 1, got {size}.")
        RecordConstructorArgs.__init__(self, size=size)
        gym.Wrapper.__init__(self, env)
        self._base = _call_env(env)
        self._size = size
        self._answered = 0
        self.observation_space = spaces.Box(-1.0, 1.0, (size + NUMBERS + len(KINDS),), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Features, dict[str, Any]]:
        """Start the next episode."""
        _, info = self.env.reset(seed=seed, options=options)
        self._answered = 0
        return self._features(), info

    def step(self, action: Any) -> tuple[Features, SupportsFloat, bool, bool, dict[str, Any]]:
        """Answer the call that waits."""
        _, reward, terminated, truncated, info = self.env.step(action)
        self._answered += 1
        return self._features(), reward, terminated, truncated, info

    def _features(self) -> Features:
        asked = self._base.pending
        if asked is None:
            return np.zeros(self.observation_space.shape or (), dtype=np.float32)
        latest = asked.call.request.messages[-1]
        numbers = (
            _as_logarithm(self._answered, 1 << 8),
            _as_logarithm(len(asked.prompt_token_ids), 1 << 20),
            float(latest.role == "tool"),
            float(asked.call.parent_id is None),
        )
        kinds = [float(asked.kind == kind) for kind in KINDS]
        return np.concatenate([hashed_text(latest.content, self._size), np.array([*numbers, *kinds], dtype=np.float32)])


def _call_env(env: gym.Env[Any, Any]) -> CallEnv:
    base = env.unwrapped
    if not isinstance(base, CallEnv):
        raise TypeError(f"Expected an environment on the call clock, such as ClawGym-Mini-Call-v0, got {base}.")
    return base


def _as_logarithm(count: int, most: int) -> float:
    return float(min(np.log1p(count) / np.log1p(most), 1.0))
