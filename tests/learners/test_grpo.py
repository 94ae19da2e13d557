from typing import Any

import torch
from learner_fakes import VOCAB, CountingEngine, Turn, make_policy, make_rollout

from clawgym_env.rollout import Rollout
from learners.base import Learner
from learners.grpo import TreeGRPO

PROMPTS = ([1, 2], [3, 4, 5])
GOOD = (7, 11)


def sample_group(policy: Any, arm: int, size: int, generator: torch.Generator) -> list[Rollout]:
    """One-call rollouts of one token; the reward is 1 for the token that suits the prompt."""
    with torch.no_grad():
        logits = policy.module(input_ids=torch.tensor([PROMPTS[arm]])).logits[0, -1]
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = torch.multinomial(logprobs.exp(), size, replacement=True, generator=generator).tolist()
    return [
        make_rollout(
            [Turn(PROMPTS[arm], [token], logprobs=[float(logprobs[token])])],
            float(token == GOOD[arm]),
            group=f"arm{arm}",
            index=index,
        )
        for index, token in enumerate(tokens)
    ]


def test_a_contextual_bandit_is_learned() -> None:
    policy = make_policy(initializer_range=0.05)
    engine: Any = CountingEngine(policy)
    learner = TreeGRPO(policy, engine=engine, learning_rate=0.01)
    generator = torch.Generator().manual_seed(0)
    rewards = []
    for _ in range(40):
        batch = [rollout for arm in range(2) for rollout in sample_group(policy, arm, 64, generator)]
        metrics = learner.update(batch)
        rewards.append(metrics["reward/mean"])
        assert metrics.get("logprob/max_abs_diff", 0.0) < 1e-4
    assert rewards[0] < 3 / VOCAB
    assert rewards[-1] > 0.9
    assert policy.version <= 40


def test_it_is_a_learner() -> None:
    policy = make_policy()
    engine: Any = CountingEngine(policy)
    learner = TreeGRPO(policy, engine=engine)
    assert isinstance(learner, Learner)
    assert learner.engine() is learner.engine() is engine
