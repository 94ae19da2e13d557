from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import call as made_call

from clawgym_env.grading.base import Grade, JudgeUsage
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.spaces import TraceSpace
from clawgym_env.trace.calls import ModelCall, call_from_json, call_to_json
from clawgym_env.trace.prefix_tree import PrefixTree
from clawgym_env.trace.store import FILE_NAME, RolloutStore, StoreError


def some_tree(seed: int = 0) -> PrefixTree:
    space = TraceSpace(seed=seed)
    while not len(tree := space.sample()):
        pass
    return tree


def some_rollout(rollout_id: str = "1-000000/0", *, tree: PrefixTree | None = None, **changes: object) -> Rollout:
    group_id, _, index = rollout_id.partition("/")
    rollout = Rollout(
        id=rollout_id,
        task_id="task",
        harness="mini",
        policy="tiny",
        group_id=group_id,
        index=int(index),
        seed=2**48 - 1,
        tree=some_tree() if tree is None else tree,
        stop_reason=StopReason.MAX_CALLS,
        grade=Grade(1 / 3, {"exists": 1.0, "exact": 0.1 + 0.2}, "ok\n", JudgeUsage(2, 1, 300, 40)),
        exclusion=None,
        instruction="write ä\ud800\x00 to a file",
        response="done ☃",
        harness_exit_code=0,
        harness_output="out",
        timing={"open": 0.1, "total": 1 / 7},
        rewritten_calls=3,
    )
    return dataclasses.replace(rollout, **changes)  # type: ignore[arg-type]


def assert_same_call(one: ModelCall, other: ModelCall) -> None:
    for field in dataclasses.fields(ModelCall):
        left, right = getattr(one, field.name), getattr(other, field.name)
        if isinstance(left, np.ndarray):
            assert left.dtype == right.dtype, field.name
            assert left.tobytes() == right.tobytes(), field.name
            assert not right.flags.writeable
        else:
            assert left == right, field.name


def assert_same_rollout(one: Rollout, other: Rollout) -> None:
    for field in dataclasses.fields(Rollout):
        if field.name != "tree":
            assert getattr(one, field.name) == getattr(other, field.name), field.name
    assert len(one.tree) == len(other.tree)
    for left, right in zip(one.tree.calls, other.tree.calls, strict=True):
        assert_same_call(left, right)


def test_a_loaded_rollout_equals_the_stored_one(tmp_path: Path) -> None:
    graded, cut = some_rollout(), some_rollout("1-000001/0", grade=None, exclusion="ungraded", harness_exit_code=None)
    with RolloutStore(tmp_path) as store:
        asyncio.run(store.add_rollout(graded))
        asyncio.run(store.add_rollout(cut))
        assert_same_rollout(store.load(graded.id), graded)
        assert_same_rollout(store.load(cut.id), cut)
    with RolloutStore(tmp_path, read_only=True) as store:
        assert_same_rollout(store.load(graded.id), graded)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_any_tree_survives_the_way_to_disk(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    rollout = some_rollout(tree=some_tree(seed))
    with RolloutStore(tmp_path_factory.mktemp("store")) as store:
        asyncio.run(store.add_rollout(rollout))
        assert_same_rollout(store.load(rollout.id), rollout)


def test_calls_are_readable_before_their_rollout_has_ended(tmp_path: Path) -> None:
    tree = some_tree(3)
    with RolloutStore(tmp_path) as store:
        for call in tree.calls:
            asyncio.run(store.add_call("1-000000/0", call))
        assert [call.id for call in store.calls("1-000000/0")] == [call.id for call in tree.calls]
        assert store.unfinished() == ("1-000000/0",)
        assert store.rollout_ids() == ()


def test_a_finished_rollout_settles_what_its_calls_said_before(tmp_path: Path) -> None:
    tree = some_tree(3)
    early = [dataclasses.replace(call, state="undelivered", kind="auxiliary") for call in tree.calls]
    abandoned = dataclasses.replace(early[0], id="abandoned", index=99)
    with RolloutStore(tmp_path) as store:
        for call in [*early, abandoned]:
            asyncio.run(store.add_call("1-000000/0", call))
        asyncio.run(store.add_rollout(some_rollout(tree=tree)))
        assert_same_rollout(store.load("1-000000/0"), some_rollout(tree=tree))
        assert store.unfinished() == ()


def test_rollouts_come_by_group_and_index_whatever_their_arrival(tmp_path: Path) -> None:
    ids = ["7-000001/1", "7-000000/1", "7-000001/0", "7-000000/0"]
    with RolloutStore(tmp_path) as store:
        for rollout_id in ids:
            asyncio.run(store.add_rollout(some_rollout(rollout_id)))
        assert [rollout.id for rollout in store.rollouts()] == sorted(ids)


def test_a_batch_keeps_its_order_and_a_repeated_update_replaces_it(tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        store.add_batch(0, ["b", "a", "c"])
        store.add_batch(1, ["d"])
        store.add_batch(1, ["f", "e"])
        store.set_cursor("sampler", {"seed": 3, "position": 8})
    with RolloutStore(tmp_path) as store:
        assert store.batches() == {0: ("b", "a", "c"), 1: ("f", "e")}
        assert store.cursor("sampler") == {"seed": 3, "position": 8}
        assert store.cursor("unheard of") is None


def test_many_writers_at_once_are_all_committed(tmp_path: Path) -> None:
    rollouts = [some_rollout(f"1-{group:06d}/0") for group in range(300)]

    async def add_all(store: RolloutStore) -> None:
        await asyncio.gather(*map(store.add_rollout, rollouts))

    with RolloutStore(tmp_path) as store:
        asyncio.run(add_all(store))
        assert len(store.rollout_ids()) == 300


def test_one_bad_write_fails_alone(tmp_path: Path) -> None:
    good, bad = some_rollout("1-000000/0"), some_rollout("1-000001/0", instruction=None)

    async def add_both(store: RolloutStore) -> list[BaseException | None]:
        return await asyncio.gather(store.add_rollout(good), store.add_rollout(bad), return_exceptions=True)

    with RolloutStore(tmp_path) as store:
        first, second = asyncio.run(add_both(store))
        assert first is None
        assert isinstance(second, AttributeError | sqlite3.IntegrityError)
        assert store.rollout_ids() == (good.id,)


def test_bytes_grow_with_new_tokens_not_with_history(tmp_path: Path) -> None:
    def size_of(num_calls: int) -> int:
        path = tmp_path / str(num_calls)
        with RolloutStore(path) as store:
            asyncio.run(store.add_rollout(some_rollout(tree=long_conversation(num_calls))))
        return (path / FILE_NAME).stat().st_size

    few, many = size_of(200), size_of(800)
    assert many < 4.4 * few  # quadratic growth would give 16
    assert many / 800 < 3 * (64 * 4 + 32 * 8)


def long_conversation(num_calls: int) -> PrefixTree:
    template = some_tree().calls[0]
    calls: list[ModelCall] = []
    for index in range(num_calls):
        parent = index - 1 if index else None
        calls.append(
            dataclasses.replace(
                template,
                id=f"call{index}",
                index=index,
                lineage_parent=parent,
                prefix_parent=parent,
                prefix_len=0 if parent is None else calls[parent].history_len,
                delta_token_ids=np.full(64, index, dtype=np.int32),
                token_ids=np.full(32, index, dtype=np.int32),
                logprobs=np.full(32, -1.0, dtype=np.float32),
            )
        )
    return PrefixTree(calls)


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    with RolloutStore(tmp_path) as store:
        asyncio.run(store.add_rollout(some_rollout()))
        with pytest.raises(StoreError, match="written by one run"):
            RolloutStore(tmp_path)
        with RolloutStore(tmp_path, read_only=True) as reader:
            assert reader.rollout_ids() == ("1-000000/0",)
            with pytest.raises(StoreError, match="read-only"):
                reader.add_batch(0, [])
    RolloutStore(tmp_path).close()


def test_a_closed_store_refuses_writes_and_closes_again(tmp_path: Path) -> None:
    store = RolloutStore(tmp_path)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.add_batch(0, [])


def test_what_is_no_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="got nothing there"):
        RolloutStore(tmp_path, read_only=True)
    with pytest.raises(StoreError, match="nobody"), RolloutStore(tmp_path) as store:
        store.load("nobody")
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        connection.execute("UPDATE meta SET value = '0' WHERE name = 'schema_version'")
    connection.close()
    with pytest.raises(StoreError, match="schema version 4"):
        RolloutStore(tmp_path)
    (tmp_path / FILE_NAME).write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError):
        RolloutStore(tmp_path)


KILLED = """
import asyncio, sys
sys.path.insert(0, sys.argv[2])
from test_store import some_rollout, some_tree
from clawgym_env.trace.store import RolloutStore

async def main():
    store = RolloutStore(sys.argv[1])
    await store.add_rollout(some_rollout())
    for call in some_tree(3).calls:
        await store.add_call("1-000001/0", call)
    store.add_batch(5, ["1-000000/0"])
    print("committed", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_what_was_committed_survives_kill_9_and_the_lock_does_not(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "committed\n"
        os.kill(process.pid, signal.SIGKILL)
    with RolloutStore(tmp_path) as store:
        assert_same_rollout(store.load("1-000000/0"), some_rollout())
        assert len(store.calls("1-000001/0")) == len(some_tree(3))
        assert store.unfinished() == ("1-000001/0",)
        assert store.batches() == {5: ("1-000000/0",)}


def test_the_experts_of_a_mixture_are_kept(tmp_path: Path) -> None:
    experts = np.arange(24, dtype=np.int16).reshape(3, 4, 2)
    told = dataclasses.replace(made_call(0, [1, 2], [3, 4, 5]), routed_experts=experts)
    told.validate()
    with RolloutStore(tmp_path) as store:
        asyncio.run(store.add_call("one", told))
        asyncio.run(store.add_call("one", made_call(1, [1], [2])))
        first, second = store.calls("one")
    for read in (first, call_from_json(call_to_json(told))):
        assert read.routed_experts is not None
        assert read.routed_experts.dtype == np.int16
        assert (read.routed_experts == experts).all()
    assert second.routed_experts is None
    with pytest.raises(ValueError, match="experts of 3 tokens"):
        dataclasses.replace(told, routed_experts=experts[:2]).validate()
