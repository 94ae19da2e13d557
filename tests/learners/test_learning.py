"""Each learner solves a contextual bandit in seconds: which token suits which prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from learner_fakes import VOCAB, CountingEngine, Turn, make_policy, make_rollout

from clawgym_env.rollout import Rollout
from learners.grpo import TreeGRPO
from learners.policy_gradient import PolicyGradientLearner
from learners.ppo import TreePPO
from learners.reinforce import TreeReinforce
from learners.rloo import TreeRLOO

PROMPTS = ([1, 2], [3, 4, 5])
GOOD = (7, 11)


def draw(policy: Any, prompt: Sequence[int], size: int, generator: torch.Generator) -> list[Turn]:
    with torch.no_grad():
        logits = policy.module(input_ids=torch.tensor([prompt])).logits[0, -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.multinomial(logprobs.exp(), size, replacement=True, generator=generator).tolist()
    return [Turn(prompt, [token], logprobs=[float(logprobs[token])]) for token in tokens]


def batch_of(policy: Any, generator: torch.Generator, *, group_size: int) -> list[Rollout]:
    """64 rollouts of each arm, in groups. Each has a second call that the harness did not go on from."""
    rollouts = []
    for arm, prompt in enumerate(PROMPTS):
        for index, turn in enumerate(draw(policy, prompt, 64, generator)):
            dead = Turn([6], [9], parent=0, state="dead")
            reward = float(turn.reply[0] == GOOD[arm])
            group = f"arm{arm}/{index // group_size}"
            rollouts.append(make_rollout([turn, dead], reward, group=group, index=index % group_size))
    return rollouts


@pytest.mark.parametrize(
    ("learner_type", "group_size", "settings"),
    [
        (TreeGRPO, 64, {}),
        (TreeRLOO, 64, {}),
        (TreeReinforce, 1, {}),
        (TreePPO, 1, {"value_learning_rate": 0.02}),
        # Without a floor under the deviation, what was learned by update 20 was lost by update 40.
        (TreePPO, 1, {"value_learning_rate": 0.02, "updates_per_batch": 2, "normalize_advantages": True}),
        (TreePPO, 1, {"value_learning_rate": 0.005, "critic": "separate"}),
    ],
    ids=["grpo", "rloo", "reinforce", "ppo", "ppo-two-steps", "ppo-separate"],
)
def test_a_contextual_bandit_is_learned(
    learner_type: type[PolicyGradientLearner], group_size: int, settings: dict[str, Any]
) -> None:
    policy = make_policy(initializer_range=0.05)
    engine: Any = CountingEngine(policy)
    learner = learner_type(policy, engine=engine, learning_rate=0.01, **settings)
    generator = torch.Generator().manual_seed(0)
    if isinstance(learner, TreePPO):
        learner.pretrain_value(batch_of(policy, generator, group_size=group_size))
    rewards = []
    for _ in range(40):
        metrics = learner.update(batch_of(policy, generator, group_size=group_size))
        rewards.append(metrics["reward/mean"])
        assert metrics.get("logprob/max_abs_diff", 0.0) < 1e-4
    assert rewards[0] < 3 / VOCAB
    assert rewards[-1] > 0.9
