"""Log-probabilities and entropies of logits, [M, V] to [M], with little memory and few passes over it.

`forward` calls it on the output layer's logits. Autograd would keep a copy of them for each operation of a log-softmax
and an entropy, and on a CPU reading and writing those copies takes as long as the output layer's product. Here the
logits alone are kept, the rest is made of a few rows at a time, and the gradient takes the logits' own place.
Invariant: results and gradients are those of the equations, computed in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK = 1 << 18
"""Logits worked on at once on a CPU: a MiB of float32, which stays in its cache from one operation to the next."""


def logprobs_and_entropies(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p_t of each row's target t and the entropy H of each row; both have a gradient, once.

    log p_v = x_v − log Σ_u exp(x_u) and H = −Σ_v p_v log p_v, with x the logits over the temperature.

    Args:
        logits: shape [M, V], of any float dtype. Backward overwrites them: whatever else needs them for a gradient, or
            a second backward, gets autograd's error about modified tensors.
        targets: shape [M], int64.
        temperatures: shape [M], above 0.

    Returns:
        Two tensors of shape [M], nats, in float32 or wider.
    """
    results: tuple[Tensor, Tensor] = _Categorical.apply(logits, targets, temperatures)  # type: ignore[no-untyped-call]
    return results


class _Categorical(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        chosen, normaliser, entropy = (logits.new_empty(len(logits), dtype=dtype) for _ in range(3))
        for rows in _blocks(logits):
            scaled = logits[rows].to(dtype) / temperatures[rows, None]
            highest = scaled.amax(dim=-1, keepdim=True)
            exps = (scaled - highest).exp_()
            total = exps.sum(dim=-1)
            normaliser[rows] = highest.squeeze(-1) + total.log()
            chosen[rows] = scaled.gather(-1, targets[rows, None]).squeeze(-1)
            # H = log Σ exp(x) − Σ p x: no copy of log p.
            entropy[rows] = normaliser[rows] - torch.linalg.vecdot(exps, scaled) / total
        ctx.save_for_backward(logits, targets, temperatures, normaliser, entropy)
        ctx.set_materialize_grads(False)
        return chosen - normaliser, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor | None, of_entropies: Tensor | None) -> tuple[Tensor, None, None]:
        """Take dlog p_t/dx_v = [v = t] − p_v and dH/dx_v = −p_v (log p_v + H); None is a gradient of zero."""
        logits, targets, temperatures, normaliser, entropy = ctx.saved_tensors
        chosen = torch.zeros_like(normaliser) if of_logprobs is None else of_logprobs
        for rows in _blocks(logits):
            logprobs = logits[rows].to(normaliser.dtype) / temperatures[rows, None]
            logprobs -= normaliser[rows, None]
            if of_entropies is None:
                part = logprobs.exp_().mul_(-chosen[rows, None])
            else:
                pull = chosen[rows, None] + of_entropies[rows, None] * (logprobs + entropy[rows, None])
                part = logprobs.exp_().mul_(-pull)
            part.scatter_add_(-1, targets[rows, None], chosen[rows, None])
            logits[rows] = part.div_(temperatures[rows, None])
        return logits, None, None


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Cut the rows of logits into blocks; elsewhere than on a CPU, where launches cost more than memory, into one."""
    size = max(1, BLOCK // logits.shape[1]) if logits.device.type == "cpu" else max(1, len(logits))
    return (slice(start, start + size) for start in range(0, len(logits), size))
