"""Half-precision weights are moved in fp32: copies of them, which the optimizer steps in their place.

A step of reinforcement learning is far smaller than 1/256 of a weight, which is all that bf16 can tell apart: taken on
the weights themselves, most of it is rounded away. Used by policy-gradient learners and the cold start. Invariant:
after a step every half-precision parameter is its master, rounded; others have no master and cost nothing here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """The fp32 copies of one optimizer's half-precision parameters."""

    def __init__(self) -> None:
        self._masters: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, module: nn.Module) -> list[nn.Parameter]:
        """Return what an optimizer moves to train a module: its parameters, a master for each in half precision."""
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in trained:
            if parameter.dtype in HALF:
                self._masters[parameter] = nn.Parameter(parameter.detach().float())
        return [self._masters.get(parameter, parameter) for parameter in trained]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move the gradients of parameters to their masters.

        Where something else has moved a parameter since, as a cold start does, its master begins there.
        """
        for parameter, master in self._masters.items():
            master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.to(master.dtype)))
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
            parameter.grad = None

    @torch.no_grad()
    def give_back(self) -> None:
        """Round the masters into their parameters."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)

    def drop_gradients(self) -> None:
        """Forget gradients that no step will take."""
        for parameter, master in self._masters.items():
            parameter.grad = master.grad = None

    def exact(self, module: nn.Module) -> dict[str, Tensor]:
        """Return the parameters of a module by name, live, each at the precision in which it is moved."""
        named = module.named_parameters()
        return {name: self._masters.get(parameter, parameter).detach() for name, parameter in named}

    def held(self, parameter: nn.Parameter) -> list[Tensor]:
        """Return what holds a parameter: itself, and its master if it has one."""
        master = self._masters.get(parameter)
        return [parameter.detach()] if master is None else [parameter.detach(), master.detach()]
