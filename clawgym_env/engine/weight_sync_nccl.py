"""The trainer's weights from GPU to GPU, by NCCL. Not run on a GPU so far.

It was written from the source of vLLM 0.32 and 0.33 and is tested only for what it asks of the servers, so take
`FileSync` unless the files are what limits you, and trust the comparison after each update, which is the same for both.
The servers are started with `--weight-transfer-config '{"backend": "nccl"}'`. vLLM is imported here for its NCCL
communicator alone: its own classes for trainers changed from 0.32 to 0.33.

Invariant: each server shares a group of its own with the trainer, so one that is restarted joins again without the
others.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from clawgym_env.engine.vllm.server import VllmServer
from clawgym_env.errors import EngineError
from clawgym_env.messages import Json

if TYPE_CHECKING:
    from torch import Tensor

    from clawgym_env.policy import Policy


class Group(Protocol):
    """The trainer, as rank 0, with the GPUs of one server."""

    def broadcast(self, tensor: Tensor) -> None:
        """Send one tensor to all others of the group."""


class NcclSync:
    """Through an NCCL broadcast from the trainer's GPU.

    Args:
        address: this machine, as the servers reach it.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        self._address = address
        self._tensors: Mapping[str, Tensor] = {}
        self._groups: dict[VllmServer, Group] = {}

    def publish(self, policy: Policy) -> None:
        """Keep hold of the weights; they are sent from where they lie."""
        self._tensors = _checkpoint_tensors(policy)

    def load(self, servers: Sequence[VllmServer]) -> None:
        """Send all weights to one server after the other."""
        for server in servers:
            self._send(server)

    def close(self) -> None:
        """Leave the groups."""
        self._groups.clear()
        self._tensors = {}

    def _send(self, server: VllmServer) -> None:
        group = self._groups.get(server)
        if group is None:
            group = self._groups[server] = self._joined(server)
        info: dict[str, Json] = {
            "names": list(self._tensors),
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self._tensors.values()],
        }
        pool = ThreadPoolExecutor(1)
        try:
            server.update("start_weight_update")
            # The server receives inside its answer: both sides at once.
            answer = pool.submit(server.update, "update_weights", {"update_info": info})
            for tensor in self._tensors.values():
                if answer.done() and answer.exception() is not None:
                    break  # it refused before it received: nobody takes part in the broadcast
                group.broadcast(tensor.contiguous())
            answer.result()
            server.update("finish_weight_update")
        except BaseException:
            self._groups.pop(server, None)  # the other side may still wait in it
            raise
        finally:
            pool.shutdown(wait=False)  # where the broadcast failed, the server never answers

    def _joined(self, server: VllmServer) -> Group:
        _check_here()
        size = 1 + server.world_size()
        port = _free_port()
        info: dict[str, Json] = {
            "master_address": self._address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": size,
            "packed": False,
        }
        pool = ThreadPoolExecutor(1)
        try:  # the server joins inside its answer: both sides at once
            answer = pool.submit(server.update, "init_weight_transfer_engine", {"init_info": info})
            group = _NcclGroup(self._address, port, size)
            answer.result()
        finally:
            pool.shutdown(wait=False)  # where this side cannot join, the other waits until its own limit
        return group


class _NcclGroup:
    def __init__(self, address: str, port: int, size: int) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        meeting = StatelessProcessGroup.create(host=address, port=port, rank=0, world_size=size)
        self._communicator = PyNcclCommunicator(meeting, device=torch.cuda.current_device())

    def broadcast(self, tensor: Tensor) -> None:
        import torch

        self._communicator.broadcast(tensor, src=0, stream=torch.cuda.current_stream())


def _checkpoint_tensors(policy: Policy) -> Mapping[str, Tensor]:
    """Return the weights by the names that checkpoints have, which the servers know; tied ones once."""
    from transformers.core_model_loading import revert_weight_conversion

    from clawgym_env.policy import merged_module

    module = merged_module(policy)
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    found: Mapping[str, Tensor] = revert_weight_conversion(module, tensors)
    return found


def _check_here() -> None:
    """Check that this process can join a group at all.

    Raises:
        EngineError: a GPU or vLLM is missing here.
    """
    import torch

    if not torch.cuda.is_available():
        raise EngineError("Expected the trainer on a CUDA GPU for sync=nccl, got none. Take sync=file.")
    if importlib.util.find_spec("vllm") is None:
        raise EngineError(
            "Expected vLLM beside the trainer for sync=nccl, got none. Run: pip install 'clawgym[vllm]', or take "
            "sync=file, which needs none here."
        )


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port
