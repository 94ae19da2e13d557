"""What `test_distributed` runs on one process and, as a script under torchrun, on two."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout
from torch.distributed.device_mesh import DeviceMesh

from clawgym_env.rollout import Rollout
from learners.checkpoint import load_checkpoint, save_checkpoint
from learners.distributed import lead, torchrun_mesh
from learners.grpo import TreeGRPO
from learners.policy_gradient import PolicyGradientLearner
from learners.ppo import TreePPO
from learners.testing import ScriptedPolicy, one_call_rollout, small_policy

NUM_UPDATES = 3
ONE_ROW = [make_rollout([Turn([1, 2], [3, 4, 5])], 1.0)]
BATCH = [
    rollout
    for group, start in (("g", 1), ("h", 5), ("i", 9))
    for rollout in (
        make_rollout([Turn([start, 2], [3, 4, 5]), Turn([6], [7, 8], parent=0)], 1.0, group=group),
        make_rollout([Turn([start, 2], [9]), Turn([6, 6], [10, 11, 12], parent=0)], 0.0, group=group, index=1),
        make_rollout([Turn([start, 2], [3, 14])], start / 10, group=group, index=2),
    )
]
PPO = MappingProxyType({"value_learning_rate": 0.01, "value_coef": 1.0})
SCENARIOS: Mapping[str, tuple[type[PolicyGradientLearner], Mapping[str, Any], Sequence[Rollout]]] = MappingProxyType(
    {
        "grpo": (TreeGRPO, {"shape": {"vocab_size": 17, "tie_word_embeddings": True}, "max_grad_norm": 0.1}, BATCH),
        "grpo, many micro-batches": (TreeGRPO, {"micro_batch_tokens": 9, "loss_weight": "token"}, BATCH),
        "adapters": (TreeGRPO, {"lora": 2, "kl_coef": 0.1, "entropy_coef": 0.01, "updates_per_batch": 2}, BATCH),
        "head": (TreePPO, {**PPO, "updates_per_batch": 2, "normalize_advantages": True}, BATCH),
        "head and trunk": (TreePPO, {**PPO, "value_trunk_gradient": True, "packing": "forest"}, BATCH),
        "separate": (TreePPO, {**PPO, "critic": "separate", "gradient_checkpointing": True}, BATCH),
        "one row": (TreePPO, {**PPO, "gradient_checkpointing": True, "packing": "forest"}, ONE_ROW),
    }
)


def make_learner(name: str, mesh: DeviceMesh | None = None, *, seed: int = 0) -> PolicyGradientLearner:
    learner_type, settings, _ = SCENARIOS[name]
    settings = dict(settings)
    policy = make_policy(seed=seed, **settings.pop("shape", {}))
    engine: Any = CountingEngine(policy)
    return learner_type(policy, engine=engine, mesh=mesh, **{"learning_rate": 1e-3, **settings})


def train(name: str, learner: PolicyGradientLearner) -> dict[str, Any]:
    """Take the updates of a scenario; returns its metrics, the gradient's mean after the first and the last state."""
    batch = SCENARIOS[name][2]
    # On others than those of the updates: a bias that fits them exactly has rounding errors for a gradient.
    metrics = [learner.pretrain_value(BATCH[:2])] if isinstance(learner, TreePPO) else []
    metrics.append(learner.update(batch))
    first: Any = learner.state_dict()
    first = {index: own["exp_avg"].clone() for index, own in first["optimizer"]["state"].items()}
    for _ in range(NUM_UPDATES - 1):
        metrics.append(learner.update(batch))
    weights = dict(learner.policy.module.state_dict())
    return {"metrics": metrics, "first": first, "last": dict(learner.state_dict()), "weights": weights}


def trained_in_half_precision(mesh: DeviceMesh | None = None, *, seed: int = 0) -> PolicyGradientLearner:
    policy = make_policy(seed=seed)
    policy.module.to(torch.bfloat16)
    learner = TreePPO(policy, engine=CountingEngine(policy), mesh=mesh, critic="separate")
    for _ in range(2):
        learner.update(BATCH)
    return learner


CHAT = [one_call_rollout([1, 2], [3, 4, 5], 1.0), one_call_rollout([1, 2], [6], 0.2, group="h")]


def make_chat_learner(mesh: DeviceMesh | None = None, *, seed: int = 0) -> TreePPO:
    policy = small_policy(seed)
    engine = ScriptedPolicy(policy, lambda prompt, turn: "1")
    return TreePPO(policy, engine=engine, learning_rate=1e-3, value_learning_rate=0.01, mesh=mesh)


def take_over(start: Path | None, end: Path, updates: int) -> Callable[[TreePPO], None]:
    """Return what goes on from one checkpoint to another."""

    def work(learner: TreePPO) -> None:
        if start is None:
            learner.pretrain_value(CHAT[:1])
        else:
            load_checkpoint(start, learner=learner)
        learner.scale_learning_rate(0.5)
        for _ in range(updates):
            learner.update(CHAT)
        save_checkpoint(end, policy=learner.policy, learner=learner, cursor={})

    return work


def main(folder: Path) -> None:
    with torchrun_mesh() as mesh:
        assert mesh is not None
        rank = mesh.get_local_rank()
        for index, name in enumerate(SCENARIOS):
            # Rank 0's weights count, whatever the others begin with.
            result = train(name, make_learner(name, mesh, seed=rank))
            (folder / f"metrics-{index}-{rank}.json").write_text(json.dumps(result.pop("metrics")))
            if rank == 0:
                torch.save(result, folder / f"result-{index}.pt")
        half = dict(trained_in_half_precision(mesh, seed=rank).state_dict())
        if rank == 0:
            torch.save(half, folder / "half.pt")
        lead(make_chat_learner(mesh, seed=rank), take_over(None, folder / "two", 2))
        lead(make_chat_learner(mesh, seed=1), take_over(folder / "one", folder / "one-two", 2))
        again = make_chat_learner(mesh, seed=1)
        try:
            lead(again, lambda learner: again.engine().no_such_method())  # type: ignore[attr-defined]
        except AttributeError:
            assert rank == 0
        else:
            assert rank == 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
