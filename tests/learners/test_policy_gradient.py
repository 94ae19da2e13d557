from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout, reply_logprobs
from peft import LoraConfig

from clawgym_env.engine.base import SamplingParams
from clawgym_env.policy import Policy
from clawgym_env.rollout import Exclusion, Rollout
from clawgym_env.trace.prefix_tree import Selection
from learners import forward
from learners.advantages import Floats
from learners.grpo import TreeGRPO
from learners.policy_gradient import PolicyGradientLearner, PolicyGradientSettings

Gradient = dict[str, torch.Tensor]


def learn(
    rollouts: Sequence[Rollout], policy: Policy | None = None, **settings: Any
) -> tuple[Gradient, dict[str, float]]:
    """One update from the same start; returns the gradient of its first step and the metrics."""
    policy = policy or make_policy()
    engine: Any = CountingEngine(policy)
    learner = TreeGRPO(policy, engine=engine, max_grad_norm=math.inf, **settings)
    metrics = learner.update(rollouts)
    return (engine.gradients[0] if engine.gradients else {}), metrics


def assert_same_gradient(first: Gradient, second: Gradient) -> None:
    assert first.keys() == second.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in first.values())
    for name, gradient in first.items():
        torch.testing.assert_close(second[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


GOOD = [Turn([1, 2], [3, 4, 5]), Turn([6], [7, 8], parent=0)]
BAD = [Turn([1, 2], [9]), Turn([6, 6], [10, 11, 12, 13], parent=0)]


def pair(good: Sequence[Turn] = GOOD, bad: Sequence[Turn] = BAD) -> list[Rollout]:
    return [make_rollout(good, 1.0), make_rollout(bad, 0.0, index=1)]


def test_gradient_equals_two_tokens_computed_by_hand() -> None:
    # Two rollouts of one token each, rewards 1 and 0: the loss is -(1/2) (log π(3|1) - log π(4|1)) up to ε.
    policy = make_policy()
    logits = policy.module(input_ids=torch.tensor([[1]])).logits[0, -1]
    logprobs = torch.log_softmax(logits / 0.5, dim=-1)
    # The second token was sampled by something that gave it a third of its probability here: w = 2, not 3.
    expected_loss = -(1 * 1.0 * logprobs[3] + 2 * -1.0 * logprobs[4]) / 2
    expected_loss.backward()
    expected = {name: p.grad.clone() for name, p in policy.module.named_parameters() if p.grad is not None}
    policy.module.zero_grad()
    cool = SamplingParams(temperature=0.5)
    exact, rarer = logprobs[3].item(), logprobs[4].item() - math.log(3)
    rollouts = [
        make_rollout([Turn([1], [3], logprobs=[exact], sampling=cool)], 1.0),
        make_rollout([Turn([1], [4], logprobs=[rarer], sampling=cool)], 0.0, index=1),
    ]
    gradient, metrics = learn(rollouts, policy)
    assert_same_gradient(expected, gradient)
    assert metrics["tis/clip_fraction"] == 0.5
    assert metrics["tis/mean_abs_w_minus_1"] == pytest.approx(0.5, abs=1e-4)
    assert metrics["logprob/max_abs_diff"] == pytest.approx(math.log(3), abs=1e-4)


def test_adding_an_auxiliary_call_leaves_the_gradient_unchanged() -> None:
    plain, before = learn(pair())
    noisy, after = learn(pair(good=[*GOOD, Turn([1], [14, 15, 14], kind="auxiliary")]))
    assert_same_gradient(plain, noisy)
    assert after["tokens/trained"] == before["tokens/trained"] == 10
    assert after["tokens/sampled"] == before["tokens/sampled"] + 3


def test_a_branch_the_harness_did_not_go_on_from_leaves_the_gradient_unchanged() -> None:
    plain, _ = learn(pair())
    retried, _ = learn(pair(good=[*GOOD, Turn([6], [7, 8], parent=0, state="retry")]))
    assert_same_gradient(plain, retried)


def test_a_shared_node_counts_once_however_many_branches_go_on_from_it() -> None:
    everything = Selection(dead="train")
    branch = Turn([6], [7, 8], parent=0, state="dead")
    gradient, metrics = learn(pair(good=[*GOOD, branch]), selection=everything)
    assert metrics["tokens/trained"] == 3 + 2 + 2 + 5
    # The same by hand: 7 distinct tokens, the shared three of them once.
    policy = make_policy()
    good = torch.log_softmax(policy.module(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])).logits[0], dim=-1)
    bad = torch.log_softmax(policy.module(input_ids=torch.tensor([[1, 2, 9, 6, 6, 10, 11, 12, 13]])).logits[0], dim=-1)
    # Logged as sampled with certainty, so that w = π_old, held fixed.
    good_loss = sum(good[i, t] * good[i, t].exp().item() for i, t in ((1, 3), (2, 4), (3, 5), *2 * ((5, 7), (6, 8))))
    bad_loss = sum(bad[i, t] * bad[i, t].exp().item() for i, t in ((1, 9), (4, 10), (5, 11), (6, 12), (7, 13)))
    (-(good_loss / 7 - bad_loss / 5) / 2).backward()
    expected = {name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}
    assert_same_gradient(expected, gradient)


@pytest.mark.parametrize("excluded", [{"reward": None}, {"reward": 1.0, "exclusion": "stale"}])
def test_excluded_rollouts_are_in_neither_statistics_nor_loss(excluded: dict[str, Any]) -> None:
    plain, before = learn(pair())
    rollouts = [*pair(), make_rollout([Turn([3], [14] * 9)], index=2, **excluded)]
    gradient, after = learn(rollouts)
    assert_same_gradient(plain, gradient)
    assert (before["rollouts/excluded"], after["rollouts/excluded"]) == (0.0, 1.0)


@pytest.mark.parametrize("marked", [None, "over_branched"])
def test_what_branches_too_much_is_for_the_learners_own_selection_to_say(marked: Exclusion | None) -> None:
    turns = [GOOD[0], *(Turn([6], [7], parent=0, state="dead") for _ in range(17))]
    rollouts = [*pair(), make_rollout(turns, 1.0, index=2, exclusion=marked)]
    plain, _ = learn(pair())
    gradient, metrics = learn(rollouts)
    assert_same_gradient(plain, gradient)
    assert metrics["rollouts/excluded"] == metrics["rollouts/excluded_over_branched"] == 1.0
    gradient, metrics = learn(rollouts, selection=Selection(max_leaves=17))
    assert metrics["rollouts/excluded"] == 0.0
    assert metrics["tokens/trained"] == 10 + 3
    _, metrics = learn([*pair(), make_rollout(BAD, 1.0, index=2, exclusion=marked)])
    assert metrics["rollouts/excluded"] == 0.0


@pytest.mark.parametrize("loss_weight", ["rollout", "token", "group"])
@pytest.mark.parametrize("rollouts", [[], [make_rollout([], None)]], ids=["empty", "ungraded"])
def test_a_batch_with_nothing_graded_moves_nothing_and_reports_no_reward(rollouts: Any, loss_weight: Any) -> None:
    gradient, metrics = learn(rollouts, loss_weight=loss_weight)
    assert not gradient
    assert not metrics.keys() & {"reward/mean", "reward/std"}
    assert not any(math.isnan(value) for value in metrics.values())


def test_each_exclusion_is_counted_under_its_name() -> None:
    rollouts = [*pair(), make_rollout([], None, index=2), make_rollout(GOOD, 1.0, index=3, exclusion="stale")]
    _, metrics = learn(rollouts)
    assert metrics["rollouts/excluded_ungraded"] == metrics["rollouts/excluded_stale"] == 1.0
    assert metrics["reward/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("loss_weight", ["rollout", "token", "group"])
def test_micro_batch_size_does_not_change_the_gradient(loss_weight: Any) -> None:
    rollouts = [*pair(), make_rollout(BAD, 0.3, group="h"), make_rollout(GOOD[:1], 0.9, group="h", index=1)]
    whole, whole_metrics = learn(rollouts, loss_weight=loss_weight, micro_batch_tokens=1000)
    cut, cut_metrics = learn(rollouts, loss_weight=loss_weight, micro_batch_tokens=1)
    assert_same_gradient(whole, cut)
    timeless = {name for name in whole_metrics if not name.startswith(("time/", "forest/"))}
    assert {name: cut_metrics[name] for name in timeless} == pytest.approx(
        {name: whole_metrics[name] for name in timeless}, rel=1e-4, abs=1e-6
    )


def test_small_chunks_of_logits_do_not_change_the_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, _ = learn(pair())
    monkeypatch.setattr(forward, "LOGITS", 32)
    chunked, _ = learn(pair())
    assert_same_gradient(whole, chunked)


def test_gradient_checkpointing_does_not_change_the_gradient() -> None:
    plain, _ = learn(pair())
    checkpointed, _ = learn(pair(), gradient_checkpointing=True)
    assert_same_gradient(plain, checkpointed)


def test_an_engine_that_agrees_with_the_trainer_gives_weight_one() -> None:
    policy = make_policy()
    warm = SamplingParams(temperature=1.3)

    def sampled(turn: Turn, prompt: Sequence[int]) -> Turn:
        return dataclasses.replace(turn, logprobs=reply_logprobs(policy, prompt, turn.reply, 1.3), sampling=warm)

    rollouts = [
        make_rollout([sampled(GOOD[0], [1, 2]), sampled(GOOD[1], [1, 2, 3, 4, 5, 6])], 1.0),
        make_rollout([sampled(BAD[0], [1, 2]), sampled(BAD[1], [1, 2, 9, 6, 6])], 0.0, index=1),
    ]
    _, metrics = learn(rollouts, policy)
    assert metrics["tis/mean_abs_w_minus_1"] < 1e-5
    assert metrics["logprob/max_abs_diff"] < 1e-5
    assert metrics["kl/rollout_old_k3"] < 1e-8
    assert metrics["tis/clip_fraction"] == 0.0


def test_without_any_advantage_the_weights_stay_and_no_version_is_spent() -> None:
    policy = make_policy()
    before = [parameter.clone() for parameter in policy.module.parameters()]
    _, metrics = learn([make_rollout(GOOD, 0.5), make_rollout(BAD, 0.5, index=1)], policy, weight_decay=0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, policy.module.parameters(), strict=True))
    assert (metrics["policy/version"], metrics["groups/zero_variance"], metrics["grad/norm"]) == (0.0, 1.0, 0.0)


def test_rollouts_without_advantage_are_skipped_but_still_count_in_the_mean() -> None:
    alone, _ = learn(pair())
    flat = [make_rollout(BAD, 0.5, group="h", index=index) for index in range(2)]
    diluted, _ = learn([*pair(), *flat])
    assert_same_gradient({name: gradient / 2 for name, gradient in alone.items()}, diluted)


def test_an_empty_batch_is_reported_not_fatal() -> None:
    _, metrics = learn([make_rollout([], None)])
    assert metrics["rollouts/excluded"] == 1.0
    assert metrics["tokens/trained"] == 0.0


def test_gradient_norm_is_reported_before_it_is_clipped() -> None:
    gradient, metrics = learn(pair())
    norm = math.sqrt(sum(float(part.square().sum()) for part in gradient.values()))
    assert metrics["grad/norm"] == pytest.approx(norm, rel=1e-4)


def test_several_steps_on_a_batch_keep_the_old_policy_of_its_start() -> None:
    policy = make_policy()
    _, once = learn(pair())
    _, thrice = learn(pair(), policy, updates_per_batch=3, learning_rate=0.05)
    assert policy.version == 3
    assert thrice["tis/mean_abs_w_minus_1"] == pytest.approx(once["tis/mean_abs_w_minus_1"], rel=1e-5)
    assert once["ratio/clip_fraction"] == 0.0
    assert thrice["ratio/clip_fraction"] > 0.0


def test_kl_penalty_is_zero_at_the_start_and_pulls_back_later() -> None:
    policy = make_policy()
    learner = TreeGRPO(policy, engine=_engine(policy), kl_coef=1.0, learning_rate=0.05)
    first = learner.update(pair())
    second = learner.update(pair())
    assert first["loss/kl"] == pytest.approx(0.0, abs=1e-6)
    assert second["loss/kl"] > 1e-3


def test_kl_penalty_trains_rollouts_without_advantage_too() -> None:
    policy = make_policy()
    learner = TreeGRPO(policy, engine=_engine(policy), kl_coef=1.0, learning_rate=0.05)
    learner.update(pair())
    metrics = learner.update([make_rollout(GOOD, 0.5), make_rollout(BAD, 0.5, index=1)])
    assert metrics["grad/norm"] > 0.0


@pytest.mark.parametrize("logits", [forward.LOGITS, 32], ids=["whole", "chunks"])
def test_entropy_bonus_has_the_gradient_of_the_entropy(logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Rollouts without advantage: nothing but the bonus moves, at the temperature a token was sampled with.
    monkeypatch.setattr(forward, "LOGITS", logits)
    cool = SamplingParams(temperature=0.5)
    same = [make_rollout([Turn([1, 2], [3, 4], sampling=cool)], 0.5, index=index) for index in range(2)]
    gradient, metrics = learn(same, entropy_coef=0.3)
    policy = make_policy()
    logprobs = torch.log_softmax(policy.module(input_ids=torch.tensor([[1, 2, 3]])).logits[0, 1:] / 0.5, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1).mean()
    (-0.3 * entropy).backward()
    assert_same_gradient({name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}, gradient)
    assert [metrics["loss/entropy"], metrics["entropy"]] == pytest.approx([entropy.item()] * 2, rel=1e-5)


@pytest.mark.parametrize(("tis_mode", "share"), [("mask", 0.25), ("truncate", 0.0)])
def test_a_token_that_is_rarer_here_is_left_out_by_the_mask_alone(tis_mode: str, share: float) -> None:
    policy = make_policy()
    exact = [
        dataclasses.replace(turn, logprobs=reply_logprobs(policy, [1, 2], turn.reply)) for turn in (GOOD[0], BAD[0])
    ]
    rarer = dataclasses.replace(exact[0], logprobs=[exact[0].logprobs[0] + 1.0, *exact[0].logprobs[1:]])
    _, metrics = learn(pair([rarer], [exact[1]]), policy, tis_mode=tis_mode)
    assert metrics["tis/clip_fraction"] == share


def test_masked_tokens_leave_the_loss_but_not_its_normaliser() -> None:
    policy = make_policy()
    exact = [
        dataclasses.replace(turn, logprobs=reply_logprobs(policy, [1, 2], turn.reply)) for turn in (GOOD[0], BAD[0])
    ]
    far = dataclasses.replace(exact[0], logprobs=[exact[0].logprobs[0] - 3.0, *exact[0].logprobs[1:]])
    gradient, metrics = learn(pair([far], [exact[1]]), policy, tis_mode="mask")
    assert metrics["tis/clip_fraction"] == 0.25
    policy = make_policy()
    good = torch.log_softmax(policy.module(input_ids=torch.tensor([[1, 2, 3, 4]])).logits[0], dim=-1)
    bad = torch.log_softmax(policy.module(input_ids=torch.tensor([[1, 2]])).logits[0], dim=-1)
    (-((good[2, 4] + good[3, 5]) / 3 - bad[1, 9]) / 2).backward()
    assert_same_gradient({name: p.grad for name, p in policy.module.named_parameters() if p.grad is not None}, gradient)


def test_the_settings_for_subclasses_are_those_of_the_base() -> None:
    signature = inspect.signature(PolicyGradientLearner.__init__).parameters
    assert set(PolicyGradientSettings.__annotations__) == set(signature) - {"self", "policy"}


@pytest.mark.parametrize("lora", [2, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])])
def test_adapters_learn_while_the_weights_under_them_stay(lora: LoraConfig | int) -> None:
    policy = make_policy()
    before = {name: parameter.clone() for name, parameter in policy.module.named_parameters()}
    learner = TreeGRPO(policy, engine=_engine(policy), lora=lora, learning_rate=0.1)
    first = learner.update(pair())
    second = learner.update(pair())
    assert second["loss/policy"] != pytest.approx(first["loss/policy"])
    after = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter
        for name, parameter in policy.module.named_parameters()
        if "lora_" not in name
    }
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    policy = make_policy()
    broken = [make_rollout([Turn([1], [2], logprobs=[float("nan")])], 1.0), make_rollout(BAD, 0.0, index=1)]
    with pytest.raises(FloatingPointError, match=r"grad/norm.*nan"):
        learn(broken, policy)
    assert policy.version == 0
    assert all(torch.isfinite(parameter).all() for parameter in policy.module.parameters())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"tis_cap": 0.5}, "tis_cap"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"tis_mode": "drop"}, "tis_mode"),
        ({"tis_mode": "mask", "tis_cap": 1.0}, "tis_cap above 1"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"loss_weight": "sum"}, "loss_weight"),
        ({"kl_coef": math.inf}, "kl_coef"),
        ({"updates_per_batch": 0}, "updates_per_batch"),
        ({"updates_per_batch": 1.5}, "updates_per_batch"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens"),
        ({"selection": Selection(main="context")}, "selection"),
        ({"lora": LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])}, "lora_dropout"),
    ],
)
def test_contradictory_settings_are_refused_by_name(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        TreeGRPO(make_policy(), **settings)


def test_a_policy_with_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match="without dropout"):
        TreeGRPO(make_policy(attention_dropout=0.1))


@pytest.mark.parametrize(("setting", "value"), [("final_logit_softcapping", 30.0), ("logits_scaling", 8.0)])
def test_a_policy_that_changes_its_logits_is_refused(setting: str, value: float) -> None:
    with pytest.raises(ValueError, match=setting):
        TreeGRPO(make_policy(**{setting: value}))


def test_another_learner_is_one_method() -> None:
    class Reinforce(PolicyGradientLearner):
        def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
            return np.array([rollout.reward for rollout in rollouts])

    policy = make_policy()
    assert Reinforce(policy, engine=_engine(policy)).update(pair())["grad/norm"] > 0.0


def _engine(policy: Policy) -> Any:
    return CountingEngine(policy)
