import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.losses import (
    TIS_MODES,
    TisMode,
    clipped_policy_loss,
    clipped_value_loss,
    importance_weights,
    k3,
    token_weights,
)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.2, 1.0, -1.2),
        (1.5, 1.0, -1.28),  # too far up for a good token
        (0.5, 1.0, -0.5),  # the pessimistic side is not clipped
        (0.5, -1.0, 0.8),  # too far down for a bad token
        (1.5, -1.0, 1.5),
    ],
)
def test_clip_is_asymmetric_and_pessimistic(ratio: float, advantage: float, expected: float) -> None:
    loss = clipped_policy_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    )
    assert loss.item() == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([math.log(1.5), 0.0], requires_grad=True)
    clipped_policy_loss(logprobs, torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.28).sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [0.0, -1.0]


def test_importance_weights_are_capped_above_only() -> None:
    shift = torch.tensor([0.0, math.log(1.5), math.log(5.0), math.log(0.1)])
    assert importance_weights(shift, torch.zeros(4), cap=2.0).tolist() == pytest.approx([1.0, 1.5, 2.0, 0.1])


@given(shifts=st.lists(st.floats(-50, 50), min_size=1), cap=st.floats(1, 10), mode=st.sampled_from(TIS_MODES))
def test_no_importance_weight_is_above_the_cap(shifts: list[float], cap: float, mode: TisMode) -> None:
    weights = importance_weights(torch.tensor(shifts), torch.zeros(len(shifts)), cap=cap, mode=mode)
    assert float(weights.max()) <= torch.tensor(cap)
    assert float(weights.min()) >= 0.0


def test_importance_weights_carry_no_gradient() -> None:
    old = torch.zeros(1, requires_grad=True)
    assert not importance_weights(old, torch.zeros(1), cap=2.0).requires_grad


def test_masked_importance_weights_leave_out_what_disagrees_either_way() -> None:
    shift = torch.tensor([0.0, math.log(1.5), math.log(5.0), math.log(0.1), math.log(0.6)])
    weights = importance_weights(shift, torch.zeros(5), cap=2.0, mode="mask")
    assert weights.tolist() == pytest.approx([1.0, 1.5, 0.0, 0.0, 0.6])


@pytest.mark.parametrize(
    ("value", "expected", "moves"),
    [
        (0.1, 0.81, True),
        (0.5, 0.64, False),  # towards the return, but further than 0.2: as if it were at 0.2
        (-0.5, 2.25, True),  # away from it: the pessimistic side is not clipped
    ],
)
def test_a_value_is_clipped_and_pessimistic(value: float, expected: float, moves: bool) -> None:
    values = torch.tensor([value], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(1), torch.ones(1), clip=0.2)
    loss.sum().backward()
    assert loss.item() == pytest.approx(expected)
    assert values.grad is not None
    assert bool(values.grad) == moves


@given(st.floats(-3, 3), st.floats(-3, 3))
def test_without_a_bound_the_value_loss_is_the_squared_error(value: float, old: float) -> None:
    loss = clipped_value_loss(torch.tensor(value), torch.tensor(old), torch.tensor(1.0), clip=math.inf)
    assert loss.item() == pytest.approx((value - 1.0) ** 2, rel=1e-4, abs=1e-5)


@given(st.floats(-8, 8))
def test_k3_is_never_negative(log_ratio: float) -> None:
    assert k3(torch.tensor(log_ratio, dtype=torch.float64)) >= 0


def test_k3_averages_to_the_divergence() -> None:
    q, p = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])
    expected = (q * (q / p).log()).sum()
    assert (q * k3((p / q).log())).sum().item() == pytest.approx(expected.item(), rel=1e-5)


def test_token_weights_by_hand() -> None:
    counts, keys = np.array([1, 3, 4]), ["a", "a", "b"]
    assert token_weights(counts, keys, "rollout").tolist() == pytest.approx([1 / 3, 1 / 9, 1 / 12])
    assert token_weights(counts, keys, "token").tolist() == pytest.approx([1 / 8] * 3)
    assert token_weights(counts, keys, "group").tolist() == pytest.approx([1 / 8] * 3)
    assert token_weights(counts, ["a", "b", "b"], "group").tolist() == pytest.approx([1 / 2, 1 / 14, 1 / 14])


@given(st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abc")), min_size=1, max_size=12))
def test_every_mode_is_a_mean(rollouts: list[tuple[int, str]]) -> None:
    counts, keys = np.array([count for count, _ in rollouts]), [key for _, key in rollouts]
    assert (token_weights(counts, keys, "rollout") * counts).sum() == pytest.approx(1.0)
    assert (token_weights(counts, keys, "token") * counts).sum() == pytest.approx(1.0)
    assert (token_weights(counts, keys, "group") * counts).sum() == pytest.approx(1.0)
