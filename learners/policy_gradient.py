"""The update every policy-gradient learner shares: rollouts to rows, rows to one clipped, importance-weighted step.

A subclass says what a rollout's advantage is (`grpo` in a dozen lines); the base gives it to every trained token, each
once. A critic makes it the token's own (`ppo`, through `_look_before` and `_judge`). With a mesh, every process calls
the same methods with the same rollouts (`sharding`; `distributed.lead` sees to it). Invariants: which rollouts count,
and the normalisers of the loss, are fixed before micro-batching; excluded rollouts are in neither statistics nor loss;
weights change only inside `Engine.update_weights`.
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
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import numpy as np
import torch
from torch import Tensor, nn

from clawgym_env.engine.base import Engine
from clawgym_env.extras import require_package
from clawgym_env.rollout import Rollout
from clawgym_env.trace.prefix_tree import Selection, TokenRow
from learners.advantages import Floats, group_key, group_metrics
from learners.base import LearnerState
from learners.distributed import SilentEngine
from learners.forest import Packing, packed, supported
from learners.forward import logprobs_of, token_logprobs, trained_hidden
from learners.interrupts import deferred_interrupt
from learners.losses import (
    LOSS_WEIGHTS,
    TIS_MODES,
    LossWeight,
    TisMode,
    clipped_policy_loss,
    importance_weights,
    k3,
    token_weights,
)
from learners.master_weights import MasterWeights
from learners.mix import harness_metrics
from learners.rows import MicroBatch, TrainingRow, exclusion_under, num_trained, trained_rows, training_rows
from learners.sharding import Processes, gathered
from learners.statistics import TokenStatistics

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from clawgym_env.policy import Policy


class Survivor(NamedTuple):
    """A rollout that counts."""

    rollout: Rollout
    rows: tuple[TokenRow, ...]
    """Its trained rows, at least one."""


class PolicyGradientSettings(TypedDict, total=False):
    """The keywords of `PolicyGradientLearner`, for learners that add some of their own."""

    learning_rate: float
    betas: tuple[float, float]
    weight_decay: float
    clip_low: float
    clip_high: float
    tis_cap: float
    tis_mode: TisMode
    kl_coef: float
    entropy_coef: float
    loss_weight: LossWeight
    updates_per_batch: int
    max_grad_norm: float
    micro_batch_tokens: int
    packing: Packing
    gradient_checkpointing: bool
    selection: Selection
    lora: LoraConfig | int | None
    engine: Engine | None
    mesh: DeviceMesh | None


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
        tis_mode: TisMode = "truncate",
        kl_coef: float = 0.0,
        entropy_coef: float = 0.0,
        loss_weight: LossWeight = "rollout",
        updates_per_batch: int = 1,
        max_grad_norm: float = 1.0,
        micro_batch_tokens: int = 8192,
        packing: Packing = "auto",
        gradient_checkpointing: bool = False,
        selection: Selection = Selection(),
        lora: LoraConfig | int | None = None,
        engine: Engine | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Take over a policy; its weights are trained in place.

        Args:
            policy: what is trained and sampled from.
            learning_rate: of AdamW; constant unless a schedule calls `scale_learning_rate`.
            tis_cap: c̄, the largest weight a token gets for being likelier now than when it was sampled.
            tis_mode: what becomes of a token beyond the cap: its weight is cut to it, or it is left out of the loss,
                and so is one below 1 / c̄; see `losses.importance_weights`.
            kl_coef: β of the k3 penalty towards the policy as it is now; above 0 a frozen copy is kept.
            entropy_coef: of the entropy bonus, which costs a second set of logits in memory.
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
            mesh: the processes that train together, each with a shard of weights, gradients and optimizer state. Rank 0
                keeps `policy` whole beside its shard and samples; on the others its module is sharded, and nothing
                samples. `distributed.torchrun_mesh` makes one.

        Raises:
            ValueError: settings that contradict each other or the policy, by name.
        """
        require(0 < learning_rate < math.inf, "a finite learning_rate above 0", learning_rate)
        require(0 < clip_low < 1, "clip_low between 0 and 1", clip_low)
        require(clip_high > 0, "clip_high above 0", clip_high)
        require(tis_cap >= 1, "tis_cap of at least 1 (less would scale down even exact tokens)", tis_cap)
        require(tis_mode in TIS_MODES, f"tis_mode out of {TIS_MODES}", tis_mode)
        require(
            tis_mode != "mask" or tis_cap > 1, "tis_cap above 1 with tis_mode='mask', which leaves out r ≠ 1", tis_cap
        )
        require(0 <= kl_coef < math.inf, "a finite kl_coef of at least 0", kl_coef)
        require(0 <= entropy_coef < math.inf, "a finite entropy_coef of at least 0", entropy_coef)
        require(loss_weight in LOSS_WEIGHTS, f"loss_weight out of {LOSS_WEIGHTS}", loss_weight)
        whole = isinstance(updates_per_batch, int) and updates_per_batch >= 1
        require(whole, "updates_per_batch, a whole number of at least 1", updates_per_batch)
        require(max_grad_norm > 0, "max_grad_norm above 0", max_grad_norm)
        require(micro_batch_tokens >= 1, "micro_batch_tokens of at least 1", micro_batch_tokens)
        kinds = (selection.main, selection.compaction, selection.subagent, selection.auxiliary, selection.dead)
        require("train" in kinds, "a selection that trains some kind of call", selection)
        _refuse_stochastic(policy.module)
        _refuse_changed_logits(policy.module)
        self.policy = policy
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.tis_cap = tis_cap
        self.tis_mode: TisMode = tis_mode
        self.kl_coef = kl_coef
        self.entropy_coef = entropy_coef
        self.loss_weight: LossWeight = loss_weight
        self.updates_per_batch = updates_per_batch
        self.max_grad_norm = max_grad_norm
        self.micro_batch_tokens = micro_batch_tokens
        self.packing: Packing = supported(packing, policy.module)
        self.selection = selection
        self.processes = Processes(mesh)
        self._engine: Engine | None = engine if self.processes.rank == 0 else SilentEngine(policy)
        self._reference = copy.deepcopy(policy.module).requires_grad_(False) if kl_coef else None
        if lora is not None:
            policy.module = _with_adapters(policy.module, lora)
        self._gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            _enable_checkpointing(policy.module)
        self._module = self.processes.own(policy.module)
        """What is trained: the policy's module, or where it is sharded rank 0's shard of it."""
        self.processes.shard(self._module, self._reference, self._make_critic())
        self._masters = MasterWeights()
        parameters = self._masters.of(self._module)
        self._optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay)
        self._clipped = {"grad/norm": parameters}
        """Parameters whose gradients are scaled down together, by the name of their norm in the metrics."""
        self._loss_coefficients = {"policy": 1.0, "kl": kl_coef, "entropy": -entropy_coef}

    def _make_critic(self) -> nn.Module | None:
        """Make what judges beside the policy, if anything does; called once, while the policy's weights are whole."""
        return None

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
            FloatingPointError: the gradient is not finite; its step of `updates_per_batch` is not taken.
        """
        started = time.perf_counter()
        survivors = self._survivors(rollouts)
        rows = self._rows(survivors)
        batches, sharing = self._packed([row for row in rows if self._can_move(row)])
        return {
            **self._batch_metrics(rollouts, survivors),
            **sharing,
            **self._train(batches, survivors),
            "tokens/trained": float(sum(num_trained([row.tokens]) for row in rows)),
            "policy/version": float(self.engine().policy_version),
            "time/update_s": time.perf_counter() - started,
        }

    def scale_learning_rate(self, factor: float) -> None:
        """Take the next updates at `factor` times the learning rate given at construction (see `schedules`)."""
        require(factor >= 0, "a learning rate factor of at least 0", factor)
        for group in self._optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def state_dict(self) -> LearnerState:
        """Return parameters, optimizer state, policy version and, with a KL penalty, the reference.

        Frozen parameters are among them, and those of half precision are fp32, in which they are moved.
        Tensors are the live ones. With a mesh they are whole copies on rank 0, and without data elsewhere: what a
        single process would return, and good for any number of them.
        """
        return self.processes.whole(self._state())

    def load_state_dict(self, state: LearnerState) -> None:
        """Continue from what `state_dict` returned, whatever the values of the policy's weights are now.

        With a mesh it is rank 0's state that counts; the others may bring any.

        Raises:
            ValueError: the parameters are not those of this policy, or adapters are not the same.
        """
        self._load_state(self.processes.received(state))

    def _state(self) -> dict[str, object]:
        state = {
            "parameters": self._masters.exact(self._module),
            "optimizer": self._optimizer.state_dict(),
            "policy_version": self.policy.version,
        }
        return state if self._reference is None else {**state, "reference": parameters_of(self._reference)}

    def _load_state(self, state: LearnerState) -> None:
        parameters = cast(Mapping[str, Tensor], state["parameters"])
        own = parameters_of(self._module)
        if different := shapes_of(parameters) ^ shapes_of(own):
            raise ValueError(
                f"Expected the parameters of {self.policy.name!r}, got others, {min(different)} among them. Load the "
                "state into a learner of the same policy and the same `lora`."
            )

        def apply() -> None:
            # Frozen ones too: a checkpoint's folder, from which the policy may come, has adapters merged into them.
            self._restore(self._module, parameters)
            if self._reference is not None and "reference" in state:
                self._restore(self._reference, cast(Mapping[str, Tensor], state["reference"]))
            self.processes.publish(self._module, self.policy.module, frozen=True)

        self._optimizer.load_state_dict(self._sharded_optimizer(cast(dict[str, Any], state["optimizer"])))
        self.engine().update_weights(apply)
        self.policy.version = cast(int, state["policy_version"])

    def _restore(self, module: nn.Module, saved: Mapping[str, Tensor]) -> None:
        """Put saved parameters into a module, and into their masters."""
        for name, parameter in module.named_parameters():
            for held in self._masters.held(parameter):
                held.copy_(self.processes.like(held, saved[name]))

    def _sharded_optimizer(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the optimizer's part of a saved state with its tensors as the parameters are that they belong to."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {
            **state,
            "state": {
                index: {
                    name: value if value.ndim == 0 else self.processes.like(parameters[index], value)
                    for name, value in own.items()
                }
                for index, own in state["state"].items()
            },
        }

    def _survivors(self, rollouts: Sequence[Rollout]) -> list[Survivor]:
        """Return the rollouts that count: not excluded, and with trained tokens."""
        counting = (rollout for rollout in rollouts if exclusion_under(rollout, self.selection) is None)
        candidates = (Survivor(rollout, trained_rows(rollout, self.selection)) for rollout in counting)
        return [survivor for survivor in candidates if survivor.rows]

    def _rows(self, survivors: Sequence[Survivor]) -> list[TrainingRow]:
        """Give each trained token its rollout's advantage and its weight in the loss."""
        rollouts = [survivor.rollout for survivor in survivors]
        rows_of = [survivor.rows for survivor in survivors]
        num_tokens = np.array([num_trained(rows) for rows in rows_of], dtype=np.int64)
        weights = token_weights(num_tokens, [group_key(rollout) for rollout in rollouts], self.loss_weight)
        return training_rows(rows_of, self.advantages(rollouts), weights)

    def _can_move(self, row: TrainingRow) -> bool:
        """Whether a row has a gradient at all."""
        return bool(self.kl_coef or self.entropy_coef or row.advantages.any())

    def _packed(self, rows: Sequence[TrainingRow]) -> tuple[list[MicroBatch], dict[str, float]]:
        """Return this process's micro-batches, and metrics of what rows share in all of them."""
        pack = partial(packed, rows, packing=self.packing, module=self._module)
        batches, sharing = pack(max_tokens=self.micro_batch_tokens)
        if 0 < len(batches) < self.processes.size:  # cut finer, so that no process is without work
            positions = sum(batch.token_ids.numel() for batch in batches)
            batches, sharing = pack(max_tokens=-(-positions // self.processes.size))
        return self.processes.dealt(batches, device=self._module.device), sharing

    def _batch_metrics(self, rollouts: Sequence[Rollout], survivors: Sequence[Survivor]) -> dict[str, float]:
        graded = np.array([rollout.reward for rollout in rollouts if rollout.graded])
        reasons = (exclusion_under(rollout, self.selection) for rollout in rollouts)
        excluded = Counter(reason for reason in reasons if reason is not None)
        rewards = {"reward/mean": float(graded.mean()), "reward/std": float(graded.std())} if graded.size else {}
        counting = [survivor.rollout for survivor in survivors]
        return {
            **rewards,
            "rollouts/total": float(len(rollouts)),
            "rollouts/excluded": float(len(rollouts) - len(survivors)),
            **{f"rollouts/excluded_{reason}": float(count) for reason, count in sorted(excluded.items())},
            "tokens/sampled": float(sum(rollout.tree.num_completion_tokens for rollout in rollouts)),
            **group_metrics(np.array([rollout.reward for rollout in counting]), [group_key(r) for r in counting]),
            **harness_metrics(rollouts, counting),
        }

    def _train(self, batches: Sequence[MicroBatch], survivors: Sequence[Survivor]) -> dict[str, float]:
        if not batches:
            return {"loss/policy": 0.0, "grad/norm": 0.0}
        statistics = TokenStatistics()
        losses: defaultdict[str, float] = defaultdict(float)
        norms: defaultdict[str, float] = defaultdict(float)
        with self._training():
            with torch.no_grad():
                batches = self._look_before(batches, survivors)
            for _ in range(self.updates_per_batch):
                for batch in batches:
                    for name, loss in self._backward(batch, statistics).items():
                        losses[name] += loss
                for name, norm in self._step().items():
                    norms[name] += norm
                self._zero_grad()
        everywhere = self.processes.total(torch.tensor(list(losses.values()), dtype=torch.float64)).tolist()
        totals = {**dict(zip(losses, everywhere, strict=True)), **norms}
        metrics = {name: total / self.updates_per_batch for name, total in totals.items()}
        return {**metrics, **statistics.metrics(self.processes)}

    def _look_before(self, batches: Sequence[MicroBatch], survivors: Sequence[Survivor]) -> Sequence[MicroBatch]:
        """Return the micro-batches with what has to be known of them before the first step."""
        if self.updates_per_batch == 1:  # π_old = π_θ: the step's own forward pass serves as both
            return batches
        return [self.processes.run(partial(self._seen, batch)) for batch in batches]

    def _seen(self, batch: MicroBatch) -> MicroBatch:
        return replace(batch, old_logprobs=token_logprobs(self._module, batch)[0])

    def _backward(self, batch: MicroBatch, statistics: TokenStatistics) -> dict[str, float]:
        """Add a micro-batch's share to the gradient and return its share of the losses."""
        losses: dict[str, Tensor] = {}

        def total() -> Tensor:
            losses.update(self._losses(batch, statistics))
            return torch.stack([self._loss_coefficients[name] * loss for name, loss in losses.items()]).sum()

        self.processes.run(total).backward()  # type: ignore[no-untyped-call]
        return {f"loss/{name}": loss.item() for name, loss in losses.items()}

    def _losses(self, batch: MicroBatch, statistics: TokenStatistics) -> dict[str, Tensor]:
        """Return a micro-batch's share of the losses, summed under their weights."""
        hidden = trained_hidden(self._module, batch)
        logprobs, entropies = logprobs_of(self._module, hidden, batch, entropy_gradient=self.entropy_coef > 0)
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        advantages, losses = self._judge(batch, hidden, statistics)
        importance = importance_weights(old, batch.rollout_logprobs, cap=self.tis_cap, mode=self.tis_mode)
        surrogate = clipped_policy_loss(logprobs, old, advantages, clip_low=self.clip_low, clip_high=self.clip_high)
        losses["policy"] = (batch.weights * importance * surrogate).sum()
        if self._reference is not None:
            with torch.no_grad():
                reference = token_logprobs(self._reference, batch)[0]
            losses["kl"] = (batch.weights * k3(reference - logprobs)).sum()
        if self.entropy_coef:
            losses["entropy"] = (batch.weights * entropies).sum()
        statistics.add(
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=batch.rollout_logprobs,
            importance=importance,
            entropies=entropies,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return losses

    def _judge(
        self, batch: MicroBatch, hidden: Tensor, statistics: TokenStatistics
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the advantages of a micro-batch's tokens, and losses beside the policy's: a critic's.

        Args:
            hidden: what predicts each token, shape [M, H].

        Returns:
            Advantages, shape [M], without gradient; summed, weighted losses by their name in `_loss_coefficients`.
        """
        return batch.advantages, {}

    def _step(self) -> dict[str, float]:
        """Take an optimizer step and return the norms of its gradient."""
        self._masters.take_gradients()
        norms = {
            name: float(gathered(nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)))
            for name, parameters in self._clipped.items()
        }
        if broken := {name: norm for name, norm in norms.items() if not math.isfinite(norm)}:
            raise FloatingPointError(
                f"Expected a finite gradient, got {broken}. Look at logprob/max_abs_diff of the updates before; lower "
                "learning_rate, or train in fp32."
            )

        def apply() -> None:
            self._optimizer.step()
            self._masters.give_back()
            self.processes.publish(self._module, self.policy.module, frozen=False)

        with deferred_interrupt():
            self.engine().update_weights(apply)
        return norms

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Transformers recomputes activations in training mode only; nothing else in a policy depends on it."""
        self._module.train(self._gradient_checkpointing)
        try:
            yield
        finally:
            self._module.train(False)
            self._zero_grad()

    def _zero_grad(self) -> None:
        self._optimizer.zero_grad()
        self._masters.drop_gradients()


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by name, live."""
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def shapes_of(parameters: Mapping[str, Tensor]) -> set[tuple[str, tuple[int, ...]]]:
    """Return what has to agree for one set of parameters to be put in the place of another."""
    return {(name, tuple(parameter.shape)) for name, parameter in parameters.items()}


def _with_adapters(module: PreTrainedModel, shape: LoraConfig | int) -> PreTrainedModel:
    """Put adapters into a module, in place: an engine that already reads it samples through them."""
    require_package("peft")
    from peft import LoraConfig, get_peft_model

    config = shape
    if isinstance(config, int):
        config = LoraConfig(r=config, lora_alpha=2 * config, target_modules="all-linear")
    require(not config.lora_dropout, "lora_dropout of 0 (sampling has no dropout)", config.lora_dropout)
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
        require(not rate, f"a policy without dropout (sampling has none), in {name}", rate)


def _refuse_changed_logits(module: PreTrainedModel) -> None:
    """Refuse a model that does more to its logits than its output layer, which is all that `forward` computes."""
    config = module.config.get_text_config()
    plain = {"final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0}
    for setting, value in plain.items():
        found = getattr(config, setting, value)
        require(found == value, f"a policy whose logits are those of its output layer, without {setting}", found)


def require(holds: bool, expected: str, got: object) -> None:
    """Refuse a setting by name.

    Raises:
        ValueError: it does not hold.
    """
    if not holds:
        raise ValueError(f"Expected {expected}, got {got}.")
