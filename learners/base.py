"""The learner contract: finished rollouts in, a better policy out.

The last stage of the data flow: environments return `Rollout`s, `update` turns a batch of them into a weight update of
the policy behind `engine()`, and the environments go on with that same engine. Invariant: a learner never changes
weights but inside `Engine.update_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

from clawgym_env.engine.base import Engine
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

LearnerState: TypeAlias = Mapping[str, object]
"""Tensors, numbers, and containers of them: what `torch.save` writes and `torch.load(weights_only=True)` reads."""


@runtime_checkable
class Learner(Protocol):
    """Anything that learns from rollouts."""

    def engine(self) -> Engine:
        """Return the engine that samples from the policy being trained, the same one at every call."""

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learn from one batch and return its metrics, keys `group/name`."""

    def state_dict(self) -> LearnerState:
        """Return everything `load_state_dict` needs to go on exactly; tensors are the live ones, not copies."""

    def load_state_dict(self, state: LearnerState) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ValueError: the state belongs to a learner of another shape.
        """


@runtime_checkable
class TrainsPolicy(Protocol):
    """A learner whose policy is at hand: checkpoints write it as a plain Hugging Face folder."""

    @property
    def policy(self) -> Policy:
        """What is trained, in place."""


@runtime_checkable
class TakesSchedule(Protocol):
    """A learner whose learning rate can be scheduled."""

    def scale_learning_rate(self, factor: float) -> None:
        """Take the next updates at `factor` times the learning rate given at construction."""


@runtime_checkable
class TrainsCalls(Protocol):
    """A learner that says which calls it trains, and by how much an update raises `Engine.policy_version`."""

    @property
    def selection(self) -> Selection:
        """Which calls' tokens are trained."""

    @property
    def updates_per_batch(self) -> int:
        """Weight updates of one `update`, at most."""
