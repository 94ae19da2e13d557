"""The critic of tree-PPO: V(s_t), read from the hidden state that predicts token t.

Sits on what `forward.trained_hidden` returns, the policy's own or those of a trunk of its own. Invariant: values are
fp32 (fp64 above fp32 trunks) and 0 before anything was learned.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from learners.forward import trained_hidden
from learners.rows import MicroBatch
from learners.sharding import Processes, gathered

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CriticKind: TypeAlias = Literal["head", "separate"]
CRITICS: tuple[CriticKind, ...] = get_args(CriticKind)


class ValueHead(nn.Module):
    """A linear read-out of hidden states, 0 at first."""

    def __init__(self, hidden_size: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))  # FSDP shards no scalar

    def forward(self, hidden: Tensor) -> Tensor:
        """Return values; [M, H] to [M]."""
        return hidden.to(self.weight.dtype) @ self.weight + self.bias


class Critic(nn.Module):
    """A value head on the policy's trunk, or on a copy of it."""

    def __init__(self, policy: PreTrainedModel, kind: CriticKind, *, trunk_gradient: bool) -> None:
        """Make a critic that says 0.

        Args:
            policy: its trunk is read, and copied with what is trained of it for a separate critic.
            trunk_gradient: whether the loss of a head reaches the policy's trunk.
        """
        super().__init__()
        config: Any = policy.config
        dtype = torch.promote_types(policy.dtype, torch.float32)
        self.head = ValueHead(config.get_text_config().hidden_size, device=policy.device, dtype=dtype)
        self.trunk = _trunk_of(policy) if kind == "separate" else None
        self._trunk_gradient = trunk_gradient

    @property
    def dtype(self) -> torch.dtype:
        """Of values."""
        return self.head.weight.dtype

    def forward(self, batch: MicroBatch, policy_hidden: Tensor) -> Tensor:
        """Return V(s_t) of the trained tokens, shape [M].

        Args:
            policy_hidden: what `trained_hidden` returns for the policy, shape [M, H].
        """
        values: Tensor = self.head(self.hidden(batch, policy_hidden))
        return values

    def hidden(self, batch: MicroBatch, policy_hidden: Tensor) -> Tensor:
        """Return what the head reads, shape [M, H]."""
        if self.trunk is not None:
            return trained_hidden(cast("PreTrainedModel", self.trunk), batch)
        return policy_hidden if self._trunk_gradient else policy_hidden.detach()


class LeastSquares:
    """The best value head for given returns: a linear one has a closed form, exact, without a learning rate.

    Minimises Σ w_t (V(s_t) − G_t)² over weight and bias, with a ridge that holds the weight near the present one: what
    earlier batches taught fades only where the present one says otherwise. Sums only, so that the result does not
    depend on how the batch is cut.
    """

    def __init__(self, head: ValueHead) -> None:
        self._head = head
        size = len(head.weight) + 1
        self._moments = torch.zeros(size, size, dtype=torch.float64, device=head.weight.device)
        self._products = torch.zeros(size, dtype=torch.float64, device=head.weight.device)

    @torch.no_grad()
    def add(self, hidden: Tensor, returns: Tensor, weights: Tensor) -> None:
        """Add the tokens of one micro-batch.

        Args:
            hidden: shape [M, H].
            returns: G_t, shape [M].
            weights: of each token in the loss, shape [M].
        """
        inputs = torch.cat([hidden.double(), hidden.new_ones(len(hidden), 1, dtype=torch.float64)], dim=1)
        weighted = inputs * weights.double()[:, None]
        self._moments += weighted.T @ inputs
        self._products += weighted.T @ (returns - self._head(hidden)).double()

    @torch.no_grad()
    def solve(self, processes: Processes, *, ridge: float) -> None:
        """Put the solution into the head.

        Args:
            processes: those that saw a part of the batch each.
            ridge: of the weight, as a part of the mean square of a hidden unit.
        """
        moments, products = processes.total(self._moments), processes.total(self._products)
        diagonal = moments.diagonal()
        penalty = torch.full_like(diagonal, ridge * float(diagonal[:-1].mean()))
        penalty[-1] = 0.0
        change = torch.linalg.solve(moments + penalty.diag(), products)
        for parameter, part in ((self._head.weight, change[:-1]), (self._head.bias, change[-1:])):
            parameter.copy_(processes.like(parameter, gathered(parameter) + part))


def _trunk_of(policy: PreTrainedModel) -> nn.Module:
    trunk: Any = copy.deepcopy(policy)
    trunk.set_output_embeddings(nn.Identity())  # a vocabulary's worth of memory that no value needs
    return cast(nn.Module, trunk)
