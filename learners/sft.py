"""Supervised cold start from finished rollouts: imitate what was said in them.

Takes the rollouts of a teacher (`demonstrations`), of a recorded run or the best of a store, and trains a policy in
place with the loop of `cold_start`. Invariant: the tokens are those that were sampled, in exactly the context they were
sampled in, chosen by the same `Selection` as in reinforcement learning; no other token carries loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from clawgym_env.policy import Policy
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection
from clawgym_env.trace.store import RolloutStore
from learners.cold_start import Batch, Example, batches, train
from learners.rows import exclusion_under, refuse_relayed


def finetune(
    policy: Policy,
    rollouts: Iterable[Rollout] | RolloutStore | str | Path,
    *,
    min_reward: float = 0.0,
    selection: Selection = Selection(),
    num_epochs: int = 1,
    batch_size: int = 8,
    learning_rate: float = 1e-3,
    seed: int = 0,
    on_step: Callable[[int, float], None] | None = None,
) -> float:
    """Train a policy in place to say what graded rollouts say; return the last loss in nats a token.

    Args:
        policy: with the tokenizer that the rollouts were made with.
        rollouts: themselves, or the store or run directory that holds them.
        min_reward: of the rollouts that are imitated.
        selection: which calls of them are.
        batch_size: token paths per step.
        learning_rate: of AdamW, after a warm-up of a tenth of the steps; it falls linearly to a tenth.
        seed: of the order.
        on_step: called with (step, loss).

    Raises:
        ValueError: nothing to learn from, or rollouts of another tokenizer or of an API model.
    """
    examples = examples_of(rollouts, min_reward=min_reward, selection=selection)
    if not examples:
        raise ValueError(f"Expected graded rollouts of reward {min_reward} or more, got none. Lower min_reward.")
    largest = max(int(example.token_ids.max()) for example in examples)
    if largest >= policy.tokenizer.vocab_size:
        raise ValueError(
            f"Expected token ids of {policy.name!r}, below {policy.tokenizer.vocab_size}, got {largest}. "
            "Train on rollouts that were made with its own tokenizer."
        )
    rng = np.random.default_rng(seed)
    num_steps = num_epochs * -(-len(examples) // batch_size)
    loss = float("nan")

    def apply() -> None:
        nonlocal loss
        loss = train(
            policy.module,
            _epochs(examples, batch_size, rng),
            num_steps=num_steps,
            learning_rate=learning_rate,
            warmup_steps=max(1, num_steps // 10),
            on_step=on_step,
        )

    engine = None if policy.sampler is None else policy.sampler()
    if engine is None:
        apply()
    else:  # what it has cached is of the old weights
        engine.update_weights(apply)
    return loss


def examples_of(
    rollouts: Iterable[Rollout] | RolloutStore | str | Path,
    *,
    min_reward: float = 0.0,
    selection: Selection = Selection(),
) -> list[Example]:
    """Return the token paths of graded rollouts of `min_reward` or more; over-branched and stale ones are left out.

    Raises:
        ValueError: a rollout was relayed to an API model, whose tokens are not known.
    """
    if isinstance(rollouts, str | Path):
        with RolloutStore(rollouts, read_only=True) as store:
            return examples_of(store, min_reward=min_reward, selection=selection)
    found = rollouts.rollouts() if isinstance(rollouts, RolloutStore) else rollouts
    examples = []
    for rollout in found:
        refuse_relayed(rollout)
        if exclusion_under(rollout, selection) is None and rollout.reward >= min_reward:
            rows = rollout.tree.rows(selection)
            examples += [Example(row.token_ids, row.loss_mask) for row in rows if row.loss_mask.any()]
    return examples


def _epochs(examples: list[Example], batch_size: int, rng: np.random.Generator) -> Iterator[Batch]:
    return itertools.chain.from_iterable(batches(examples, batch_size, rng) for _ in itertools.count())
