from __future__ import annotations

import numpy as np
import pytest
import torch
from learner_fakes import Turn, make_policy, make_rollout
from peft import LoraConfig

from clawgym_env.trace.prefix_tree import Selection
from learners.forward import trained_hidden
from learners.ppo import TreePPO
from learners.rows import MicroBatch, pack, trained_rows, training_rows
from learners.sharding import Processes
from learners.value_head import Critic, LeastSquares, ValueHead


def micro_batch() -> MicroBatch:
    rows = training_rows(
        [trained_rows(make_rollout([Turn([1, 2], [3, 4, 5])], 1.0), Selection())], np.ones(1), np.ones(1)
    )
    (batch,) = pack(rows, max_tokens=100)
    return batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_critic_says_zero_in_fp32_before_it_has_learned(dtype: torch.dtype) -> None:
    module = make_policy().module.to(dtype)
    batch = micro_batch()
    values = Critic(module, "head", trunk_gradient=False)(batch, trained_hidden(module, batch))
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reaches", [True, False])
def test_the_value_gradient_reaches_the_trunk_only_where_asked(reaches: bool) -> None:
    module = make_policy().module
    batch = micro_batch()
    critic = Critic(module, "head", trunk_gradient=reaches)
    torch.nn.init.ones_(critic.head.weight)
    critic(batch, trained_hidden(module, batch)).sum().backward()
    assert critic.head.weight.grad is not None
    assert any(p.grad is not None and bool(p.grad.any()) for p in module.parameters()) == reaches


def test_a_separate_critic_reads_a_trunk_of_its_own_without_an_output_layer() -> None:
    policy = make_policy()
    batch = micro_batch()
    critic = Critic(policy.module, "separate", trunk_gradient=False)
    hidden = trained_hidden(policy.module, batch)
    torch.testing.assert_close(critic.hidden(batch, hidden), hidden)
    torch.nn.init.ones_(critic.head.weight)
    critic(batch, hidden).sum().backward()
    assert all(parameter.grad is None for parameter in policy.module.parameters())
    names = {name for name, _ in critic.named_parameters()}
    assert all(p.grad is not None for p in critic.parameters())
    assert {"head.weight", "head.bias", "trunk.model.embed_tokens.weight"} <= names
    assert not any("lm_head" in name for name in names)


def test_a_separate_critic_trains_what_the_policy_trains() -> None:
    critic = TreePPO(make_policy(), critic="separate", lora=LoraConfig(r=2, target_modules=["q_proj"])).critic
    trained = [name for name, parameter in critic.named_parameters() if parameter.requires_grad]
    assert trained[:2] == ["head.weight", "head.bias"]
    assert len(trained) == 2 + 2 * 2
    assert all("lora_" in name for name in trained[2:])


def fitted(parts: int, *, ridge: float = 0.0, times: int = 1) -> tuple[ValueHead, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(60, 5, generator=generator)
    returns = hidden @ torch.tensor([1.0, -2.0, 0.0, 0.5, 0.0]) + 0.3
    head = ValueHead(5)
    for _ in range(times):
        fit = LeastSquares(head)
        for piece in torch.arange(60).chunk(parts):
            fit.add(hidden[piece], returns[piece], torch.full((len(piece),), 1 / 60))
        fit.solve(Processes(), ridge=ridge)
    return head, hidden, returns


def test_least_squares_find_what_is_linear_exactly() -> None:
    head, hidden, returns = fitted(1)
    torch.testing.assert_close(head(hidden), returns)
    assert head.bias.item() == pytest.approx(0.3, abs=1e-5)


def test_least_squares_do_not_depend_on_how_the_batch_is_cut() -> None:
    whole, hidden, _ = fitted(1, ridge=0.1)
    torch.testing.assert_close(fitted(7, ridge=0.1)[0](hidden), whole(hidden))


def test_a_ridge_holds_the_head_near_where_it_was_and_lets_it_come() -> None:
    held, hidden, returns = fitted(1, ridge=1.0)
    heads = [fitted(1, ridge=1.0, times=times)[0] for times in (1, 2, 8)]
    errors = [(head(hidden) - returns).square().mean().item() for head in heads]
    assert errors[0] > 0.1
    assert errors[2] < errors[1] / 4 < errors[0] / 8
    assert held.weight.norm() < fitted(1)[0].weight.norm() * 0.7


def test_tokens_without_weight_do_not_count() -> None:
    head = ValueHead(1)
    fit = LeastSquares(head)
    fit.add(torch.tensor([[1.0], [2.0], [5.0]]), torch.tensor([1.0, 2.0, -70.0]), torch.tensor([0.5, 0.5, 0.0]))
    fit.solve(Processes(), ridge=0.0)
    assert head(torch.tensor([[3.0]])).item() == pytest.approx(3.0, abs=1e-4)
