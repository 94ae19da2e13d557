from __future__ import annotations

import io
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from rich.console import Console
from trainer_fakes import equal_weights, make_envs, make_learner

from clawgym_env import Rollout
from clawgym_env.errors import EngineError
from learners.callbacks import Callback, without_progress
from learners.checkpoint import load_checkpoint, save_checkpoint
from learners.controls import shuffle_rewards
from learners.grpo import TreeGRPO
from learners.metrics_log import read_metrics
from learners.run_state import TrainingError
from learners.trainer import Trainer
from learners.training_table import TrainingTable

SCRIPT = Path(__file__).parents[2] / "learners" / "trainer.py"


class Crash(Exception):
    pass


def train(run_dir: Path, *, learner: TreeGRPO | None = None, envs: Any = None, **settings: Any) -> TreeGRPO:
    learner = learner or make_learner()
    with closing(envs or make_envs(learner, run_dir)) as made:
        Trainer(learner, made, **{"num_updates": 4, **settings}).run()
    return learner


def crash_in(update: int) -> Callback:
    class Crashes(Callback):
        def on_update(self, number: int, metrics: Mapping[str, float]) -> None:
            if number == update:
                raise Crash

    return Crashes()


def test_the_loop_fits_on_a_few_screens() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 150


def test_it_does_what_the_bare_loop_does(tmp_path: Path) -> None:
    import clawgym_env

    bare = make_learner()
    with closing(make_envs(bare, None)) as envs:
        for update in range(1, 4):
            envs.reset(seed=0 if update == 1 else None)
            *_, infos = envs.step(np.zeros(6, dtype=int))
            bare.update(clawgym_env.rollouts(infos))
    trained = train(tmp_path, num_updates=3)
    assert equal_weights(trained, bare)
    assert trained.policy.version == 3
    assert not equal_weights(trained, make_learner())


def test_wrapped_environments_are_stepped_through_their_wrappers(tmp_path: Path) -> None:
    learner = make_learner()
    with closing(RecordEpisodeStatistics(make_envs(learner, tmp_path))) as envs:
        Trainer(learner, envs, num_updates=2).run()
        assert envs.episode_count == 12


def test_every_update_is_on_record_and_its_batch_in_the_store(tmp_path: Path) -> None:
    learner = make_learner()
    with closing(make_envs(learner, tmp_path)) as envs:
        records = Trainer(learner, envs, num_updates=3).run()
        batches = envs.store.batches()
    assert [record["update"] for record in records] == [1, 2, 3]
    assert records == read_metrics(tmp_path)
    assert list((tmp_path / "tensorboard").iterdir())
    assert {update: len(ids) for update, ids in batches.items()} == {1: 6, 2: 6, 3: 6}
    assert len(set().union(*batches.values())) == 18


@pytest.mark.parametrize("crash_after", [1, 2, 3, 4])
def test_a_crashed_run_that_goes_on_equals_one_that_never_stopped(tmp_path: Path, crash_after: int) -> None:
    whole = train(tmp_path / "whole", checkpoint_every=2)
    with pytest.raises(Crash):
        train(tmp_path / "cut", checkpoint_every=2, callbacks=[crash_in(crash_after)])
    learner = make_learner(seed=1)  # other weights: all come from the checkpoint
    records = train_records(tmp_path / "cut", learner, checkpoint_every=2, resume=True)
    assert equal_weights(learner, whole)
    assert [record["update"] for record in records] == [1, 2, 3, 4]
    kept = [{**record, "time/sample_s": 0, "time/update_s": 0} for record in records]
    assert kept == [{**record, "time/sample_s": 0, "time/update_s": 0} for record in read_metrics(tmp_path / "whole")]


def train_records(run_dir: Path, learner: TreeGRPO, **settings: Any) -> list[dict[str, float]]:
    train(run_dir, learner=learner, **settings)
    return read_metrics(run_dir)


def test_what_was_finished_before_a_crash_is_not_run_again(tmp_path: Path) -> None:
    async def refuse(*_: object) -> Any:
        raise AssertionError("everything was sampled before")

    class Dies(TreeGRPO):
        def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
            if self.policy.version == 1:
                raise Crash
            return super().update(rollouts)

    dying = make_learner()
    dying.__class__ = Dies
    with pytest.raises(Crash):
        train(tmp_path, learner=dying)
    learner = make_learner()
    learner.engine().generate = refuse  # type: ignore[method-assign]
    train(tmp_path, learner=learner, num_updates=2, resume=True)
    assert learner.policy.version == 2


def test_a_finished_run_can_be_given_more_updates(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", num_updates=4)
    train(tmp_path / "two", num_updates=2)
    learner = make_learner()
    train(tmp_path / "two", learner=learner, num_updates=4, resume=True)
    assert equal_weights(learner, whole)


def test_resume_begins_a_run_where_there_is_none(tmp_path: Path) -> None:
    assert equal_weights(train(tmp_path / "new", resume=True), train(tmp_path / "plain"))


def test_a_run_is_not_overwritten(tmp_path: Path) -> None:
    train(tmp_path, num_updates=1)
    with pytest.raises(TrainingError, match="holds a run"):
        train(tmp_path, num_updates=1)


def test_going_on_with_other_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Crash):
        train(tmp_path, callbacks=[crash_in(2)])
    learner = make_learner()
    with pytest.raises(TrainingError, match="settings the run began with"):
        train(tmp_path, learner=learner, envs=make_envs(learner, tmp_path, num_envs=3), resume=True)


def test_an_interrupt_leaves_a_checkpoint_of_the_last_whole_update(tmp_path: Path) -> None:
    class Interrupted(TreeGRPO):
        def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
            metrics = super().update(rollouts)
            if self.policy.version == 2:
                signal.raise_signal(signal.SIGINT)
            return metrics

    learner = make_learner()
    learner.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, learner=learner)
    assert [record["update"] for record in read_metrics(tmp_path)] == [1, 2]
    again = make_learner()
    assert load_checkpoint(tmp_path / "checkpoint", learner=again)["update"] == 2
    train(tmp_path, learner=again, resume=True)
    assert equal_weights(again, train(tmp_path / "whole"))


def test_an_interrupt_while_sampling_does_not_skip_the_groups_it_drew(tmp_path: Path) -> None:
    class Interrupts(Callback):
        def on_phase(self, phase: str) -> None:
            if phase == "updating" and learner.policy.version == 2:
                raise KeyboardInterrupt

    learner = make_learner()
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, learner=learner, callbacks=[Interrupts()])
    again = make_learner()
    train(tmp_path, learner=again, resume=True)
    assert equal_weights(again, train(tmp_path / "whole"))


def test_a_schedule_scales_every_update_also_after_going_on(tmp_path: Path) -> None:
    rates: list[float] = []

    class Watched(TreeGRPO):
        def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
            rates.extend({group["lr"] for group in self._optimizer.param_groups})
            return super().update(rollouts)

    for resume, num_updates in ((False, 2), (True, 4)):
        learner = make_learner(learning_rate=0.5)
        learner.__class__ = Watched
        train(tmp_path, learner=learner, num_updates=num_updates, schedule=lambda update: 1 / update, resume=resume)
    assert rates == [0.5, 0.25, 0.5 / 3, 0.125]
    assert [record["schedule/learning_rate_factor"] for record in read_metrics(tmp_path)] == [1, 1 / 2, 1 / 3, 1 / 4]


def test_a_transform_draws_the_same_after_going_on(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", transform=shuffle_rewards)
    with pytest.raises(Crash):
        train(tmp_path / "cut", transform=shuffle_rewards, callbacks=[crash_in(3)])
    learner = make_learner()
    train(tmp_path / "cut", learner=learner, transform=shuffle_rewards, resume=True)
    assert equal_weights(learner, whole)
    assert not equal_weights(whole, train(tmp_path / "plain"))


def test_evaluations_come_before_the_first_update_at_intervals_and_after_the_last(tmp_path: Path) -> None:
    asked: list[int] = []

    def evaluate(update: int) -> dict[str, float]:
        asked.append(update)
        return {"eval/reward": 0.5}

    train(tmp_path, num_updates=5, evaluate=evaluate, evaluate_every=2)
    assert asked == [0, 2, 4, 5]
    assert [record["update"] for record in read_metrics(tmp_path) if "eval/reward" in record] == asked


def test_it_stops_early_without_progress(tmp_path: Path) -> None:
    rewards = iter([0.1, 0.5, 0.4, 0.5, 0.9])
    train(
        tmp_path,
        num_updates=9,
        evaluate=lambda update: {"eval/reward": next(rewards)},
        evaluate_every=1,
        stop=without_progress("eval/reward", patience=2),
    )
    assert [record["update"] for record in read_metrics(tmp_path)] == [0, 1, 2, 3]


def test_callbacks_hear_what_happens_in_order(tmp_path: Path) -> None:
    heard: list[str] = []

    class Listens(Callback):
        def on_phase(self, phase: str) -> None:
            heard.append(phase.split()[0])

        def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
            heard.append(f"{update}: {'reward/mean' in metrics}")

    train(tmp_path, num_updates=1, callbacks=[Listens()], evaluate=lambda update: {"eval/reward": 1}, evaluate_every=1)
    assert heard == ["evaluating", "0: False", "sampling", "updating", "evaluating", "1: True"]


def test_a_dead_engine_ends_the_run_with_the_reason_and_the_batch_is_tried_again(tmp_path: Path) -> None:
    learner = make_learner()
    engine: Any = learner.engine()

    async def dies(*_: object) -> None:
        raise EngineError("out of memory")

    alive, engine.generate = engine.generate, dies
    with pytest.raises(TrainingError, match=r"none in update 1: {'engine_error': 6}.*out of memory"):
        train(tmp_path, learner=learner)
    engine.generate = alive
    train(tmp_path, learner=learner, num_updates=1, resume=True)
    assert learner.policy.version == 1


def test_environments_without_a_run_directory_are_refused() -> None:
    learner = make_learner()
    with pytest.raises(TrainingError, match="run_dir="):
        Trainer(learner, make_envs(learner, None), num_updates=1)


def test_environments_of_another_kind_are_refused() -> None:
    with closing(gym.make_vec("CartPole-v1", num_envs=1)) as envs, pytest.raises(TrainingError, match="ClawGym"):
        Trainer(make_learner(), envs, num_updates=1)


def test_a_checkpoint_of_another_loop_is_not_gone_on_with(tmp_path: Path) -> None:
    learner = make_learner()
    save_checkpoint(tmp_path / "checkpoint", policy=None, learner=learner, cursor={"update": 3})
    with pytest.raises(TrainingError, match="Trainer wrote"):
        train(tmp_path, learner=learner, resume=True)


def test_the_table_of_the_examples_is_a_callback(tmp_path: Path) -> None:
    out = io.StringIO()
    with TrainingTable(2, console=Console(file=out, width=200)) as table:
        train(tmp_path, num_updates=2, callbacks=[table])
    assert [line.split()[0] for line in out.getvalue().splitlines() if line.split()[:1] in (["1"], ["2"])] == ["1", "2"]


def test_environments_that_reset_by_themselves_are_refused(tmp_path: Path) -> None:
    """They would draw twice for every batch."""
    learner = make_learner()
    envs = make_envs(learner, tmp_path, autoreset_mode="SameStep")
    with closing(envs), pytest.raises(TrainingError, match="DISABLED"):
        Trainer(learner, envs, num_updates=1)
