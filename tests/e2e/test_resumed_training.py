"""A training run that is killed at random moments comes to the weights of one that never was, bit for bit."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from clawgym_env import RolloutStore
from clawgym_env.trace.store import StoreError
from learners.metrics_log import read_metrics

SCRIPT = Path(__file__).parents[1] / "learners" / "resumable_run.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The run itself, as a module; on one thread, as the killed one: sums depend on how they are split."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield importlib.import_module(SCRIPT.stem)
    torch.set_num_threads(threads)


def start(folder: Path, mode: str) -> subprocess.Popen[bytes]:
    with (folder.parent / "output").open("ab") as output:
        command = [sys.executable, str(SCRIPT), str(folder), mode]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def kill_somewhere(folder: Path, mode: str) -> None:
    """Run until some more rollouts are stored and a moment beyond, then kill -9."""
    wanted = len(finished(folder)) + random.randint(1, 20)
    run = start(folder, mode)
    try:
        while len(finished(folder)) < wanted and run.poll() is None:
            time.sleep(0.01)
        time.sleep(random.random() * 0.1)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()


def finished(folder: Path) -> set[str]:
    try:
        with RolloutStore(folder, read_only=True) as store:
            return set(store.rollout_ids())
    except StoreError:  # not there yet, or without its tables
        return set()


def equal(one: dict[str, torch.Tensor], other: Any) -> bool:
    named = dict(other.policy.module.named_parameters())
    return one.keys() == named.keys() and all(torch.equal(one[name], named[name]) for name in one)


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_killed_run_that_goes_on_comes_to_the_same_weights(
    tmp_path: Path, mode: str, kills: int, example: Any
) -> None:
    folder, before = tmp_path / "run", set()
    for _ in range(kills):
        kill_somewhere(folder, mode)
        before |= finished(folder)
    assert before, "killed before anything was finished"
    assert start(folder, mode).wait(timeout=300) == 0, (tmp_path / "output").read_text()

    updates = list(range(1, example.NUM_UPDATES + 1))
    with RolloutStore(folder, read_only=True) as store:
        batches = store.batches()
    assert sorted(batches) == updates
    trained = [rollout_id for batch in batches.values() for rollout_id in batch]
    assert len(set(trained)) == len(trained), "no rollout is trained twice"
    assert before <= finished(folder), "no finished rollout is lost"
    assert [record["update"] for record in read_metrics(folder)] == updates

    state = torch.load(folder / "checkpoint" / "training.pt", weights_only=True)
    assert state["cursor"]["update"] == example.NUM_UPDATES
    assert equal(state["learner"]["parameters"], example.replay(folder)), "each batch is taken once, in order"
    if mode == "sync":  # asynchronous batches depend on which rollouts end first
        assert before <= set(trained)
        assert equal(state["learner"]["parameters"], example.train(tmp_path / "uninterrupted", mode))
