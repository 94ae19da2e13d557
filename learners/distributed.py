"""One training script on several processes: `torchrun` starts them all, rank 0 runs the script, the others follow.

At the border, around a learner with a mesh; `sharding` lies under it. Rank 0 alone has environments, an engine, a run
directory and a terminal. Whatever it asks of its learner is sent to the others first, rollouts and all, so that every
process takes the same steps in the same order. Invariant: to a `Trainer`, such a learner is one that is alone.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from clawgym_env.engine.base import Engine, Generation, SamplingParams, TokenIds
from clawgym_env.errors import EngineError
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection
from learners.base import LearnerState

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.policy import Policy
    from learners.policy_gradient import PolicyGradientLearner

L = TypeVar("L", bound="PolicyGradientLearner")
STOP = "stop"
NOTHING: tuple[str, tuple[object, ...], dict[str, object]] = ("", (), {})
"""What the others say while rank 0 says what it does."""


@contextmanager
def torchrun_mesh(device: str = "cpu") -> Iterator[DeviceMesh | None]:
    """Give a learner's `mesh` over the processes that `torchrun` started; None where it started one or none.

    To be called by scripts: it reads torchrun's environment variables.

    Args:
        device: "cpu", or "cuda" for one GPU a process; load the policy onto "cuda" then, which is the process's own.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield init_device_mesh(device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def lead(learner: L, train: Callable[[L], None]) -> None:
    """Run `train(learner)` on rank 0, while the others do with their learners what it does with its own.

    Returns on all processes when it has ended, also by an error of `train`, which is raised on rank 0. An error of the
    learner itself is raised where it happened; `torchrun` ends the other processes when that one ends. Alone, it is a
    plain call.

    Args:
        learner: made by every process in the same way.
        train: gets the learner of rank 0, on which it may call `update`, `pretrain_value`, `scale_learning_rate`,
            `state_dict`, `load_state_dict` and `engine`, and whose `policy`, `selection` and `updates_per_batch` it may
            read.
    """
    if learner.processes.size == 1:
        train(learner)
    elif learner.processes.rank:
        _follow(learner)
    else:
        leader = _Leader(learner)
        try:
            train(cast(L, leader))
        except BaseException:
            if not leader.failed:
                leader.stop()
            raise
        leader.stop()


class _Leader:
    """A learner on rank 0 whose calls the others hear of."""

    def __init__(self, learner: PolicyGradientLearner) -> None:
        self._learner = learner
        self.failed = False
        """Whether a call failed here: the others are somewhere within it, and no message would reach them there."""

    @property
    def policy(self) -> Policy:
        return self._learner.policy

    @property
    def selection(self) -> Selection:
        return self._learner.selection

    @property
    def updates_per_batch(self) -> int:
        return self._learner.updates_per_batch

    def engine(self) -> Engine:
        return self._learner.engine()

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        return cast(dict[str, float], self._together("update", list(rollouts)))

    def pretrain_value(self, rollouts: Sequence[Rollout], **settings: float) -> dict[str, float]:
        return cast(dict[str, float], self._together("pretrain_value", list(rollouts), **settings))

    def scale_learning_rate(self, factor: float) -> None:
        self._together("scale_learning_rate", factor)

    def state_dict(self) -> LearnerState:
        return cast(LearnerState, self._together("state_dict"))

    def load_state_dict(self, state: LearnerState) -> None:
        # The others get the state on its own way, tensor by tensor.
        self._tell("load_state_dict", {})
        self._do("load_state_dict", state)

    def stop(self) -> None:
        self._tell(STOP)

    def _together(self, name: str, *arguments: object, **settings: object) -> Any:
        self._tell(name, *arguments, **settings)
        return self._do(name, *arguments, **settings)

    def _tell(self, name: str, *arguments: object, **settings: object) -> None:
        if self.failed:
            raise RuntimeError(f"Expected no {name!r} after a call that failed: the other processes hear nothing more.")
        self._learner.processes.told((name, arguments, settings))

    def _do(self, name: str, *arguments: object, **settings: object) -> Any:
        self.failed = True
        result = getattr(self._learner, name)(*arguments, **settings)
        self.failed = False
        return result


def _follow(learner: PolicyGradientLearner) -> None:
    # Ctrl-C reaches every process; rank 0 ends what it is doing, for which it needs the others, and then stops them.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        while True:
            name, arguments, settings = learner.processes.told(NOTHING)
            if name == STOP:
                return
            getattr(learner, name)(*arguments, **settings)
    finally:
        signal.signal(signal.SIGINT, before)


class SilentEngine:
    """The engine of a process that samples nothing: weights change through it as through any, and versions count up."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    @property
    def renderer(self) -> Renderer:
        """The policy's renderer."""
        return self._policy.renderer

    @property
    def context_length(self) -> int:
        """Tokens of prompt and reply together."""
        return self._policy.context_length

    @property
    def policy_version(self) -> int:
        """Counts weight updates, from 0."""
        return self._policy.version

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError("Expected rank 0 to sample, got another. Run environments inside `distributed.lead`.")

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Run `apply`, count the version up and return it."""
        apply()
        self._policy.epoch += 1
        self._policy.version += 1
        return self._policy.version

    async def pause(self) -> None:
        """Do nothing."""

    async def resume(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""
