"""Fakes for tests of learners and trainers, yours too, and the contract that every learner keeps.

`small_policy` is a language model of a few thousand parameters with a real tokenizer and renderer; `ScriptedPolicy`
samples from a script while its weights are trained; `check_learner` is the contract test.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from clawgym_env.engine.base import ApiUsage, Engine, SamplingParams, VersionSpan
from clawgym_env.engine.scripted import Script, ScriptedEngine
from clawgym_env.grading.base import Grade
from clawgym_env.policy import Policy
from clawgym_env.rendering import ChatMLRenderer
from clawgym_env.rollout import Exclusion, Rollout, StopReason
from clawgym_env.tokenizer import byte_tokenizer
from clawgym_env.trace.calls import CallTiming, ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree
from learners.base import Learner


def small_policy(seed: int = 0, *, context_length: int = 2048) -> Policy:
    """Return a random two-layer Llama over the byte tokenizer; the same seed gives the same weights."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_length,
        initializer_range=0.3,
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        module = LlamaForCausalLM(config).train(False)
    return Policy(
        module=module,
        tokenizer=tokenizer,
        renderer=ChatMLRenderer(tokenizer),
        name="small",
        path=None,
        context_length=context_length,
    )


class ScriptedPolicy(ScriptedEngine):
    """Samples from a script and counts the updates of the policy that is trained on the answers."""

    def __init__(self, policy: Policy, reply: Script, *, latency_s: float = 0.0) -> None:
        self.policy = policy
        super().__init__(
            reply,
            tokenizer=policy.tokenizer,
            renderer=policy.renderer,
            context_length=policy.context_length,
            latency_s=latency_s,
        )

    @property
    def _policy_version(self) -> int:
        return self.policy.version

    @_policy_version.setter
    def _policy_version(self, version: int) -> None:
        self.policy.version = version


def one_call_rollout(
    prompt: Sequence[int],
    reply: Sequence[int],
    reward: float | None,
    *,
    group: str = "g",
    index: int = 0,
    version: int = 0,
    exclusion: Exclusion | None = None,
) -> Rollout:
    """Return a rollout of one call; without a reward it is ungraded. Log-probabilities are made up: -1 nat each."""
    call = ModelCall(
        id=f"{group}/{index}#0",
        index=0,
        lineage_parent=None,
        prefix_parent=None,
        prefix_len=0,
        delta_token_ids=np.array(prompt, dtype=np.int32),
        token_ids=np.array(reply, dtype=np.int32),
        logprobs=np.full(len(reply), -1.0, dtype=np.float32),
        policy_versions=(VersionSpan(version, 0, len(reply)),),
        sampling=SamplingParams(),
        finish_reason="stop",
        kind="main",
        state="live",
        dialect="chat",
        drift_reason=None,
        request_hash="",
        role_hash="",
        starved=False,
        timing=CallTiming(0.0, 0.0, 0.0),
    )
    return Rollout(
        id=f"{group}/{index}",
        task_id=f"task of {group}",
        harness="none",
        policy="small",
        group_id=group,
        index=index,
        seed=index,
        tree=PrefixTree([call]),
        stop_reason=StopReason.COMPLETED if reward is not None else StopReason.SANDBOX_ERROR,
        grade=None if reward is None else Grade(reward),
        exclusion=exclusion if reward is not None else "ungraded",
        instruction="",
        response="",
    )


def check_learner(make: Callable[[Policy], Learner], *, batch: Sequence[Rollout] | None = None) -> None:
    """Assert the contract of `base.Learner`.

    Args:
        make: builds the learner over a policy. It is called several times, each time with a policy of its own.
        batch: rollouts with token ids below 256 that move this learner's weights; one is made up by default.

    Raises:
        AssertionError: with what is wrong.
    """
    batch = _batch() if batch is None else batch
    policy = small_policy()
    learner = make(policy)
    assert isinstance(learner, Learner), "a learner has engine, update, state_dict and load_state_dict"
    engine = learner.engine()
    assert learner.engine() is engine, "engine() returns the same engine at every call"

    before, version = _frozen(learner), engine.policy_version
    with _weights_seen(engine, policy) as seen:
        metrics = learner.update(batch)
    for name, value in metrics.items():
        assert isinstance(value, float), f"metrics are plain floats, {name} is {type(value).__name__}"
        assert math.isfinite(value), f"metrics are finite, {name} is {value}"
    assert _frozen(learner) != before, "an update on a batch with signal changes the state"
    outside = [torch.equal(a, b) for a, b in zip(seen[::2], seen[1::2], strict=True)]
    assert len(seen) == 2 or all(outside), "weights change within Engine.update_weights only"
    assert engine.policy_version > version, "weights change within Engine.update_weights only, which counts"

    after = _weights(learner, policy)
    left_out = [_replaced(rollout, exclusion) for rollout in batch for exclusion in ("relayed", "stale", "ungraded")]
    for nothing in ([], left_out):
        learner.update(nothing)
        assert _weights(learner, policy) == after, (
            "rollouts that are excluded or have no grade, or no rollouts at all, move no weights"
        )

    first = make(small_policy())
    first.update(batch)
    state = _through_a_file(first)
    second = make(small_policy(seed=1))
    second.load_state_dict(state)
    for learner in (first, second):
        learner.update(batch)
    assert _frozen(first) == _frozen(second), "a learner that loads a state goes on exactly"


def _batch() -> list[Rollout]:
    return [
        one_call_rollout([1, 2, 3 + group], [4 + index, 7 + group], float(index == 0), group=f"g{group}", index=index)
        for group in range(2)
        for index in range(3)
    ]


def _replaced(rollout: Rollout, exclusion: Exclusion) -> Rollout:
    import dataclasses

    grade = None if exclusion == "ungraded" else rollout.grade
    usage = ApiUsage() if exclusion == "relayed" else None
    tree = PrefixTree([dataclasses.replace(call, api_usage=usage) for call in rollout.tree])
    return dataclasses.replace(rollout, exclusion=exclusion, grade=grade, tree=tree)


def _through_a_file(learner: Learner) -> Mapping[str, object]:
    """Save and load a state as a checkpoint does: it has to be readable without running code."""
    file = io.BytesIO()
    torch.save(dict(learner.state_dict()), file)
    file.seek(0)
    state: Mapping[str, object] = torch.load(file, weights_only=True)
    return state


def _frozen(learner: Learner) -> str:
    """Return a state as text in which equal tensors are equal."""
    return repr(_plain(copy.deepcopy(dict(learner.state_dict()))))


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().flatten().tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _weights(learner: Learner, policy: Policy) -> str:
    """Return the policy's weights and what in a state is shaped like them, as text in which equal ones are equal."""
    own = [parameter.detach() for parameter in policy.module.parameters()]
    shapes = {tensor.shape for tensor in own}
    found: list[object] = [_plain(own)]

    def collect(value: object) -> None:
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.shape in shapes:
            found.append(_plain(value))
        elif isinstance(value, Mapping):
            for item in value.values():
                collect(item)
        elif isinstance(value, list | tuple):
            for item in value:
                collect(item)

    collect(learner.state_dict())
    return repr(found)


@contextmanager
def _weights_seen(engine: Engine, policy: Policy) -> Iterator[list[torch.Tensor]]:
    """Note the policy's weights before and after, and at both ends of every `update_weights` of this engine."""

    def weights() -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in policy.module.parameters()])

    seen = [weights()]
    original = type(engine).update_weights

    def watched(self: Engine, apply: Callable[[], None]) -> int:
        def inside() -> None:
            seen.append(weights())
            apply()
            seen.append(weights())

        return original(self, inside if self is engine else apply)

    with patch.object(type(engine), "update_weights", watched):  # an instance may have no place for it
        yield seen
    seen.append(weights())
