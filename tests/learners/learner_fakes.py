"""Hand-made rollouts, a policy of a few thousand parameters, and an engine that only counts updates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from clawgym_env.engine.base import SamplingParams, VersionSpan
from clawgym_env.grading.base import Grade
from clawgym_env.policy import Policy
from clawgym_env.rollout import Exclusion, Rollout, StopReason
from clawgym_env.trace.calls import CallKind, CallState, CallTiming, ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree

VOCAB = 16


@dataclass(frozen=True)
class Turn:
    """One call: the new prompt tokens and the reply, on top of call `parent`."""

    delta: Sequence[int]
    reply: Sequence[int]
    parent: int | None = None
    kind: CallKind = "main"
    state: CallState = "live"
    logprobs: Sequence[float] | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)


def make_tree(turns: Sequence[Turn]) -> PrefixTree:
    calls: list[ModelCall] = []
    for index, turn in enumerate(turns):
        parent = None if turn.parent is None else calls[turn.parent]
        logprobs = np.zeros(len(turn.reply)) if turn.logprobs is None else turn.logprobs
        calls.append(
            ModelCall(
                id=f"call{index}",
                index=index,
                lineage_parent=turn.parent,
                prefix_parent=turn.parent,
                prefix_len=0 if parent is None else parent.history_len,
                delta_token_ids=np.array(turn.delta, dtype=np.int32),
                token_ids=np.array(turn.reply, dtype=np.int32),
                logprobs=np.array(logprobs, dtype=np.float32),
                policy_versions=(VersionSpan(0, 0, len(turn.reply)),),
                sampling=turn.sampling,
                finish_reason="stop",
                kind=turn.kind,
                state=turn.state,
                dialect="chat",
                drift_reason=None,
                request_hash=f"request{index}",
                role_hash=turn.kind,
                starved=False,
                timing=CallTiming(0.0, 0.0, 0.0),
            )
        )
    return PrefixTree(calls)


def make_rollout(
    turns: Sequence[Turn],
    reward: float | None,
    *,
    group: str = "g",
    index: int = 0,
    harness: str = "mini",
    exclusion: Exclusion | None = None,
) -> Rollout:
    return Rollout(
        id=f"{group}/{index}",
        task_id=f"task-{group}",
        harness=harness,
        policy="fake",
        group_id=group,
        index=index,
        seed=0,
        tree=make_tree(turns),
        stop_reason=StopReason.COMPLETED if reward is not None else StopReason.SANDBOX_ERROR,
        grade=None if reward is None else Grade(reward),
        exclusion=exclusion if reward is not None else "ungraded",
        instruction="",
        response="",
    )


def make_policy(*, seed: int = 0, **config: Any) -> Policy:
    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    module = LlamaForCausalLM(LlamaConfig(**(shape | config))).eval()
    fake: Any = None
    return Policy(module=module, tokenizer=fake, renderer=fake, name="fake", path=None, context_length=128)


class CountingEngine:
    """Applies updates and keeps the gradient each was taken with."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.gradients: list[dict[str, torch.Tensor]] = []

    @property
    def policy_version(self) -> int:
        return self.policy.version

    def update_weights(self, apply: Callable[[], None]) -> int:
        parameters = self.policy.module.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})
        apply()
        self.policy.version += 1
        return self.policy.version


def reply_logprobs(
    policy: Policy, prompt: Sequence[int], reply: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """What an engine that computes like the trainer reports, by a forward of its own over the plain module."""
    ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        logits = policy.module(input_ids=ids).logits[0] / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    start = len(prompt)
    return [float(logprobs[start + i - 1, token]) for i, token in enumerate(reply)]
