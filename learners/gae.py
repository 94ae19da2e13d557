"""Generalized advantage estimation on the prefix tree of a rollout.

Between a critic's values and the advantages of `ppo`; pure numpy. Only sampled, trained tokens are steps: what the
environment wrote between them is not acted on. Invariant: trajectories are independent (ClawGym II section 3.2.3), no
signal crosses from one branch into another, and a token has one advantage however many trajectories it is on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clawgym_env.trace.prefix_tree import PrefixTree
from learners.advantages import Floats

Ints: TypeAlias = npt.NDArray[np.int32]


def gae(values: Floats, reward: float, *, gamma: float, gae_lambda: float) -> Floats:
    """Return the advantages of one trajectory's T steps, of which the last earns the reward.

    δ_t = r_t + γ V(s_{t+1}) − V(s_t) and Â_t = Σ_k (γλ)^k δ_{t+k}, with r_t = 0 before the last step and V = 0 after
    it: ClawGym II equation 3, from Schulman et al. 2016. With γ = λ = 1 this is R − V(s_t).

    Args:
        values: V(s_t), shape [T].
        reward: R.

    Returns:
        Shape [T].
    """
    following = np.append(values[1:], 0.0)
    deltas = gamma * following - values
    deltas[-1] += reward
    advantages = np.empty_like(deltas)
    ahead = 0.0
    for step in range(len(deltas) - 1, -1, -1):
        ahead = advantages[step] = deltas[step] + gamma * gae_lambda * ahead
    return advantages


def tree_gae(
    values: Floats,
    reward: float,
    calls: Ints,
    trajectories: Sequence[Sequence[int]],
    *,
    gamma: float,
    gae_lambda: float,
) -> Floats:
    """Return the advantages of a rollout's trained tokens.

    Each trajectory gets the reward of the rollout at its own last trained token and is estimated alone. A token that
    several trajectories share takes the mean of its estimates; V(s_t) is the same in all of them, so that the return
    Â + V is a mean as well. With γ = λ = 1 they are equal, and the mean changes nothing.

    Args:
        values: V(s_t) of the trained tokens, shape [U], those of one call in order.
        calls: the call that sampled each, shape [U].
        trajectories: the calls of each, as `trained_trajectories` returns them.

    Returns:
        Shape [U].
    """
    places = {call: np.flatnonzero(calls == call) for call in np.unique(calls).tolist()}
    total = np.zeros_like(values)
    count = np.zeros_like(values)
    for trajectory in trajectories:
        path = np.concatenate([places[call] for call in trajectory])
        total[path] += gae(values[path], reward, gamma=gamma, gae_lambda=gae_lambda)
        count[path] += 1.0
    return total / count


def trained_trajectories(tree: PrefixTree, calls: Ints) -> list[tuple[int, ...]]:
    """Return the kept trajectories of a rollout as their trained calls, root first.

    A trajectory follows lineage (what the harness went on from), also where its tokens were rendered anew. One that
    adds no trained call to another, as a sub-agent's that is only context, is not counted again.

    Args:
        calls: the trained ones, any number of times each.
    """
    trained = set(calls.tolist())
    paths = [tuple(call for call in tree.lineage(index) if call in trained) for index in sorted(trained)]
    gone_on = {call for path in paths for call in path[:-1]}
    return [path for path in paths if path[-1] not in gone_on]
