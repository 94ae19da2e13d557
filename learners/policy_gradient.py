"""The update every policy-gradient learner shares: rollouts to rows, rows to one clipped, importance-weighted step.

A subclass says what a rollout's advantage is (`grpo` in a dozen lines); the base gives it to every trained token, each
once. Invariants: which rollouts count, and the normalisers of the loss, are fixed before micro-batching; excluded
rollouts are in neither statistics nor loss; weights change only inside `Engine.update_weights`.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from clawgym_env.engine.base import Engine
from clawgym_env.rollout import Exclusion, Rollout
from clawgym_env.trace.prefix_tree import Selection
from learners.advantages import Floats, group_key, group_metrics
from learners.base import LearnerState
from learners.forest import Packing, packed, supported
from learners.forward import token_logprobs
from learners.interrupts import deferred_interrupt
from learners.losses import (
    LOSS_WEIGHTS,
    LossWeight,
    clipped_policy_loss,
    k3,
    token_weights,
    truncated_importance_weights,
)
from learners.rows import MicroBatch, num_trained, trained_rows, training_rows
from learners.statistics import TokenStatistics

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

    from clawgym_env.policy import Policy


class PolicyGradientLearner(ABC):
    """Trains a policy on advantages of whole rollouts. Subclasses implement `advantages`."""

    def __init__(
        self,
        policy: Policy,
        *,
        learning_rate: float = 1e-6,
        betas: tuple[float, float] = (0.9, 0.98),
        weight_decay: float = 0.0,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        tis_cap: float = 2.0,
        kl_coef: float = 0.0,
        loss_weight: LossWeight = "rollout",
        updates_per_batch: int = 1,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 8192,
        packing: Packing = "auto",
        gradient_checkpointing: bool = False,
        selection: Selection = Selection(),
        lora: LoraConfig | int | None = None,
        engine: Engine | None = None,
    ) -> None:
        """Take over a policy; its weights are trained in place.

        Args:
            policy: what is trained and sampled from.
            learning_rate: of AdamW; constant unless a schedule calls `scale_learning_rate`.
            tis_cap: c̄, the largest weight a token gets for being likelier now than when it was sampled.
            kl_coef: β of the k3 penalty towards the policy as it is now; above 0 a frozen copy is kept.
            loss_weight: what the loss is a mean of; see `losses.token_weights`.
            updates_per_batch: optimizer steps on each batch, each over all of it.
            max_grad_norm: the gradient is scaled down to it; `math.inf` only measures.
            micro_batch_tokens: positions of one forward pass, padding included. Bounds memory, changes nothing else.
            packing: "forest" computes what rows share once, "flat" does not; "auto" does where the model allows it and
                enough is shared to pay. Changes time and memory, nothing else.
            gradient_checkpointing: compute activations twice instead of keeping them.
            selection: which calls are trained.
            lora: put adapters of this shape into the policy and train them instead of its weights; a number is the
                rank of adapters on every linear layer.
            engine: what samples from `policy`; None makes the embedded one when first asked for.

        Raises:
            ValueError: settings that contradict each other or the policy, by name.
        """
        _require(learning_rate > 0, "learning_rate above 0", learning_rate)
        _require(0 < clip_low < 1, "clip_low between 0 and 1", clip_low)
        _require(clip_high > 0, "clip_high above 0", clip_high)
        _require(tis_cap >= 1, "tis_cap of at least 1 (less would scale down even exact tokens)", tis_cap)
        _require(kl_coef >= 0, "kl_coef of at least 0", kl_coef)
        _require(loss_weight in LOSS_WEIGHTS, f"loss_weight out of {LOSS_WEIGHTS}", loss_weight)
        _require(updates_per_batch >= 1, "updates_per_batch of at least 1", updates_per_batch)
        _require(max_grad_norm > 0, "max_grad_norm above 0", max_grad_norm)
        _require(micro_batch_tokens >= 1, "micro_batch_tokens of at least 1", micro_batch_tokens)
        kinds = (selection.main, selection.compaction, selection.subagent, selection.auxiliary, selection.dead)
        _require("train" in kinds, "a selection that trains some kind of call", selection)
        _refuse_stochastic(policy.module)
        self.policy = policy
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.tis_cap = tis_cap
        self.kl_coef = kl_coef
        self.loss_weight: LossWeight = loss_weight
        self.updates_per_batch = updates_per_batch
        self.max_grad_norm = max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens
        self.packing: Packing = supported(packing, policy.module)
        self.selection = selection
        self._engine = engine
        self._reference = copy.deepcopy(policy.module).requires_grad_(False) if kl_coef else None
        if lora is not None:
            policy.module = _with_adapters(policy.module, lora)
        self._gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            _enable_checkpointing(policy.module)
        self._parameters = {name: p for name, p in policy.module.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), lr=learning_rate, betas=betas, weight_decay=weight_decay
        )

    @abstractmethod
    def advantages(self, rollouts: Sequence[Rollout]) -> Floats:
        """Return the advantage of each rollout, shape [n]; all of them count and hold trained tokens."""

    def engine(self) -> Engine:
        """Return the engine that samples from the policy."""
        if self._engine is None:
            from clawgym_env.engine.torch_engine import TorchEngine

            self._engine = TorchEngine(self.policy)
        return self._engine

    def update(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Take `updates_per_batch` steps on a batch; without any advantage in it the weights stay as they are.

        Returns:
            Metrics, keys `group/name`, times in seconds; no `reward/mean` and `reward/std` where nothing was graded.
            Token averages are over the tokens that went through the trainer: those of rollouts without advantage are
            left out, since they cannot move anything.

        Raises:
            ValueError: a trained call was sampled with top-p, top-k or temperature 0.
            FloatingPointError: the gradient is not finite; the weights are as before.
        """
        started = time.perf_counter()
        exclusions = [self._exclusion(rollout) for rollout in rollouts]
        counting = [rollout for rollout, reason in zip(rollouts, exclusions, strict=True) if reason is None]
        kept = [(rollout, trained_rows(rollout, self.selection)) for rollout in counting]
        kept = [(rollout, rows) for rollout, rows in kept if rows]
        survivors = [rollout for rollout, _ in kept]
        rows_of = [rows for _, rows in kept]
        keys = [group_key(rollout) for rollout in survivors]
        num_tokens = np.array([num_trained(rows) for rows in rows_of], dtype=np.int64)
        advantages = self.advantages(survivors)
        rows = training_rows(rows_of, advantages, token_weights(num_tokens, keys, self.loss_weight))
        if not self.kl_coef:
            rows = [row for row in rows if row.advantages.any()]
        batches, sharing = packed(
            rows, packing=self.packing, max_tokens=self.micro_batch_tokens, module=self.policy.module
        )
        return {
            **_batch_metrics(rollouts, survivors, exclusions),
            **group_metrics(np.array([rollout.reward for rollout in survivors]), keys),
            **sharing,
            **self._train(batches),
            "tokens/trained": float(num_tokens.sum()),
            "policy/version": float(self.engine().policy_version),
            "time/update_s": time.perf_counter() - started,
        }

    def scale_learning_rate(self, factor: float) -> None:
        """Take the next updates at `factor` times the learning rate given at construction (see `schedules`)."""
        _require(factor >= 0, "a learning rate factor of at least 0", factor)
        for group in self._optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def state_dict(self) -> LearnerState:
        """Return parameters (frozen ones too), optimizer state, policy version and, with a KL penalty, the reference.

        Tensors are the live ones.
        """
        state = {
            "parameters": _parameters(self.policy.module),
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy.version,
        }
        return state if self._reference is None else {**state, "reference": _parameters(self._reference)}

    def load_state_dict(self, state: LearnerState) -> None:
        """Continue from what `state_dict` returned, whatever the values of the policy's weights are now.

        Raises:
            ValueError: the parameters are not those of this policy, or adapters are not the same.
        """
        parameters = cast(Mapping[str, Tensor], state["parameters"])
        own = _parameters(self.policy.module)
        if different := _shapes(parameters) ^ _shapes(own):
            raise ValueError(
                f"Expected the parameters of {self.policy.name!r}, got others, {min(different)} among them. Load the "
                "state into a learner of the same policy and the same `lora`."
            )

        def apply() -> None:
            # Frozen ones too: a checkpoint's folder, from which the policy may come, has adapters merged into them.
            for name, parameter in own.items():
                parameter.copy_(parameters[name])
            if self._reference is not None and "reference" in state:
                for name, parameter in _parameters(self._reference).items():
                    parameter.copy_(cast(Mapping[str, Tensor], state["reference"])[name])

        self._optimizer.load_state_dict(cast(dict[str, Any], state["optimizer"]))
        self.engine().update_weights(apply)
        self.policy.version = cast(int, state["policy_version"])

    def _exclusion(self, rollout: Rollout) -> Exclusion | None:
        """Return why a rollout does not count, if so.

        Branching is judged by this learner's own selection: the runner, which marks rollouts, only knows the default.
        """
        if not rollout.graded:
            return "ungraded"
        if rollout.exclusion not in (None, "over_branched"):
            return rollout.exclusion
        return "over_branched" if rollout.tree.over_branched(self.selection) else None

    def _train(self, batches: Sequence[MicroBatch]) -> dict[str, float]:
        if not batches:
            return {"loss/policy": 0.0, "grad/norm": 0.0}
        statistics = TokenStatistics()
        totals: defaultdict[str, float] = defaultdict(float)
        with self._training():
            # A single step sees π_old = π_θ, so that its own forward pass serves as both.
            old = [self._logprobs(batch) for batch in batches] if self.updates_per_batch > 1 else [None] * len(batches)
            for _ in range(self.updates_per_batch):
                for batch, old_logprobs in zip(batches, old, strict=True):
                    for name, loss in self._backward(batch, old_logprobs, statistics).items():
                        totals[name] += loss
                totals["grad/norm"] += self._step()
                self._optimizer.zero_grad()
        metrics = {name: total / self.updates_per_batch for name, total in totals.items()}
        return {**metrics, **statistics.metrics()}

    def _logprobs(self, batch: MicroBatch) -> Tensor:
        with torch.no_grad():
            return token_logprobs(self.policy.module, batch)[0]

    def _backward(self, batch: MicroBatch, old: Tensor | None, statistics: TokenStatistics) -> dict[str, float]:
        """Add a micro-batch's share to the gradient and return its share of the losses."""
        logprobs, entropies = token_logprobs(self.policy.module, batch)
        old = logprobs.detach() if old is None else old
        importance = truncated_importance_weights(old, batch.rollout_logprobs, cap=self.tis_cap)
        surrogate = clipped_policy_loss(
            logprobs, old, batch.advantages, clip_low=self.clip_low, clip_high=self.clip_high
        )
        loss = (batch.weights * importance * surrogate).sum()
        losses = {"loss/policy": loss.item()}
        if self._reference is not None:
            with torch.no_grad():
                reference = token_logprobs(self._reference, batch)[0]
            penalty = (batch.weights * k3(reference - logprobs)).sum()
            loss = loss + self.kl_coef * penalty
            losses["loss/kl"] = penalty.item()
        loss.backward()  # type: ignore[no-untyped-call]
        statistics.add(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=batch.rollout_logprobs,
            importance=importance,
            entropies=entropies,
            tis_cap=self.tis_cap,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return losses

    def _step(self) -> float:
        norm = float(nn.utils.clip_grad_norm_(self._parameters.values(), self.max_grad_norm))
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"Expected a finite gradient, got norm {norm}. Look at logprob/max_abs_diff of the updates before; "
                "lower learning_rate, or train in fp32."
            )

        def apply() -> None:
            self._optimizer.step()

        with deferred_interrupt():
            self.engine().update_weights(apply)
        return norm

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Transformers recomputes activations in training mode only; nothing else in a policy depends on it."""
        self.policy.module.train(self._gradient_checkpointing)
        try:
            yield
        finally:
            self.policy.module.train(False)
            self._optimizer.zero_grad()


def _parameters(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def _shapes(parameters: Mapping[str, Tensor]) -> set[tuple[str, tuple[int, ...]]]:
    return {(name, tuple(parameter.shape)) for name, parameter in parameters.items()}


def _batch_metrics(
    rollouts: Sequence[Rollout], survivors: Sequence[Rollout], exclusions: Sequence[Exclusion | None]
) -> dict[str, float]:
    graded = np.array([rollout.reward for rollout in rollouts if rollout.graded])
    excluded = Counter(reason for reason in exclusions if reason is not None)
    rewards = {"reward/mean": float(graded.mean()), "reward/std": float(graded.std())} if graded.size else {}
    return {
        **rewards,
        "rollouts/total": float(len(rollouts)),
        "rollouts/excluded": float(len(rollouts) - len(survivors)),
        **{f"rollouts/excluded_{reason}": float(count) for reason, count in sorted(excluded.items())},
        "tokens/sampled": float(sum(rollout.tree.num_completion_tokens for rollout in rollouts)),
    }


def _with_adapters(module: PreTrainedModel, shape: LoraConfig | int) -> PreTrainedModel:
    """Put adapters into a module, in place: an engine that already reads it samples through them."""
    from peft import LoraConfig, get_peft_model

    config = shape
    if isinstance(config, int):
        config = LoraConfig(r=config, lora_alpha=2 * config, target_modules="all-linear")
    _require(not config.lora_dropout, "lora_dropout of 0 (sampling has no dropout)", config.lora_dropout)
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.24 has renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return cast("PreTrainedModel", get_peft_model(module, config))


def _enable_checkpointing(module: Any) -> None:
    # Renamed within transformers 5; the old name warns where both exist.
    new_name = getattr(module, "activation_checkpointing_enable", None)
    (new_name or module.gradient_checkpointing_enable)({"use_reentrant": False})


def _refuse_stochastic(module: nn.Module) -> None:
    for name, part in module.named_modules():
        rate = part.p if isinstance(part, nn.Dropout) else getattr(part, "attention_dropout", 0.0)
        _require(not rate, f"a policy without dropout (sampling has none), in {name}", rate)


def _require(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"Expected {expected}, got {got}.")
