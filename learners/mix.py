"""What a batch of several harnesses came to, harness by harness.

Mix-harness training needs no learner of its own: `GroupSampler` draws pairs of task and harness, and advantages are
relative to the rollouts of one pair (`advantages.group_key`), so that an easier harness neither lifts nor sinks the
others. These numbers, part of every policy-gradient learner's metrics, show whether one of them falls behind.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from statistics import fmean

from clawgym_env.rollout import Rollout


def harness_metrics(rollouts: Sequence[Rollout], counting: Collection[Rollout]) -> dict[str, float]:
    """Return `harness/NAME/…` for each harness of a batch.

    Args:
        counting: those of the rollouts that are in statistics and loss.

    Returns:
        `reward`, the mean over graded rollouts, left out where there is none; per rollout the means of `turns` (calls
        of the main agent), `leaves` (ends of its lineage, abandoned ones included) and `tokens` (sampled);
        `dead_fraction`, the share of sampled tokens in replies that the harness did not go on from;
        `excluded_fraction`, the share of rollouts that do not count; and the number of `rollouts`.
    """
    metrics: dict[str, float] = {}
    for name in sorted({rollout.harness for rollout in rollouts}):
        own = [rollout for rollout in rollouts if rollout.harness == name]
        trees = [rollout.tree for rollout in own]
        main = [[call for call in tree if call.kind == "main"] for tree in trees]
        dead = [call for calls in main for call in calls if call.state in ("dead", "retry")]
        tokens = [tree.num_completion_tokens for tree in trees]
        rewards = [rollout.reward for rollout in own if rollout.graded]
        found: dict[str, float] = {
            "rollouts": len(own),
            "turns": fmean(len(calls) for calls in main),
            "leaves": fmean(tree.num_leaves for tree in trees),
            "tokens": fmean(tokens),
            "dead_fraction": sum(len(call.token_ids) for call in dead) / max(sum(tokens), 1),
            "excluded_fraction": sum(rollout not in counting for rollout in own) / len(own),
        }
        if rewards:
            found["reward"] = fmean(rewards)
        metrics |= {f"harness/{name}/{key}": float(value) for key, value in found.items()}
    return metrics
