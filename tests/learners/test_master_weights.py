"""Half-precision policies: steps too small for bf16 are taken all the same, and a checkpoint holds them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout

from clawgym_env.policy import Policy
from clawgym_env.rollout import Rollout
from learners.grpo import TreeGRPO
from learners.policy_gradient import PolicyGradientLearner
from learners.ppo import TreePPO
from learners.sft import finetune
from learners.testing import small_policy

DTYPES = [torch.float32, torch.bfloat16]


def pair() -> list[Rollout]:
    return [make_rollout([Turn([1, 2], [3, 4, 5])], 1.0), make_rollout([Turn([1, 2], [9, 10])], 0.0, index=1)]


def policy_of(dtype: torch.dtype) -> Policy:
    policy = make_policy(initializer_range=0.02)
    policy.module.to(dtype)
    return policy


def moved(before: dict[str, torch.Tensor], policy: Policy) -> float:
    squares = [(after.detach().float() - before[name].float()).square().sum() for name, after in state(policy).items()]
    return float(torch.stack(squares).sum().sqrt())


def state(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.module.named_parameters()}


def test_steps_far_below_what_bf16_tells_apart_move_the_policy_as_far_as_in_fp32() -> None:
    distances = []
    for dtype in DTYPES:
        policy = policy_of(dtype)
        before = state(policy)
        learner = TreeGRPO(policy, learning_rate=1e-6, engine=CountingEngine(policy))
        for _ in range(200):
            learner.update(pair())
        distances.append(moved(before, policy))
    assert distances[1] == pytest.approx(distances[0], rel=0.2)


def make_ppo(policy: Policy) -> PolicyGradientLearner:
    return TreePPO(policy, critic="separate", engine=CountingEngine(policy))


def make_grpo(policy: Policy) -> PolicyGradientLearner:
    return TreeGRPO(policy, engine=CountingEngine(policy))


@pytest.mark.parametrize("make", [make_grpo, make_ppo])
def test_a_resumed_run_goes_on_from_what_the_weights_do_not_show(make: Any) -> None:
    first = make(policy_of(torch.bfloat16))
    for _ in range(3):
        first.update(pair())
    saved = copy.deepcopy(dict(first.state_dict()))
    second = make(policy_of(torch.bfloat16))
    second.load_state_dict(saved)
    for learner in (first, second):
        for _ in range(30):
            learner.update(pair())
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    assert any(tensor.dtype is torch.float32 for tensor in saved["parameters"].values())


def test_what_something_else_has_moved_is_not_moved_back() -> None:
    """`examples/train_mix.py` makes its learner before the cold start."""
    policy = small_policy()
    policy.module.to(torch.bfloat16)
    learner = TreeGRPO(policy, engine=CountingEngine(policy))
    begun = state(policy)
    finetune(policy, pair(), num_epochs=3)
    taught = state(policy)
    assert moved(begun, policy) > 1e-2
    learner.update(pair())
    assert moved(taught, policy) < 1e-3


@pytest.mark.parametrize("dtypes", [DTYPES, DTYPES[::-1]], ids=str)
def test_a_state_is_good_for_a_policy_of_another_precision(dtypes: list[torch.dtype]) -> None:
    """A checkpoint's folder is opened in fp32 unless told otherwise."""
    first, second = (make_grpo(policy_of(dtype)) for dtype in dtypes)
    for _ in range(3):
        first.update(pair())
    saved: Any = first.state_dict()
    second.load_state_dict(saved)
    for name, tensor in second.policy.module.named_parameters():
        assert torch.equal(tensor, saved["parameters"][name].to(tensor.dtype))
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)
    second.update(pair())
