"""Two processes on gloo, started once by torchrun, against one: what each wrote down is compared here."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_fakes import make_policy
from safetensors.torch import load_file
from sharded_run import SCENARIOS, make_chat_learner, make_learner, take_over, train, trained_in_half_precision

from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.errors import EngineError
from learners.checkpoint import load_checkpoint
from learners.distributed import SilentEngine, lead, torchrun_mesh
from learners.grpo import TreeGRPO
from learners.policy_gradient import parameters_of
from learners.sharding import Processes

WORKER = Path(__file__).with_name("sharded_run.py")
PARALLEL = "--standalone", "--nproc-per-node", "2"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have left what they did."""
    folder = tmp_path_factory.mktemp("two-processes")
    take_over(None, folder / "one", 2)(make_chat_learner())
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", *PARALLEL, str(WORKER), str(folder)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            output, _ = run.communicate(timeout=600)
        finally:
            run.terminate()  # torchrun ends its processes then; killed, it would leave them
    assert run.returncode == 0, output[-3000:]
    return folder


@cache
def alone(name: str) -> dict[str, Any]:
    return train(name, make_learner(name))


def distance(mine: Mapping[Any, torch.Tensor], theirs: Mapping[Any, torch.Tensor]) -> float:
    """The L2 norm of the difference, relative to that of `theirs`."""
    assert mine.keys() == theirs.keys()
    difference = math.sqrt(sum(float((mine[name] - part).square().sum()) for name, part in theirs.items()))
    return difference / math.sqrt(sum(float(part.square().sum()) for part in theirs.values()))


def gap(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    assert mine.keys() == theirs.keys()
    return max(float((mine[name] - part).abs().max()) for name, part in theirs.items())


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without times, and without what depends on how finely a batch is cut."""
    return {name: value for name, value in metrics.items() if not name.startswith(("time/", "forest/"))}


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_processes_take_the_steps_of_one(runs: Path, name: str) -> None:
    place = list(SCENARIOS).index(name)
    single = alone(name)
    together = torch.load(runs / f"result-{place}.pt", weights_only=True)
    assert distance(together["first"], single["first"]) <= 1e-6
    assert gap(together["last"]["parameters"], single["last"]["parameters"]) <= 1e-5
    assert gap(parameters_of(make_learner(name).policy.module), single["last"]["parameters"]) > 1e-3
    assert together["last"].keys() == single["last"].keys()
    for part in single["last"].keys() & {"critic", "reference"}:
        assert gap(together["last"][part], single["last"][part]) <= 1e-5
    # Rank 0 samples from the module that it keeps whole.
    assert gap(together["weights"], single["weights"]) <= 1e-5


@pytest.mark.parametrize("name", SCENARIOS)
def test_metrics_are_those_of_the_whole_batch_on_every_rank(runs: Path, name: str) -> None:
    place = list(SCENARIOS).index(name)
    first, second = (json.loads((runs / f"metrics-{place}-{rank}.json").read_text()) for rank in range(2))
    for mine, others, single in zip(first, second, alone(name)["metrics"], strict=True):
        assert timeless(mine) == timeless(others)
        assert timeless(mine) == pytest.approx(timeless(single), rel=1e-3, abs=1e-5)


def test_half_precision_is_moved_in_fp32_on_every_shard(runs: Path) -> None:
    """By steps that two processes and one round apart, but far less than they are long, and bf16 would lose."""
    two, learner = torch.load(runs / "half.pt", weights_only=True), trained_in_half_precision()
    one: Any = learner.state_dict()
    begun = {name: tensor.bfloat16().float() for name, tensor in parameters_of(make_policy().module).items()}
    flat = [
        torch.cat([part[name].flatten() for name in begun]) for part in (begun, one["parameters"], two["parameters"])
    ]
    assert {tensor.dtype for tensor in flat} == {torch.float32}
    assert 0 < (flat[2] - flat[1]).norm() < 0.2 * (flat[1] - flat[0]).norm()
    learner.load_state_dict(two)
    torch.testing.assert_close(dict(learner.state_dict()), two, rtol=0, atol=0)


def test_a_checkpoint_is_the_folder_that_one_process_writes(runs: Path) -> None:
    one, two = (load_file(runs / name / "model.safetensors") for name in ("one", "two"))
    assert gap(two, one) <= 1e-5
    assert sorted(file.name for file in (runs / "two").iterdir()) == sorted(
        file.name for file in (runs / "one").iterdir()
    )


def test_a_run_goes_on_with_another_number_of_processes(runs: Path, tmp_path: Path) -> None:
    on_one, on_two = make_chat_learner(seed=2), make_chat_learner(seed=3)
    take_over(runs / "two", tmp_path / "two-one", 2)(on_one)
    load_checkpoint(runs / "one-two", learner=on_two)
    always = make_chat_learner()
    take_over(None, tmp_path / "four", 4)(always)
    expected = parameters_of(always.policy.module)
    for learner in (on_one, on_two):
        assert gap(parameters_of(learner.policy.module), expected) <= 1e-5
        assert gap(parameters_of(learner.critic), parameters_of(always.critic)) <= 1e-5
        assert learner.policy.version == always.policy.version == 4


def test_without_torchrun_there_is_no_mesh_and_no_one_to_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with torchrun_mesh() as mesh:
        assert mesh is None
    learner = TreeGRPO(make_policy())
    led: list[TreeGRPO] = []
    lead(learner, led.append)
    assert led == [learner]


def test_a_process_alone_is_dealt_everything() -> None:
    batches: Any = [object(), object(), object()]
    assert Processes().dealt(batches, device=torch.device("cpu")) == batches
    assert Processes().dealt([], device=torch.device("cpu")) == []


def test_a_rank_that_samples_nothing_says_so() -> None:
    engine = SilentEngine(make_policy())
    assert isinstance(engine, Engine)
    with pytest.raises(EngineError, match="rank 0"):
        asyncio.run(engine.generate([1], SamplingParams()))
    assert engine.update_weights(lambda: None) == engine.policy_version == 1


class Told:
    """Processes of which the others are only told."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.messages: list[str] = []

    def told(self, message: Any) -> None:
        self.messages.append(message[0])


class Failing:
    """A learner that fails on rank 0 alone, as where its engine cannot take the weights."""

    def __init__(self) -> None:
        self.processes = Told()

    def update(self, rollouts: object) -> None:
        raise EngineError("no server")


def test_after_an_error_within_a_call_the_others_are_sent_nothing_which_they_could_not_take() -> None:
    learner: Any = Failing()
    with pytest.raises(EngineError, match="no server"):
        lead(learner, lambda leader: leader.update([]))
    assert learner.processes.messages == ["update"], "a collective that nobody joins would wait for ever"


def test_no_call_follows_one_that_failed() -> None:
    def train(leader: Any) -> None:
        with suppress(EngineError):
            leader.update([])
        leader.state_dict()

    with pytest.raises(RuntimeError, match="state_dict"):
        lead(Failing(), train)  # type: ignore[type-var]


def test_an_error_between_two_calls_lets_the_others_return() -> None:
    def train(leader: Any) -> None:
        raise ZeroDivisionError

    learner: Any = Failing()
    with pytest.raises(ZeroDivisionError):
        lead(learner, train)
    assert learner.processes.messages == ["stop"]
