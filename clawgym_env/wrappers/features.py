"""What a small learner sees of a rollout environment: the task and the harness as a vector.

Stable-baselines3 and the like know no text. Invariant: the features are those known before the rollout runs, so the
observation after a step equals the one before it; response and tree stay in `info["rollout"]`.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium import spaces
from gymnasium.utils import RecordConstructorArgs

from clawgym_env.wrappers.hashing import hashed_text

Features = npt.NDArray[np.float32]
DEFAULT_SIZE = 256


class TaskEncoder:
    """Turns observations of one space into features."""

    def __init__(self, space: gym.Space[Any], size: int) -> None:
        """Read off the space what there is to encode.

        Raises:
            ValueError: `size` is not positive.
            TypeError: the space has no instruction.
        """
        if size < 1:
            raise ValueError(f"Expected size >= 1, got {size}.")
        if not isinstance(space, spaces.Dict) or "instruction" not in space.spaces:
            raise TypeError(f"Expected observations with an instruction, got {space}. Wrap the rollout clock.")
        self._size = size
        harness = space.spaces.get("harness")
        self._num_harnesses = int(harness.n) if isinstance(harness, spaces.Discrete) else 0
        self.space = spaces.Box(-1.0, 1.0, (size + self._num_harnesses,), np.float32)

    def __call__(self, instruction: str, harness: int | None) -> Features:
        """Return the hashed instruction, then a 1 at the harness's place (where harnesses are observed)."""
        place = np.zeros(self._num_harnesses, dtype=np.float32)
        if self._num_harnesses and harness is not None:
            place[harness] = 1.0
        return np.concatenate([hashed_text(instruction, self._size), place])


class TaskFeatures(
    gym.ObservationWrapper[Features, Any, dict[str, Any]],
    RecordConstructorArgs,
):
    """Observe a `Box` of shape [size + number of harnesses], float32 in [-1, 1], instead of text and tree.

    Words and pairs of words of the instruction are hashed into `size` places (see `wrappers.hashing`); the harness
    follows as one place each. Inside `HarnessAction`, which chooses the harness, the instruction is all there is.

    Args:
        size: places for the instruction; more of them make fewer words share one.
    """

    def __init__(self, env: gym.Env[dict[str, Any], Any], *, size: int = DEFAULT_SIZE) -> None:
        RecordConstructorArgs.__init__(self, size=size)
        gym.ObservationWrapper.__init__(self, env)
        self._encode = TaskEncoder(env.observation_space, size)
        self.observation_space = self._encode.space

    def observation(self, observation: dict[str, Any]) -> Features:
        """Return the features of an observation."""
        return self._encode(observation["instruction"], observation.get("harness"))
