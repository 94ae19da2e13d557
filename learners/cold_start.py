"""Supervised cold start: teach a policy to answer like given conversations before reinforcement learning takes over.

Takes conversations (or ready `Example`s), trains the policy's own module in place. Invariant: only ids the policy
itself would have sampled carry loss, as the renderer's `sampled_mask` says; everything else is context.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from clawgym_env.engine.base import TokenIds
from clawgym_env.messages import Message, ToolSpec
from clawgym_env.rendering import message_dicts, tool_dicts
from learners.master_weights import MasterWeights

if TYPE_CHECKING:
    from renderers.base import Renderer
    from transformers import PreTrainedModel

Batch = Sequence["Example"]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One token sequence to learn from."""

    token_ids: TokenIds
    """Shape [T]."""
    loss_mask: npt.NDArray[np.bool_]
    """Shape [T]: which ids are predicted."""

    def __len__(self) -> int:
        return len(self.token_ids)


def make_example(renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Example:
    """Render a conversation; the loss is on what the assistant would have sampled."""
    rendered = renderer.render(message_dicts(messages), tools=tool_dicts(tools))
    return Example(np.array(rendered.token_ids, dtype=np.int32), np.array(rendered.sampled_mask, dtype=np.bool_))


def batches(examples: Sequence[Example], batch_size: int, rng: np.random.Generator) -> list[Batch]:
    """Shuffle into batches of similar length: whole batches are shuffled, examples within a window sorted."""
    order = rng.permutation(len(examples))
    window = 32 * batch_size
    sorted_order: list[int] = []
    for start in range(0, len(order), window):
        sorted_order += sorted(order[start : start + window].tolist(), key=lambda i: len(examples[i]))
    groups = [sorted_order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [[examples[i] for i in groups[g]] for g in rng.permutation(len(groups))]


def train(
    module: PreTrainedModel,
    steps: Iterator[Batch],
    *,
    num_steps: int,
    learning_rate: float = 2e-3,
    warmup_steps: int = 50,
    weight_decay: float = 0.0,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """Train in place with AdamW, linear warm-up and a linear decay to a tenth; return the last loss in nats a token.

    Args:
        steps: yields one batch a step.
        on_step: called with (step, loss).
    """
    module.train()
    masters = MasterWeights()
    parameters = masters.of(module)
    optimizer = torch.optim.AdamW(
        parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
    )
    loss = float("nan")
    for step, batch in zip(range(num_steps), steps, strict=False):
        rate = min(1.0, (step + 1) / warmup_steps) * (1.0 - 0.9 * step / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * rate
        value = batch_loss(module, batch)
        value.backward()  # type: ignore[no-untyped-call]
        masters.take_gradients()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        masters.give_back()
        optimizer.zero_grad(set_to_none=True)
        loss = value.item()
        if on_step is not None:
            on_step(step, loss)
    module.train(False)
    return loss


def batch_loss(module: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the mean negative log-likelihood of the batch's masked tokens.

    The prefix all examples share (system prompt, tools) is computed once and its keys and values are broadcast.
    """
    model: Any = module
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    # With activation checkpointing a model in training keeps no keys and values.
    shared = 0 if model.training and _checkpoints(decoder) else _shared_prefix(batch)
    width = max(len(example) for example in batch) - shared
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    mask = torch.zeros(len(batch), width, dtype=torch.bool)
    for row, example in enumerate(batch):
        ids[row, : len(example) - shared] = torch.from_numpy(example.token_ids[shared:])
        mask[row, : len(example) - shared] = torch.from_numpy(example.loss_mask[shared:])
    device = next(module.parameters()).device
    ids, mask = ids.to(device), mask.to(device)
    keywords: dict[str, object] = {"use_cache": False}
    if shared:
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        keywords = {_cache_keyword(decoder): cache, "use_cache": True}
        prefix = torch.from_numpy(batch[0].token_ids[:shared]).long()[None].to(device)
        decoder(input_ids=prefix, **keywords)
        cache.batch_repeat_interleave(len(batch))
    hidden = decoder(input_ids=ids, **keywords).last_hidden_state
    targets = mask[:, 1:]
    logits = head(hidden[:, :-1][targets])
    return F.cross_entropy(logits.float(), ids[:, 1:][targets])


def _checkpoints(model: Any) -> bool:
    # Renamed within transformers 5; the old name warns where both exist.
    name = "is_activation_checkpointing"
    return bool(getattr(model, name if hasattr(type(model), name) else "is_gradient_checkpointing"))


def _cache_keyword(model: Any) -> str:
    # Renamed in transformers 5.24; the old name warns there.
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _shared_prefix(batch: Batch) -> int:
    """Return how many leading ids all examples share; no id with loss, nor the one before it, is among them."""
    first = batch[0].token_ids
    size = min(min(len(example), int(example.loss_mask.argmax())) for example in batch)
    for example in batch[1:]:
        different = np.flatnonzero(example.token_ids[:size] != first[:size])
        if len(different):
            size = int(different[0])
    return max(size - 1, 0)
