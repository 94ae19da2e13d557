from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_fakes import Turn, make_rollout
from trainer_fakes import equal_weights, last_digit, make_envs, make_learner

from clawgym_env import Rollout, RolloutStore
from clawgym_env.errors import HarnessNotInstalled
from clawgym_env.runner import group_of
from clawgym_env.testing import FakeBackend, InProcessHarness
from clawgym_env.trace.prefix_tree import Selection
from learners.async_trainer import AsyncTrainer
from learners.callbacks import Callback
from learners.distributed import _Leader
from learners.grpo import TreeGRPO
from learners.metrics_log import read_metrics
from learners.run_state import TrainingError


class Crash(Exception):
    pass


class Watched(TreeGRPO):
    """Keeps what it was given."""

    batches: list[Sequence[Rollout]]

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        self.batches.append(rollouts)
        return super().update(rollouts)


def watched(**settings: Any) -> Watched:
    learner: Any = make_learner(**settings)
    learner.__class__ = Watched
    learner.batches = []
    assert isinstance(learner, Watched)
    return learner


def train(run_dir: Path, learner: TreeGRPO, *, envs: Mapping[str, Any] | None = None, **settings: Any) -> AsyncTrainer:
    with closing(make_envs(learner, run_dir, **(envs or {}))) as made:
        trainer = AsyncTrainer(learner, made, **{"num_updates": 4, **settings})
        trainer.run()
        return trainer


def replayed(run_dir: Path) -> TreeGRPO:
    """Train a new learner on the stored batches, one after the other."""
    learner = make_learner()
    with RolloutStore(run_dir, read_only=True) as store:
        for _, ids in sorted(store.batches().items()):
            learner.update([store.load(one) for one in ids])
    return learner


def test_groups_are_complete_and_in_order_and_none_comes_twice(tmp_path: Path) -> None:
    learner = watched()
    train(tmp_path, learner, num_updates=5)
    assert [len(batch) for batch in learner.batches] == [6] * 5
    for batch in learner.batches:
        places = [(rollout.group_id, rollout.index) for rollout in batch]
        assert places == sorted(places)
        assert [index for _, index in places] == [0, 1, 2, 0, 1, 2]
    ids = [rollout.id for batch in learner.batches for rollout in batch]
    assert len(set(ids)) == len(ids) == 30


def test_rollouts_go_on_while_the_learner_updates(tmp_path: Path) -> None:
    asked = threading.Event()
    during: list[bool] = []

    def reply(prompt: str, turn: int) -> str:
        asked.set()
        return last_digit(prompt, turn)

    class Slow(TreeGRPO):
        def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
            asked.clear()
            during.append(asked.wait(timeout=20))
            return super().update(rollouts)

    learner: Any = make_learner(latency_s=0.02)
    learner.__class__ = Slow
    learner.engine()._reply = reply
    train(tmp_path, learner, num_updates=2)
    assert during == [True, True]


def test_a_rollout_with_too_old_a_token_is_counted_and_not_trained(tmp_path: Path) -> None:
    learner = watched(latency_s=0.05)

    def instant(batch: Sequence[Rollout], rng: object) -> Sequence[Rollout]:
        learner.policy.version += 5  # as if the trainer had taken five updates while the next rollouts ran
        return batch

    train(tmp_path, learner, envs={"max_concurrency": 12}, max_staleness=2, transform=instant)
    records = read_metrics(tmp_path)
    assert records[0]["staleness/stale_fraction"] == 0.0
    assert sum(record["staleness/stale_fraction"] for record in records) > 0.0
    assert max(record["staleness/max"] for record in records) <= 2
    for batch, record in zip(learner.batches, records, strict=True):
        stale = [rollout for rollout in batch if rollout.exclusion == "stale"]
        assert record["staleness/stale_fraction"] == len(stale) / len(batch)
        assert record.get("rollouts/excluded_stale", 0.0) == len(stale)
        fresh = {rollout.group_id for rollout in batch if rollout.exclusion is None}
        assert len(fresh) >= 2, "stale groups are beside the batch, not in its place"
    assert equal_weights(replayed(tmp_path), learner)


@pytest.mark.parametrize(("max_staleness", "updates_per_batch"), [(1, 1), (2, 1), (3, 2), (3, 3)])
def test_an_update_waits_for_what_it_would_make_too_old(
    tmp_path: Path, max_staleness: int, updates_per_batch: int
) -> None:
    """One rollout in each few takes as long as many updates: it is late, and trained."""
    learner = watched(updates_per_batch=updates_per_batch)
    slow = threading.Semaphore(1)

    def reply(prompt: str, turn: int) -> str:
        if slow.acquire(blocking=False):
            time.sleep(1.5 * max_staleness / updates_per_batch)
            slow.release()
        return last_digit(prompt, turn)

    class InAThread(type(learner.engine())):  # type: ignore[misc]
        """Lets the other rollouts go on meanwhile."""

        async def generate(self, *args: Any) -> Any:
            return await asyncio.to_thread(asyncio.run, super().generate(*args))

    engine: Any = learner.engine()
    engine._reply = reply
    engine.__class__ = InAThread
    train(tmp_path, learner, num_updates=6, envs={"max_concurrency": 4}, max_staleness=max_staleness)
    records = read_metrics(tmp_path)
    assert [record["staleness/stale_fraction"] for record in records] == [0.0] * 6
    ages = {record["staleness/max"] for record in records}
    assert max_staleness - updates_per_batch < max(ages) <= max_staleness


def test_with_no_staleness_allowed_an_update_waits_for_nothing(tmp_path: Path) -> None:
    learner = watched(latency_s=0.02)
    train(tmp_path, learner, num_updates=3, envs={"max_concurrency": 12}, max_staleness=0)
    assert {record["staleness/max"] for record in read_metrics(tmp_path)} == {0.0}


def test_stale_is_stale_by_the_oldest_token_alone(tmp_path: Path) -> None:
    learner = watched()
    trainer = train(tmp_path, learner, num_updates=1)
    [rollout, *_] = learner.batches[0]
    for version, expected in ((0, None), (2, None), (3, "stale")):
        learner.policy.version = version
        [dated] = trainer._dated([rollout])
        assert dated.exclusion == expected


@pytest.mark.parametrize("crash_after", [1, 3])
def test_after_a_crash_every_stored_batch_is_taken_once(tmp_path: Path, crash_after: int) -> None:
    class Crashes(Callback):
        def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
            if update == crash_after:
                raise Crash

    with pytest.raises(Crash):
        train(tmp_path, watched(latency_s=0.01), callbacks=[Crashes()], checkpoint_every=2)
    learner = watched(latency_s=0.01)
    train(tmp_path, learner, checkpoint_every=2, resume=True)
    assert [record["update"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert equal_weights(learner, replayed(tmp_path))
    with RolloutStore(tmp_path, read_only=True) as store:
        ids = [one for batch in store.batches().values() for one in batch]
    assert len(set(ids)) == len(ids)


def test_what_had_finished_before_a_crash_is_trained_after_it_and_not_run_again(tmp_path: Path) -> None:
    class Dies(TreeGRPO):
        def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
            with RolloutStore(tmp_path, read_only=True) as store:
                while len(store.rollout_ids()) < 12:  # the next groups, meanwhile
                    time.sleep(0.01)
            raise Crash

    dying: Any = make_learner()
    dying.__class__ = Dies
    with pytest.raises(Crash):
        train(tmp_path, dying)
    learner = watched()
    calls: list[str] = []
    learner.engine()._reply = lambda prompt, turn: calls.append(prompt) or last_digit(prompt, turn)  # type: ignore[attr-defined,func-returns-value]
    train(tmp_path, learner, num_updates=2, envs={"max_concurrency": 1}, resume=True)
    groups = {rollout.group_id for batch in learner.batches for rollout in batch}
    assert groups == {"0-000002", "0-000003", "0-000004", "0-000005"}
    assert len(calls) <= 2, "one runs ahead while the learner updates, another may begin before the end"


def test_an_error_of_the_rollouts_ends_the_run(tmp_path: Path) -> None:
    class Missing(InProcessHarness):
        def mounts(self, cache: Path) -> Any:
            raise HarnessNotInstalled("in-process")

    with pytest.raises(HarnessNotInstalled):
        train(tmp_path, make_learner(), envs={"harness": Missing()})


def test_no_sandbox_is_open_after_the_end(tmp_path: Path) -> None:
    backend, learner = FakeBackend(), make_learner(latency_s=0.01)
    with closing(make_envs(learner, tmp_path, sandbox=backend)) as envs:
        AsyncTrainer(learner, envs, num_updates=2).run()
        assert backend.most_alive > 0
        assert backend.alive == set()


def test_a_negative_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="max_staleness"):
        train(tmp_path, make_learner(), max_staleness=-1)


def test_a_bound_below_the_steps_on_one_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"max_staleness.*at least 3.*updates_per_batch"):
        train(tmp_path, make_learner(updates_per_batch=3), max_staleness=2)


def test_a_learner_of_another_kind_is_refused_when_it_shows_that_it_takes_more_steps(tmp_path: Path) -> None:
    class Foreign:
        """Says nothing of its steps."""

        def __init__(self, learner: TreeGRPO) -> None:
            for name in ("engine", "update", "state_dict", "load_state_dict"):
                setattr(self, name, getattr(learner, name))

    learner: Any = Foreign(make_learner(updates_per_batch=3))
    with pytest.raises(TrainingError, match="at least 3"):
        train(tmp_path, learner, max_staleness=2)


def test_the_leader_of_several_processes_is_taken_for_its_learner(tmp_path: Path) -> None:
    leader: Any = _Leader(make_learner(updates_per_batch=3, selection=Selection(max_leaves=64)))
    with pytest.raises(TrainingError, match="updates_per_batch"):
        train(tmp_path, leader, max_staleness=2)
    with closing(make_envs(leader, tmp_path)) as envs:
        assert AsyncTrainer(leader, envs, num_updates=1, max_staleness=3)._selection.max_leaves == 64


def test_it_counts_by_the_selection_of_its_learner(tmp_path: Path) -> None:
    """What the default takes for over-branched this learner trains, so it is dated like any other."""
    wide = Selection(max_leaves=64)
    learner = make_learner(selection=wide)
    with closing(make_envs(learner, tmp_path)) as envs:
        trainer = AsyncTrainer(learner, envs, num_updates=1)
        rollout = replace(make_rollout([Turn([1, 2], [3])] * 17, 1.0), exclusion="over_branched")
        assert [dated.exclusion for dated in trainer._dated([rollout])] == ["over_branched"]
        learner.policy.version = 50
        assert [dated.exclusion for dated in trainer._dated([rollout])] == ["stale"]


def test_another_selection_than_the_learners_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="selection"):
        train(tmp_path, make_learner(), selection=Selection(subagent="train"))


def test_a_run_that_only_repeats_stored_batches_keeps_its_place_in_the_draws(tmp_path: Path) -> None:
    class Crashes(Callback):
        def on_update(self, update: int, metrics: Mapping[str, float]) -> None:
            if update == 2:
                raise Crash

    with pytest.raises(Crash):  # its only checkpoint is from before the first draw
        train(tmp_path, make_learner(latency_s=0.01), callbacks=[Crashes()])
    train(tmp_path, make_learner(latency_s=0.01), num_updates=2, resume=True)
    train(tmp_path, make_learner(latency_s=0.01), num_updates=4, resume=True)
    with RolloutStore(tmp_path, read_only=True) as store:
        groups = {group_of(one) for batch in store.batches().values() for one in batch}
    assert groups == {f"0-{number:06}" for number in range(2, 10)}
