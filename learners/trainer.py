"""The training loop: reset, step, update, with all that a long run needs around it.

Takes rollouts from vector environments and gives them to a learner; everything it writes lies in the environments' run
directory. Invariant: a batch's rollouts and their order are stored before its update, and a run that goes on after
`kill -9` takes the updates since its last checkpoint again on those same rollouts, so that no finished rollout is lost
and none counts twice.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, TypeAlias

import numpy as np
from gymnasium.vector import VectorEnv

from clawgym_env.envs.rollout_vector import rollouts
from clawgym_env.messages import Json
from clawgym_env.rollout import Rollout
from learners.base import Learner, TakesSchedule
from learners.callbacks import Callback, StopRule, never
from learners.interrupts import deferred_interrupt
from learners.run_state import RunState, TrainingError, rollout_envs
from learners.schedules import Schedule

Evaluate: TypeAlias = Callable[[int], Mapping[str, float]]
"""From the number of updates taken to metrics, `eval/reward` among them."""
Transform: TypeAlias = Callable[[Sequence[Rollout], np.random.Generator], Sequence[Rollout]]


@dataclass(eq=False)
class Trainer:
    """Trains synchronously: every rollout of a batch is over before the update, and the next ones wait for it."""

    learner: Learner
    envs: VectorEnv[Any, Any, Any]
    """Made with `engine=learner.engine()` and a `run_dir`; a step of all of them is one batch. Closed by the caller."""
    _: KW_ONLY
    num_updates: int
    seed: int = 0
    """Of the environments' draws and of `transform`."""
    schedule: Schedule | None = None
    """Of the learning rate, for a learner that takes one."""
    transform: Transform | None = None
    """Changes a batch before the learner sees it (`controls.shuffle_rewards`); gets random numbers of its own."""
    evaluate: Evaluate | None = None
    evaluate_every: int = 0
    """Updates between evaluations; also before the first and after the last. 0: never."""
    callbacks: Sequence[Callback] = ()
    stop: StopRule = never
    checkpoint_every: int = 0
    """Updates between checkpoints, beside those at the start and the end."""
    resume: bool = False
    """Go on with the run in `run_dir`, or begin it where there is none."""

    def __post_init__(self) -> None:
        if self.schedule is not None and not isinstance(self.learner, TakesSchedule):
            raise TrainingError(f"Expected a learner with scale_learning_rate for a schedule, got {self.learner!r}.")
        self._envs = rollout_envs(self.envs)
        self._state = RunState(self.learner, self._envs, resume=self.resume)

    def run(self) -> list[dict[str, float]]:
        """Train to the end, a stop rule, or Ctrl-C (raised again after a checkpoint), and return all records.

        Raises:
            TrainingError: no rollout of a batch could be graded, or a resumed run draws other rollouts than before.
        """
        state = self._state
        with state.open_log() as log:
            if state.update == 0:
                state.save()  # what the first batches are sampled with
                if not log.records and (first := self._evaluation(0)):
                    self._record(0, first)
            try:
                while state.update < self.num_updates and not self.stop(log.records):
                    self._step(state.update + 1)
                    if self.checkpoint_every and state.update % self.checkpoint_every == 0:
                        state.save()
            except KeyboardInterrupt:
                state.save()
                raise
            state.save()
        return log.records

    def _step(self, update: int) -> None:
        self._say(f"sampling {self._envs.num_envs} rollouts")
        started = time.perf_counter()
        batch, metrics = self._sample(update)
        metrics["time/sample_s"] = time.perf_counter() - started
        if not any(rollout.graded for rollout in batch):
            reasons = dict(Counter(str(rollout.stop_reason) for rollout in batch))
            raise TrainingError(f"Expected graded rollouts, got none in update {update}: {reasons}. {batch[0].error}")
        self._state.begin(update, batch)
        if self.transform is not None:
            batch = self.transform(batch, np.random.default_rng([self.seed, update]))
        if self.schedule is not None and isinstance(self.learner, TakesSchedule):
            metrics["schedule/learning_rate_factor"] = factor = self.schedule(update)
            self.learner.scale_learning_rate(factor)
        self._say("updating")
        try:
            with deferred_interrupt():  # what a checkpoint says was done is what the weights have seen
                metrics |= self.learner.update(batch)
                self._state.end(update, self._where())
            metrics |= self._evaluation(update)
        finally:
            if self._state.update == update:
                self._record(update, metrics)

    def _sample(self, update: int) -> tuple[Sequence[Rollout], dict[str, float]]:
        """Return the batch of an update and what is known of its sampling."""
        self.envs.reset(seed=self.seed if update == 1 else None)  # later ones go on through the tasks
        *_, infos = self.envs.step(np.zeros(self._envs.num_envs, dtype=int))
        batch = rollouts(infos)
        expected = self._state.recorded.get(update)
        if expected is not None and expected != tuple(rollout.id for rollout in batch):
            raise TrainingError(
                f"Expected the rollouts that update {update} was stored with, {expected[0]} and so on, got others. "
                "Go on with the settings the run began with."
            )
        return batch, {}

    def _where(self) -> dict[str, Json]:
        """Return the state of the environments from which the next batch is drawn."""
        return self._envs.state_dict()

    def _evaluation(self, update: int) -> Mapping[str, float]:
        last = update == self.num_updates
        if self.evaluate is None or not self.evaluate_every or (update % self.evaluate_every and not last):
            return {}
        self._say("evaluating")
        return self.evaluate(update)

    def _record(self, update: int, metrics: Mapping[str, float]) -> None:
        self._state.log.write(update, metrics)
        for callback in self.callbacks:
            callback.on_update(update, metrics)

    def _say(self, phase: str) -> None:
        for callback in self.callbacks:
            callback.on_phase(phase)
