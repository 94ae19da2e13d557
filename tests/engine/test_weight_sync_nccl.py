"""What the way through NCCL asks of a server, and in which order. No GPU: the group is a fake."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
from fake_vllm import FakeVllm, serving
from fake_weights import make_policy
from model_families import FAMILIES, write_folder

from clawgym_env.engine import weight_sync_nccl
from clawgym_env.engine.vllm.server import VllmServer
from clawgym_env.engine.weight_sync_nccl import NcclSync
from clawgym_env.errors import EngineError
from clawgym_env.policy import Policy


class Recorder:
    def __init__(self, address: str, port: int, size: int) -> None:
        self.size = size
        self.sent: list[torch.Tensor] = []

    def broadcast(self, tensor: torch.Tensor) -> None:
        time.sleep(0.005)  # the fake server has answered long before the last one
        self.sent.append(tensor.clone())


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    made: list[Recorder] = []

    def group(address: str, port: int, size: int) -> Recorder:
        made.append(Recorder(address, port, size))
        return made[-1]

    monkeypatch.setattr(weight_sync_nccl, "_NcclGroup", group)
    monkeypatch.setattr(weight_sync_nccl, "_check_here", lambda: None)
    return made


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return make_policy(write_folder(tmp_path_factory.mktemp("served") / "policy", FAMILIES["qwen3"]))


@pytest.fixture
def fake() -> Iterator[FakeVllm]:
    with serving(FakeVllm("nowhere", lambda body: 500, dev_mode=True)) as server:
        yield server


def test_every_weight_is_announced_and_sent_in_that_order(
    groups: list[Recorder], fake: FakeVllm, policy: Policy
) -> None:
    sync, server = NcclSync(), VllmServer(fake.url)
    sync.publish(policy)
    sync.load([server])
    sync.load([server])
    (group,) = groups
    assert group.size == 3, "the trainer and the two GPUs of the server"
    assert fake.controls == [
        "/get_world_size",
        "/init_weight_transfer_engine",
        *["/start_weight_update", "/update_weights", "/finish_weight_update"] * 2,
    ]
    init, update = fake.bodies[1]["init_info"], fake.bodies[3]["update_info"]
    assert (init["rank_offset"], init["world_size"], init["packed"]) == (1, 3, False)
    own = dict(policy.module.named_parameters())
    assert update["names"] == list(own), "tied weights once, by the names of the checkpoint"
    assert update["shapes"] == [list(tensor.shape) for tensor in own.values()]
    assert set(update["dtype_names"]) == {"float32"}
    half = len(group.sent) // 2
    assert half == len(own)
    assert all(torch.equal(a, b) for a, b in zip(group.sent[:half], own.values(), strict=True))
    server.close()


def test_a_server_that_refuses_is_joined_anew_the_next_time(
    groups: list[Recorder], fake: FakeVllm, policy: Policy
) -> None:
    sync, server = NcclSync(), VllmServer(fake.url)
    sync.publish(policy)
    fake.refuses = {"/update_weights"}
    with pytest.raises(EngineError, match="update_weights"):
        sync.load([server])
    fake.refuses = set()
    sync.load([server])
    assert len(groups) == 2
    server.close()


def test_without_a_gpu_it_says_what_to_take_instead(fake: FakeVllm, policy: Policy) -> None:
    sync, server = NcclSync(), VllmServer(fake.url)
    sync.publish(policy)
    with pytest.raises(EngineError, match="sync=file"):
        sync.load([server])
    assert not fake.controls, "the server waits for nobody"
    server.close()
