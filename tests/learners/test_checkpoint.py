from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_fakes import CountingEngine, Turn, make_policy, make_rollout
from peft import LoraConfig
from transformers import AutoModelForCausalLM

import clawgym_env.policy
from clawgym_env.policy import Policy
from learners.checkpoint import has_checkpoint, load_checkpoint, save_checkpoint
from learners.grpo import TreeGRPO

BATCH = [make_rollout([Turn([1], [2, 3])], 1.0), make_rollout([Turn([1], [4])], 0.0, index=1)]


@pytest.fixture(autouse=True)
def _plain_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake policy has no tokenizer to save."""

    class NoTokenizer:
        def save(self, folder: Path) -> None:
            pass

    def save(policy: Policy, folder: Path) -> Path:
        fake: Any = NoTokenizer()
        policy.tokenizer = fake
        return original(policy, folder)

    original = clawgym_env.policy.save_policy
    monkeypatch.setattr(clawgym_env.policy, "save_policy", save)


def make_learner(seed: int = 0, **settings: Any) -> TreeGRPO:
    policy = make_policy(seed=seed)
    engine: Any = CountingEngine(policy)
    return TreeGRPO(policy, engine=engine, learning_rate=0.01, **settings)


def weights(learner: TreeGRPO) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in learner.policy.module.parameters()]


def save(folder: Path, learner: TreeGRPO, **cursor: Any) -> None:
    save_checkpoint(folder, policy=learner.policy, learner=learner, cursor=cursor)


@pytest.mark.parametrize("lora", [None, LoraConfig(r=2, target_modules=["q_proj"])])
def test_a_run_goes_on_exactly(tmp_path: Path, lora: LoraConfig | None) -> None:
    first = make_learner(lora=lora)
    first.update(BATCH)
    first.update(BATCH)
    save(tmp_path / "checkpoint", first, update=2)
    drawn = torch.rand(3)
    first.update(BATCH)
    second = make_learner(seed=1, lora=lora)  # other weights, those under the adapters included
    assert load_checkpoint(tmp_path / "checkpoint", learner=second) == {"update": 2}
    assert second.policy.version == 2
    assert torch.equal(torch.rand(3), drawn)
    second.update(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))


@pytest.mark.parametrize("settings", [{}, {"lora": 2}, {"lora": 2, "kl_coef": 0.1}, {"kl_coef": 0.1}], ids=str)
def test_resuming_from_the_checkpoint_folder_itself_equals_going_on(tmp_path: Path, settings: dict[str, Any]) -> None:
    first = make_learner(**settings)
    for _ in range(3):
        first.update(BATCH)
    save(tmp_path / "checkpoint", first)
    policy = make_policy()
    policy.module = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="float32")
    engine: Any = CountingEngine(policy)
    second = TreeGRPO(policy, engine=engine, learning_rate=0.01, **settings)
    load_checkpoint(tmp_path / "checkpoint", learner=second)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    went_on, resumed = first.update(BATCH), second.update(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(weights(first), weights(second), strict=True))
    assert {**went_on, "time/update_s": 0.0} == {**resumed, "time/update_s": 0.0}


def test_the_folder_is_a_plain_model_with_adapters_merged(tmp_path: Path) -> None:
    learner = make_learner(lora=LoraConfig(r=2, target_modules=["q_proj"]))
    learner.update(BATCH)
    learner.update(BATCH)
    save(tmp_path / "checkpoint", learner)
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype="float32")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(module(input_ids=ids).logits, learner.policy.module(input_ids=ids).logits)


def test_saving_again_replaces_the_checkpoint_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    learner = make_learner()
    save(tmp_path / "checkpoint", learner, update=1)
    save(tmp_path / "checkpoint", learner, update=2)
    assert load_checkpoint(tmp_path / "checkpoint", learner=learner) == {"update": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = make_learner()
    save(tmp_path / "checkpoint", learner, update=1)

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", crash)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / "checkpoint", learner, update=2)
    assert load_checkpoint(tmp_path / "checkpoint", learner=learner) == {"update": 1}
    save(tmp_path / "checkpoint", learner, update=3)
    assert load_checkpoint(tmp_path / "checkpoint", learner=learner) == {"update": 3}


def test_a_crash_between_the_two_renames_leaves_a_checkpoint_too(tmp_path: Path) -> None:
    learner = make_learner()
    save(tmp_path / "checkpoint", learner, update=1)
    shutil.move(tmp_path / "checkpoint", tmp_path / "checkpoint.old")
    assert load_checkpoint(tmp_path / "checkpoint", learner=learner) == {"update": 1}


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"training\.pt"):
        load_checkpoint(tmp_path, learner=make_learner())


@pytest.mark.parametrize("lora", [None, 1])
def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path, lora: int | None) -> None:
    save(tmp_path / "checkpoint", make_learner(lora=lora))
    with pytest.raises(ValueError, match="same `lora`"):
        load_checkpoint(tmp_path / "checkpoint", learner=make_learner(lora=2))


def test_every_global_random_state_goes_on(tmp_path: Path) -> None:
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), float(np.random.random()), random.random()

    learner = make_learner()
    save(tmp_path / "checkpoint", learner)
    drawn = draw()
    assert draw() != drawn
    load_checkpoint(tmp_path / "checkpoint", learner=learner)
    assert draw() == drawn


def test_a_learner_without_a_policy_has_a_checkpoint_too(tmp_path: Path) -> None:
    learner = make_learner()
    assert not has_checkpoint(tmp_path / "checkpoint")
    for update in (1, 2):
        save_checkpoint(tmp_path / "checkpoint", policy=None, learner=learner, cursor={"update": update})
    assert has_checkpoint(tmp_path / "checkpoint")
    assert load_checkpoint(tmp_path / "checkpoint", learner=learner) == {"update": 2}
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["training.pt"]
