"""What the processes of one learner do together: FSDP2 shards its weights, micro-batches are dealt, sums are added up.

Below every policy-gradient learner; alone, in a single process, each of these does nothing. Every process calls the
learner with the same rollouts and packs the same micro-batches, of which it computes its own. Invariant: n processes
take the step of one. The weights of the loss terms are those of the whole batch, fixed before anything is dealt, and
gradients are summed, not averaged.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from learners.rows import MicroBatch, nothing

T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

PATIENCE = timedelta(days=30)
"""How long a process waits for the others to have something to say: sampling may take hours."""


class Processes:
    """The processes of a mesh, seen from one of them. What says "together" has to be called by all, in one order."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """Join the others.

        Args:
            mesh: of one dimension; None is a process alone.

        Raises:
            ValueError: a mesh of several dimensions.
        """
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(f"Expected a mesh of one dimension, over which weights are sharded, got {mesh}.")
        self._mesh = mesh
        self.rank: int = 0 if mesh is None else mesh.get_local_rank()
        """Rank 0 samples, saves and speaks for all."""
        self.size: int = 1 if mesh is None else mesh.size()
        self._root: nn.Module | None = None
        # Metrics and messages are on the CPU, and may be waited for: longer than a collective of a GPU would.
        self._group = None
        if mesh is not None:
            ranks = dist.get_process_group_ranks(mesh.get_group())
            self._group = dist.new_group(ranks, backend="gloo", timeout=PATIENCE)

    def own(self, module: M) -> M:
        """Return what is to be sharded of a module: the module, or on rank 0, which keeps it whole, a copy."""
        return copy.deepcopy(module) if self._mesh is not None and self.rank == 0 else module

    def shard(self, *parts: nn.Module | None) -> None:
        """Shard modules in place, together; rank 0's weights count. Once: they are what `run` gathers."""
        if self._mesh is None:
            return
        self._root = _Root([part for part in parts if part is not None])
        for parameter in self._root.parameters():
            dist.broadcast(parameter.data, group=self._mesh.get_group(), group_src=0)
        for module in (*_units(self._root), self._root):
            # Weights stay whole no longer than they are needed, so that no one ever reads or writes a stale copy.
            fully_shard(module, mesh=self._mesh, reshard_after_forward=True, mp_policy=_precision(module))
            cast(FSDPModule, module).set_gradient_divide_factor(1.0)
            cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums

    def run(self, work: Callable[[], T]) -> T:
        """Do work that needs the sharded weights, together; with gradients on, it returns the loss."""
        return work() if self._root is None else cast(T, self._root(work))

    def dealt(self, batches: Sequence[MicroBatch], *, device: torch.device) -> list[MicroBatch]:
        """Return this process's share of all micro-batches; where it is smaller than another's, one of nothing more.

        Neighbours, which are of a size, go to different processes: they are computed at the same time.
        """
        own = list(batches[self.rank :: self.size])
        return own if len(own) == -(-len(batches) // self.size) else [*own, nothing(device=device)]

    def total(self, values: Tensor) -> Tensor:
        """Add up what each process has, together."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, value: float) -> float:
        """Return the largest of what each process has, together."""
        return float(self._reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX))

    def told(self, message: T | None) -> T:
        """Return rank 0's message, together; what the others bring is ignored."""
        if self._mesh is None:
            return cast(T, message)
        messages = [message]
        dist.broadcast_object_list(messages, group=self._group, group_src=0)
        return cast(T, messages[0])

    def whole(self, tree: T) -> T:
        """Gather a tree of tensors, together: into rank 0's memory, while the others get tensors without data."""
        if self._mesh is None:
            return tree
        return cast(T, _mapped(tree, lambda tensor: gathered(tensor).to("cpu" if self.rank == 0 else "meta")))

    def received(self, tree: T) -> T:
        """Return a tree like rank 0's, together: there the same, elsewhere one of numbers and tensors without data."""
        if self._mesh is None:
            return tree
        outline = self.told(cast(T, _mapped(tree, _outline)) if self.rank == 0 else None)
        return tree if self.rank == 0 else outline

    def like(self, target: Tensor, source: Tensor) -> Tensor:
        """Return rank 0's `source`, a whole tensor, sharded as `target` is, together."""
        if not isinstance(target, DTensor):
            return source
        data = source if self.rank == 0 else torch.empty(source.shape)
        return distribute_tensor(data.to(target.device, target.dtype), target.device_mesh, target.placements)

    @torch.no_grad()
    def publish(self, sharded: nn.Module, whole: nn.Module, *, frozen: bool) -> None:
        """Copy sharded weights into the module that rank 0 keeps whole, together.

        Args:
            frozen: whether those that are not trained are copied, too.
        """
        if self._mesh is None:
            return
        kept = dict(whole.named_parameters())
        for name, parameter in sharded.named_parameters():
            if frozen or parameter.requires_grad:
                values = gathered(parameter)
                if self.rank == 0:
                    kept[name].copy_(values)

    def _reduced(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self._mesh is None:
            return values
        reduced = values.detach().cpu().clone()
        dist.all_reduce(reduced, operation, group=self._group)
        return reduced.to(values.device)


class _Root(nn.Module):
    """Makes any work on its parts one forward pass of theirs, which is what FSDP's hooks go by."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, work: Callable[[], T]) -> T:
        return work()


def gathered(tensor: Tensor) -> Tensor:
    """Return a tensor whole, on every process of its mesh; together, where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _units(root: nn.Module) -> Iterator[nn.Module]:
    """Yield what is gathered for its own part of a forward pass: decoder layers, and value heads for their dtype."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    from learners.value_head import ValueHead

    for module in root.modules():
        if isinstance(module, GradientCheckpointingLayer | ValueHead):
            yield module


def _precision(module: nn.Module) -> MixedPrecisionPolicy:
    """Sum gradients in fp32 at least."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.requires_grad}
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if dtypes & {torch.bfloat16, torch.float16} else None)


def _outline(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if tensor.ndim else tensor


def _mapped(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {name: _mapped(value, change) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(value, change) for value in tree)
    return tree
