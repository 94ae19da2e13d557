"""Tree-PPO: proximal policy optimization on the prefix tree, with a critic.

The learner of `examples/train_ppo.py`. Advantages are per token, Â_t = G_t − V(s_t), so that no group is needed: one
rollout a task is enough. A token that several branches share counts once, here in the value loss as in the policy's.
Invariant: values are read where the policy's own forward pass predicts a token; a critic on the policy's trunk costs
no pass of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Unpack, cast

import numpy as np
import torch
from torch import Tensor

from clawgym_env.rollout import Rollout
from learners.advantages import DEVIATION_FLOOR, Floats, whitened
from learners.base import LearnerState
from learners.forward import logprobs_of, trained_hidden
from learners.gae import trained_trajectories, tree_gae
from learners.losses import clipped_value_loss
from learners.policy_gradient import (
    PolicyGradientLearner,
    PolicyGradientSettings,
    Survivor,
    parameters_of,
    require,
    shapes_of,
)
from learners.rows import MicroBatch, TrainingRow, num_trained
from learners.statistics import TokenStatistics, ValueStatistics
from learners.value_head import CRITICS, Critic, CriticKind, LeastSquares

if TYPE_CHECKING:
    from clawgym_env.policy import Policy


class TreePPO(PolicyGradientLearner):
    """PPO whose trajectories are the kept branches of a rollout; `pretrain_value` comes before the first update."""

    def __init__(
        self,
        policy: Policy,
        *,
        critic: CriticKind = "head",
        value_trunk_gradient: bool = False,
        value_learning_rate: float = 1e-5,
        value_coef: float = 0.5,
        value_clip: float = 0.2,
        gamma: float = 1.0,
        gae_lambda: float = 1.0,
        normalize_advantages: bool = False,
        deviation_floor: float = DEVIATION_FLOOR,
        **settings: Unpack[PolicyGradientSettings],
    ) -> None:
        """Take over a policy; its weights are trained in place.

        Args:
            policy: what is trained and sampled from.
            critic: "head" reads values from the policy's trunk; "separate" has a trunk of its own, a copy of the
                policy's as it is now, which is trained with it and costs as much again.
            value_trunk_gradient: whether the value loss of a head trains the policy's trunk, too. Off by
                default: what moves the policy is then PPO's objective alone.
            value_learning_rate: of the critic.
            value_coef: of the value loss beside the policy's.
            value_clip: how far a value may go from where it was at the update's start; `math.inf`: as far as it likes.
                It acts from the second of `updates_per_batch` on.
            gamma: γ, per sampled token.
            gae_lambda: λ. With γ = λ = 1, the default, Â = R − V(s_t).
            normalize_advantages: shift and scale them to mean 0 and deviation 1 over the batch, under the weights of
                the loss. Off by default, as in the paper; on, a critic that lags behind does not praise all there is.
            deviation_floor: of `normalize_advantages`: smaller deviations are divided by this one, in the unit of
                rewards, so that a critic's errors stay small where rewards are nearly equal; see `whitened`.
            settings: of every policy-gradient learner.

        Raises:
            ValueError: settings that contradict each other or the policy, by name.
        """
        require(critic in CRITICS, f"critic out of {CRITICS}", critic)
        require(
            critic == "head" or not value_trunk_gradient,
            "value_trunk_gradient=False with critic='separate', which has a trunk of its own",
            value_trunk_gradient,
        )
        require(0 < value_learning_rate < math.inf, "a finite value_learning_rate above 0", value_learning_rate)
        require(
            0 < value_coef < math.inf, "a finite value_coef above 0 (without a critic, use another learner)", value_coef
        )
        require(value_clip > 0, "value_clip above 0", value_clip)
        require(0 < gamma <= 1, "gamma above 0 and at most 1", gamma)
        require(0 <= gae_lambda <= 1, "gae_lambda between 0 and 1", gae_lambda)
        require(deviation_floor >= 0, "deviation_floor of at least 0", deviation_floor)
        require(
            normalize_advantages or deviation_floor == DEVIATION_FLOOR,
            "deviation_floor beside normalize_advantages=True only, whose part it is",
            deviation_floor,
        )
        self._critic_kind: CriticKind = critic
        self._value_trunk_gradient = value_trunk_gradient
        super().__init__(policy, **settings)
        self.value_clip = value_clip
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalize_advantages = normalize_advantages
        self.deviation_floor = deviation_floor
        parameters = self._masters.of(self.critic)
        self._optimizer.add_param_group({"params": parameters, "lr": value_learning_rate})
        self._clipped["grad/critic_norm"] = parameters
        self._loss_coefficients["value"] = value_coef

    def _make_critic(self) -> Critic:
        self.critic = Critic(self.policy.module, self._critic_kind, trunk_gradient=self._value_trunk_gradient)
        return self.critic

    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        """Return the rewards; V(s_t) comes off token by token."""
        return np.array([rollout.reward for rollout in rollouts], dtype=np.float64)

    def pretrain_value(self, rollouts: Sequence[Rollout], *, ridge: float = 0.1) -> dict[str, float]:
        """Fit the value head to the returns of a batch; policy, trunks and version stay as they are.

        V is linear in what a frozen trunk says, so that the best head is computed, not approached: one forward pass,
        no learning rate. Later batches refine what earlier ones taught.

        Args:
            rollouts: as for `update`; a few hundred are enough.
            ridge: how firmly the head is held where it was, see `LeastSquares.solve`.

        Returns:
            Metrics of the batch. `value/explained_variance` is taken before the fit, on rollouts that the head has not
            seen: once it no longer grows from batch to batch, go on to `update`.
        """
        survivors = self._survivors(rollouts)
        batches, sharing = self._packed(self._rows(survivors))
        # Plain discounted rewards: no value is in them.
        returns = self._advantages_on_trees(np.zeros(_num_tokens(survivors)), survivors, gae_lambda=1.0)
        statistics, fit = ValueStatistics(), LeastSquares(self.critic.head)
        with torch.no_grad(), self._training():
            for batch in batches:
                self.processes.run(partial(self._observe, batch, returns, statistics, fit))
            if batches:
                fit.solve(self.processes, ridge=ridge)
        return {**self._batch_metrics(rollouts, survivors), **sharing, **statistics.metrics(self.processes)}

    def _observe(self, batch: MicroBatch, returns: Floats, statistics: ValueStatistics, fit: LeastSquares) -> None:
        hidden = self.critic.hidden(batch, trained_hidden(self._module, batch))
        target = _at(batch, returns, self.critic.dtype)
        statistics.add(self.critic.head(hidden), target)
        fit.add(hidden, target, batch.weights)

    def _state(self) -> dict[str, object]:
        return {**super()._state(), "critic": self._masters.exact(self.critic)}

    def _load_state(self, state: LearnerState) -> None:
        saved, own = cast(Mapping[str, Tensor], state.get("critic", {})), parameters_of(self.critic)
        require(
            shapes_of(saved) == shapes_of(own),
            f"the state of a TreePPO with a critic of {len(own)} parameters like this one's",
            f"{len(saved)} parameters",
        )
        super()._load_state(state)
        self._restore(self.critic, saved)

    def _can_move(self, row: TrainingRow) -> bool:
        return True  # what a rollout is worth is learned from any

    def _look_before(self, batches: Sequence[MicroBatch], survivors: Sequence[Survivor]) -> Sequence[MicroBatch]:
        plain = self.gamma == self.gae_lambda == 1.0 and not self.normalize_advantages
        if plain and self.updates_per_batch == 1:  # G = R: the step's own forward pass says V_old, too
            return batches
        seen = [self.processes.run(partial(self._seen, batch)) for batch in batches]
        num_tokens = _num_tokens(survivors)
        values = self._flat(seen, [cast(Tensor, batch.old_values) for batch in seen], num_tokens)
        advantages = self._advantages_on_trees(values, survivors, gae_lambda=self.gae_lambda)
        returns = advantages + values
        if self.normalize_advantages:
            weights = self._flat(seen, [batch.weights for batch in seen], num_tokens)
            advantages = whitened(advantages, weights, floor=self.deviation_floor)
        dtype = self.critic.dtype
        return [
            replace(batch, advantages=_at(batch, advantages, dtype), returns=_at(batch, returns, dtype))
            for batch in seen
        ]

    def _seen(self, batch: MicroBatch) -> MicroBatch:
        hidden = trained_hidden(self._module, batch)
        logprobs, _ = logprobs_of(self._module, hidden, batch)
        return replace(batch, old_logprobs=logprobs, old_values=self.critic(batch, hidden))

    def _judge(
        self, batch: MicroBatch, hidden: Tensor, statistics: TokenStatistics
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values = self.critic(batch, hidden)
        advantages, old_values, returns = batch.advantages, batch.old_values, batch.returns
        if old_values is None or returns is None:
            old_values, returns = values.detach(), batch.advantages
            advantages = returns - old_values
        statistics.values.add(old_values, returns)
        loss = clipped_value_loss(values, old_values, returns, clip=self.value_clip)
        return advantages, {"value": (batch.weights * loss).sum()}

    def _advantages_on_trees(self, values: Floats, survivors: Sequence[Survivor], *, gae_lambda: float) -> Floats:
        """Return the advantage of each trained token of the batch, shape [U], from V(s_t), shape [U]."""
        advantages = np.empty_like(values)
        start = 0
        for rollout, rows in survivors:
            calls = np.concatenate([row.call_indices[row.loss_mask] for row in rows])
            own = slice(start, start + len(calls))
            advantages[own] = tree_gae(
                values[own],
                rollout.reward,
                calls,
                trained_trajectories(rollout.tree, calls),
                gamma=self.gamma,
                gae_lambda=gae_lambda,
            )
            start = own.stop
        return advantages

    def _flat(self, batches: Sequence[MicroBatch], parts: Sequence[Tensor], num_tokens: int) -> Floats:
        """Put what belongs to the tokens of each micro-batch, shape [M], in the order of the whole batch, shape [U]."""
        index = torch.cat([batch.index for batch in batches]).cpu()
        flat = torch.zeros(num_tokens, dtype=torch.float64)
        flat[index] = torch.cat(list(parts)).double().cpu()
        return self.processes.total(flat).numpy()

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.critic.train(self._gradient_checkpointing)
        try:
            with super()._training():
                yield
        finally:
            self.critic.train(False)


def _num_tokens(survivors: Sequence[Survivor]) -> int:
    return sum(num_trained(survivor.rows) for survivor in survivors)


def _at(batch: MicroBatch, flat: Floats, dtype: torch.dtype) -> Tensor:
    """Return what belongs to the tokens of one micro-batch, shape [M]."""
    return torch.as_tensor(flat, dtype=dtype)[batch.index.cpu()].to(batch.index.device)
