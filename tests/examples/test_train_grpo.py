from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from clawgym_env import Rollout, RolloutStore, cache_dir
from clawgym_env.engine.base import Generation
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.errors import EngineError
from clawgym_env.policy import load_policy
from learners.grpo import TreeGRPO
from learners.metrics_log import read_metrics
from learners.run_state import TrainingError

SCRIPT = Path(__file__).parents[2] / "examples" / "train_grpo.py"
SMALL = ["--num-tasks", "1", "--group-size", "2", "--eval-tasks", "2"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_grpo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_example_fits_on_a_few_screens() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 150


@pytest.fixture
def _threads() -> Iterator[None]:
    """The example sets torch's number of threads, which is the whole process's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
def test_a_folder_that_holds_another_run_is_refused(example: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(TrainingError, match="which holds a run"):
        example.main(example.Args(output_dir=tmp_path))


@pytest.mark.policy
@pytest.mark.usefixtures("_threads")
def test_an_interrupt_within_an_update_is_held_until_that_update_is_on_record(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(TreeGRPO):
        def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
            metrics = super().update(rollouts)
            signal.raise_signal(signal.SIGINT)
            return metrics

    monkeypatch.setattr(example, "TreeGRPO", Interrupted)
    small = {"num_tasks": 1, "group_size": 2, "eval_every": 0, "checkpoint_every": 0}
    example.main(example.Args(output_dir=tmp_path, **small))
    assert [record["update"] for record in read_metrics(tmp_path)] == [1]
    state = torch.load(tmp_path / "checkpoint" / "training.pt", weights_only=True)
    assert state["cursor"]["update"] == 1


@pytest.mark.policy
@pytest.mark.usefixtures("_threads")
def test_a_dead_engine_ends_the_run_with_the_reason(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def generate(self: TorchEngine, prompt_token_ids: object, sampling: object) -> Generation:
        raise EngineError("out of memory")

    monkeypatch.setattr(TorchEngine, "generate", generate)
    with pytest.raises(TrainingError, match=r"none in update 1: {'engine_error': 2}.*out of memory"):
        example.main(example.Args(output_dir=tmp_path, num_tasks=1, group_size=2, eval_tasks=2))
    assert read_metrics(tmp_path) == []
    assert (tmp_path / "checkpoint" / "training.pt").is_file()


@pytest.mark.policy
@pytest.mark.usefixtures("_threads")
def test_a_harness_takes_options_and_zero_means_never(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    small = {"num_updates": 1, "num_tasks": 1, "group_size": 2, "eval_tasks": 0, "checkpoint_every": 0}
    example.main(example.Args(harness="mini?dialect=messages", **small))
    [folder] = (tmp_path / "runs").iterdir()
    assert folder.name.endswith("-mini-dialect-messages-tiny-seed0")
    [record] = read_metrics(folder)
    assert "eval/reward" not in record
    with RolloutStore(folder, read_only=True) as store:
        [ids] = store.batches().values()
        assert {call.dialect for name in ids for call in store.load(name).tree} == {"messages"}


@pytest.mark.policy
def test_a_run_leaves_everything_it_promises(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *SMALL, "--num-updates", "2", "--output-dir", str(tmp_path)]
    done = subprocess.run([*command, "--eval-every", "2"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, *updates = read_metrics(tmp_path)
    assert first.keys() == {"update", "eval/reward"}
    assert [record["update"] for record in updates] == [1, 2]
    assert [sorted(record.keys() & {"reward/mean", "eval/reward"}) for record in updates] == [
        ["reward/mean"],
        ["eval/reward", "reward/mean"],
    ]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "tensorboard").iterdir())
    with RolloutStore(tmp_path, read_only=True) as store:
        assert [len(ids) for ids in store.batches().values()] == [2, 2]
    assert load_policy(tmp_path / "checkpoint", cache=cache_dir()).name == "tiny"


@pytest.mark.policy
def test_two_processes_of_torchrun_train_one_policy(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(SCRIPT), "--num-tasks", "2", "--group-size", "4", "--eval-tasks", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--num-updates", "2", "--output-dir", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Reward curve") == 1
    updates = read_metrics(tmp_path)
    assert [record["update"] for record in updates] == [1, 2]
    # What was sampled is what the shards compute: rank 0's whole policy is kept up with them.
    assert all(record.get("logprob/max_abs_diff", 0.0) < 1e-3 for record in updates)
    assert load_policy(tmp_path / "checkpoint", cache=cache_dir()).name == "tiny"


@pytest.mark.policy
def test_an_interrupt_writes_the_checkpoint_and_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), *SMALL, "--num-updates", "1000", "--output-dir", str(tmp_path)]
    started: set[Process] = set()

    def started_something() -> bool:
        started.update(_descendants(run.pid))
        return bool(started)

    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        try:
            _wait_until(lambda: _size(tmp_path / "metrics.jsonl") > 0, run)
            _wait_until(started_something, run)
            os.kill(run.pid, signal.SIGINT)
            out, err = run.communicate(timeout=120)
        finally:
            run.kill()
    assert run.returncode == 0, err
    assert "Checkpoint" in out
    assert (tmp_path / "checkpoint" / "training.pt").is_file()
    assert not started & _processes().keys()


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _wait_until(holds: Callable[[], bool], run: subprocess.Popen[str], timeout_s: float = 120.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert run.poll() is None, run.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


class Process(NamedTuple):
    pid: int
    started: int
    """Clock ticks since boot: a number that is used again belongs to another process."""


def _processes() -> dict[Process, int]:
    """Return every process that runs, and the pid of its parent."""
    found = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            found[Process(int(file.parent.name), int(fields[19]))] = int(fields[1])
    return found


def _descendants(pid: int) -> set[Process]:
    parents = _processes()
    found: set[Process] = set()
    pids = {pid}
    while new := {process for process, parent in parents.items() if parent in pids} - found:
        found |= new
        pids |= {process.pid for process in new}
    return found
