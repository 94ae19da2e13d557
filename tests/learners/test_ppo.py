from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout, reply_logprobs

from clawgym_env.policy import Policy
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection
from learners.base import Learner
from learners.grpo import TreeGRPO
from learners.ppo import TreePPO

Gradient = dict[str, torch.Tensor]
GOOD = [Turn([1, 2], [3, 4, 5]), Turn([6], [7, 8], parent=0)]
BAD = [Turn([1, 2], [9]), Turn([6, 6], [10, 11, 12, 13], parent=0)]


class Recording(CountingEngine):
    """Keeps the critic's gradients, too."""

    critic: torch.nn.Module

    def update_weights(self, apply: Callable[[], None]) -> int:
        parameters = {f"critic.{name}": p for name, p in self.critic.named_parameters()}
        mine = {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None}
        version = super().update_weights(apply)
        self.gradients[-1] |= mine
        return version


def make_learner(policy: Policy | None = None, *, head: float = 0.0, seed: int = 0, **settings: Any) -> TreePPO:
    """A learner whose value head is random, of deviation `head`."""
    policy = policy or make_policy(seed=seed)
    engine: Any = Recording(policy)
    learner = TreePPO(policy, engine=engine, **{"max_grad_norm": math.inf, **settings})
    engine.critic = learner.critic
    with torch.no_grad():
        torch.manual_seed(1)
        learner.critic.head.weight.normal_(std=head)
    return learner


def learn(rollouts: Sequence[Rollout], **settings: Any) -> tuple[Gradient, dict[str, float]]:
    """One update from the same start; returns the gradient of its first step and the metrics."""
    learner = make_learner(**settings)
    metrics = learner.update(rollouts)
    engine: Any = learner.engine()
    return (engine.gradients[0] if engine.gradients else {}), metrics


def assert_same_gradient(first: Gradient, second: Gradient) -> None:
    assert first.keys() == second.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in first.values())
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def pair(good: Sequence[Turn] = GOOD, bad: Sequence[Turn] = BAD) -> list[Rollout]:
    """Two groups of one."""
    return [make_rollout(good, 1.0), make_rollout(bad, 0.0, group="h")]


APART = [make_rollout(GOOD, 1.0), make_rollout([Turn([2, 1], [9]), BAD[1]], 0.0, group="h")]
"""Rollouts that share no state, so that a critic can tell all their tokens apart."""


def by_hand(policy: Policy, terms: Sequence[tuple[Sequence[int], Sequence[tuple[int, float]]]]) -> Gradient:
    """The policy's gradient of −Σ c w log π over paths of ids with (place, c) of tokens; w = π, as logged."""
    loss = torch.zeros(())
    for ids, tokens in terms:
        logprobs = torch.log_softmax(policy.module(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        for place, coefficient in tokens:
            logprob = logprobs[place - 1, ids[place]]
            loss = loss - coefficient * logprob.detach().exp() * logprob
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.module.named_parameters() if p.grad is not None}


def test_it_is_a_learner() -> None:
    assert isinstance(make_learner(), Learner)


def test_gradient_of_a_single_rollout_equals_one_computed_by_hand() -> None:
    policy = make_policy()
    learner = make_learner(policy, head=0.2, value_coef=0.5)
    ids = [1, 2, 3, 4]
    with torch.no_grad():
        hidden = policy.module.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0, 1:3]
        values = learner.critic.head(hidden)
    exact = Turn([1, 2], [3, 4], logprobs=reply_logprobs(policy, [1, 2], [3, 4]))
    metrics = learner.update([make_rollout([exact], 0.75)])
    engine: Any = learner.engine()
    (gradient,) = engine.gradients
    fresh = make_policy()
    logprobs = torch.log_softmax(fresh.module(input_ids=torch.tensor([ids])).logits[0], dim=-1)
    (-sum((0.75 - values[i]) * logprobs[i + 1, ids[i + 2]] for i in range(2)) / 2).backward()
    for name, parameter in fresh.module.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
    # 0.5 times the mean of (V - R)^2, which the trunk does not feel.
    slope = 0.5 * 2 * (values - 0.75) / 2
    torch.testing.assert_close(gradient["critic.head.weight"], slope @ hidden)
    torch.testing.assert_close(gradient["critic.head.bias"], slope.sum()[None])
    assert metrics["loss/value"] == pytest.approx((values - 0.75).square().mean().item(), rel=1e-5)
    assert metrics["value/mean"] == pytest.approx(values.mean().item(), rel=1e-5)
    assert metrics["groups/singleton"] == 1.0


def test_the_trunk_feels_the_value_loss_where_asked() -> None:
    apart, _ = learn(pair(), head=0.2)
    joined, _ = learn(pair(), head=0.2, value_trunk_gradient=True)
    difference = {name: joined[name] - apart[name] for name in apart}
    assert not difference["critic.head.weight"].any()
    policy = make_policy()
    learner = make_learner(policy, head=0.2)
    loss = torch.zeros(())
    for ids, places, reward in (
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 5, 6], 1.0),
        ([1, 2, 9, 6, 6, 10, 11, 12, 13], [1, 4, 5, 6, 7], 0.0),
    ):
        hidden = policy.module.get_decoder()(input_ids=torch.tensor([ids])).last_hidden_state[0, places]
        loss = loss + 0.5 * (learner.critic.head(hidden) - reward).square().mean() / 2
    loss.backward()
    for name, parameter in policy.module.get_decoder().named_parameters():
        torch.testing.assert_close(difference[f"model.{name}"], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("settings", [{}, {"critic": "separate"}, {"value_trunk_gradient": True}], ids=str)
@pytest.mark.parametrize("steps", [1, 2])
def test_neither_packing_nor_micro_batches_change_a_gradient(settings: dict[str, Any], steps: int) -> None:
    forked = [*GOOD, Turn([6, 7], [9, 9], parent=0, state="dead")]
    rollouts = [*pair(forked), make_rollout(GOOD, 0.2, group="h", index=1)]
    settings = {
        "head": 0.2,
        "selection": Selection(dead="train"),
        "updates_per_batch": steps,
        "gae_lambda": 0.9,
        **settings,
    }
    whole, whole_metrics = learn(rollouts, packing="flat", **settings)
    for packing, tokens, checkpointing in (("flat", 1, False), ("forest", 1000, False), ("forest", 12, True)):
        how = {"packing": packing, "micro_batch_tokens": tokens, "gradient_checkpointing": checkpointing}
        cut, metrics = learn(rollouts, **how, **settings)
        assert_same_gradient(whole, cut)
        for name in ("value/mean", "value/explained_variance", "loss/value", "loss/policy"):
            assert metrics[name] == pytest.approx(whole_metrics[name], rel=1e-3, abs=1e-5)


def test_a_second_look_before_several_steps_does_not_change_the_first() -> None:
    once, _ = learn(pair(), head=0.2)
    twice, metrics = learn(pair(), head=0.2, updates_per_batch=2, learning_rate=0.05, value_learning_rate=0.5)
    assert_same_gradient(once, twice)
    assert metrics["ratio/clip_fraction"] > 0.0


def test_a_value_that_went_too_far_has_no_gradient_in_the_next_step() -> None:
    settings = {"updates_per_batch": 2, "value_learning_rate": 0.01, "learning_rate": 1e-9}
    for clip, moves in ((1e-3, False), (math.inf, True)):
        learner = make_learner(value_clip=clip, **settings)
        learner.update([make_rollout([Turn([1], [2])], 1.0)])  # a step of AdamW moves V beyond 0.001, not beyond 1
        engine: Any = learner.engine()
        assert bool(engine.gradients[0]["critic.head.bias"]) is True
        assert bool(engine.gradients[1]["critic.head.bias"]) is moves


def test_at_a_fork_a_shared_token_is_trained_on_the_mean_of_its_branches() -> None:
    # V = 0, so that an advantage is the reward, discounted by γ = 0.5 and λ = 1 per trained token still to come.
    tree = [Turn([1], [2, 3]), Turn([4], [5], parent=0), Turn([6], [7, 8], parent=0, state="dead")]
    gradient, metrics = learn([make_rollout(tree, 1.0)], selection=Selection(dead="train"), gamma=0.5)
    a, b = (0.5**2 + 0.5**3) / 2, (0.5 + 0.5**2) / 2
    paths = [
        ([1, 2, 3, 4, 5], [(1, a / 5), (2, b / 5), (4, 1.0 / 5)]),
        ([1, 2, 3, 6, 7, 8], [(4, 0.5 / 5), (5, 1.0 / 5)]),
    ]
    policy_part = {name: part for name, part in gradient.items() if not name.startswith("critic")}
    assert_same_gradient(by_hand(make_policy(), paths), policy_part)
    returns = [a, b, 1.0, 0.5, 1.0]
    assert metrics["loss/value"] == pytest.approx(sum(g * g for g in returns) / 5)
    assert metrics["value/return_mean"] == pytest.approx(sum(returns) / 5)


def test_normalised_advantages_forget_scale_and_level_of_rewards() -> None:
    def policy_gradient(good: float, bad: float) -> Gradient:
        rollouts = [make_rollout(GOOD, good), make_rollout(BAD, bad, group="h")]
        gradient, _ = learn(rollouts, normalize_advantages=True)
        return {name: part for name, part in gradient.items() if not name.startswith("critic")}

    assert_same_gradient(policy_gradient(1.0, 0.0), policy_gradient(0.9, 0.4))
    paths = [
        ([1, 2, 3, 4, 5, 6, 7, 8], [(place, 1 / 10) for place in (2, 3, 4, 6, 7)]),
        ([1, 2, 9, 6, 6, 10, 11, 12, 13], [(place, -1 / 10) for place in (2, 5, 6, 7, 8)]),
    ]
    assert_same_gradient(by_hand(make_policy(), paths), policy_gradient(0.7, 0.2))


@pytest.mark.parametrize("packing", ["flat", "forest"])
@pytest.mark.parametrize("steps", [1, 2])
def test_an_engine_that_agrees_with_the_trainer_gives_weight_one(packing: str, steps: int) -> None:
    policy = make_policy()
    prompt, reply = GOOD[0].delta, GOOD[0].reply
    exact = Turn(prompt, reply, logprobs=reply_logprobs(policy, prompt, reply))
    rollouts = [make_rollout([exact], reward, group=group) for group, reward in (("g", 1.0), ("h", 0.0))]
    _, metrics = learn(rollouts, policy=policy, packing=packing, updates_per_batch=steps)
    assert metrics["tis/mean_abs_w_minus_1"] < 1e-5
    assert metrics["logprob/max_abs_diff"] < 1e-5
    assert metrics["tis/clip_fraction"] == 0.0


@pytest.mark.parametrize("excluded", [{"reward": None}, {"reward": 1.0, "exclusion": "stale"}])
@pytest.mark.parametrize("settings", [{}, {"normalize_advantages": True}, {"gae_lambda": 0.5}], ids=str)
def test_excluded_rollouts_are_nowhere(excluded: dict[str, Any], settings: dict[str, Any]) -> None:
    noisy = [make_rollout([Turn([3], [14] * 9)], index=2, **excluded), *pair()]
    plain, before = learn(pair(), head=0.2, **settings)
    gradient, after = learn(noisy, head=0.2, **settings)
    assert_same_gradient(plain, gradient)
    assert after["value/explained_variance"] == pytest.approx(before["value/explained_variance"])
    learner, other = make_learner(), make_learner()
    learner.pretrain_value(pair())
    other.pretrain_value(noisy)
    torch.testing.assert_close(other.critic.head.weight, learner.critic.head.weight)


@pytest.mark.parametrize("nothing", [[], [make_rollout([], None)]], ids=["empty", "ungraded"])
def test_a_batch_with_nothing_graded_moves_nothing(nothing: list[Rollout]) -> None:
    learner = make_learner()
    before = copy.deepcopy(learner.state_dict())
    for metrics in (learner.pretrain_value(nothing), learner.update(nothing)):
        assert all(math.isfinite(value) for value in metrics.values())
        assert "value/mean" not in metrics
    torch.testing.assert_close(learner.state_dict(), before, rtol=0, atol=0)


@pytest.mark.parametrize("critic", ["head", "separate"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_pretraining_explains_returns_and_leaves_the_policy_alone(critic: Any, gamma: float) -> None:
    learner = make_learner(critic=critic, gamma=gamma)
    before = {name: parameter.clone() for name, parameter in learner.policy.module.named_parameters()}
    first = learner.pretrain_value(APART, ridge=1e-6)
    second = learner.pretrain_value(APART, ridge=1e-6)
    assert first["value/explained_variance"] == 0.0
    assert first["value/mean"] == 0.0
    assert second["value/explained_variance"] > 0.99
    discounts = [gamma**steps for steps in range(5)]
    assert second["value/return_mean"] == pytest.approx(sum(discounts) / 10)
    assert second["value/mean"] == pytest.approx(second["value/return_mean"], abs=1e-2)
    assert all(torch.equal(before[name], p) for name, p in learner.policy.module.named_parameters())
    assert learner.policy.version == 0
    assert all(p.grad is None for p in (*learner.policy.module.parameters(), *learner.critic.parameters()))


def test_what_the_critic_expects_moves_nothing_any_more() -> None:
    learner = make_learner()
    for _ in range(3):
        learner.pretrain_value(APART, ridge=1e-9)
    metrics = learner.update(APART)
    assert metrics["grad/norm"] < 1e-3
    _, fresh = learn(APART)
    assert fresh["grad/norm"] > 0.1


def test_equal_rewards_teach_a_critic() -> None:
    _, metrics = learn([make_rollout(GOOD, 0.5), make_rollout(BAD, 0.5, index=1)])
    assert metrics["grad/critic_norm"] > 0.0
    assert "value/explained_variance" not in metrics  # nothing varies


@pytest.mark.parametrize(
    "settings", [{}, {"critic": "separate"}, {"lora": 2}, {"lora": 2, "critic": "separate"}], ids=str
)
def test_a_learner_that_loads_a_state_goes_on_exactly(settings: dict[str, Any]) -> None:
    settings = {"learning_rate": 0.01, "value_learning_rate": 0.01, "updates_per_batch": 2, **settings}
    first = make_learner(**settings)
    first.pretrain_value(pair())
    first.update(pair())
    file = io.BytesIO()
    torch.save(dict(first.state_dict()), file)
    file.seek(0)
    second = make_learner(seed=1, head=0.3, **settings)
    second.load_state_dict(torch.load(file, weights_only=True))
    for learner in (first, second):
        learner.update(pair())
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_a_state_of_another_kind_of_learner_is_refused() -> None:
    policy = make_policy()
    engine: Any = CountingEngine(policy)
    grpo, ppo, separate = TreeGRPO(policy, engine=engine), make_learner(), make_learner(critic="separate")
    for learner, state in ((ppo, grpo.state_dict()), (ppo, separate.state_dict()), (separate, ppo.state_dict())):
        with pytest.raises(ValueError, match="critic of"):
            learner.load_state_dict(state)
    with pytest.raises(ValueError, match="parameter group"):
        grpo.load_state_dict(ppo.state_dict())


def test_a_critic_is_clipped_apart_from_the_policy() -> None:
    plain, metrics = learn(pair(), head=3.0)
    clipped, _ = learn(pair(), head=3.0, max_grad_norm=metrics["grad/norm"] * 1.01)
    assert metrics["grad/critic_norm"] > metrics["grad/norm"] * 1.1
    assert_same_gradient(*({n: p for n, p in g.items() if not n.startswith("critic")} for g in (plain, clipped)))
    norm = math.sqrt(sum(float(p.square().sum()) for n, p in clipped.items() if n.startswith("critic")))
    assert norm == pytest.approx(metrics["grad/norm"] * 1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"critic": "other"}, "critic out of"),
        ({"critic": "separate", "value_trunk_gradient": True}, "value_trunk_gradient"),
        ({"value_learning_rate": 0.0}, "value_learning_rate"),
        ({"value_coef": 0.0}, "value_coef"),
        ({"value_clip": 0.0}, "value_clip"),
        ({"gamma": 0.0}, "gamma"),
        ({"gamma": 1.1}, "gamma"),
        ({"gae_lambda": -0.1}, "gae_lambda"),
        ({"gae_lambda": 1.1}, "gae_lambda"),
        ({"deviation_floor": -0.1}, "deviation_floor"),
        ({"deviation_floor": 0.5}, "normalize_advantages"),
        ({"tis_cap": 0.5}, "tis_cap"),
    ],
)
def test_contradictory_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TreePPO(make_policy(), **settings)
