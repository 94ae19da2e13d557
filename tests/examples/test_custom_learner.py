from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from learners.registry import make_learner
from learners.testing import ScriptedPolicy, check_learner, one_call_rollout

SCRIPT = Path(__file__).parents[2] / "examples" / "custom_learner.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("custom_learner", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "custom_learner", module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_the_learner_in_it_is_about_twenty_lines() -> None:
    code = SCRIPT.read_text()
    learner = code[code.index("class BestOfGroup") : code.index("@dataclasses.dataclass")]
    assert len(learner.strip().splitlines()) <= 20


def test_it_keeps_the_contract_by_import_path(example: ModuleType) -> None:
    check_learner(
        lambda policy: make_learner(
            "custom_learner:BestOfGroup", policy, engine=ScriptedPolicy(policy, ["x"]), learning_rate=0.01
        )
    )


def test_it_imitates_the_best_of_each_group_that_has_one(example: ModuleType) -> None:
    rewards = {"a": (0.0, 1.0, 1.0), "b": (0.5, 0.5, 0.5), "c": (0.2, 0.1, 0.0)}
    batch = [
        one_call_rollout([1], [2], reward, group=group, index=index)
        for group, given in rewards.items()
        for index, reward in enumerate(given)
    ]
    advantages = example.BestOfGroup.advantages(None, batch)
    assert advantages.tolist() == [0, 1, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.policy
def test_it_trains_and_goes_on(example: ModuleType, tmp_path: Path) -> None:
    small = {"num_tasks": 2, "group_size": 4, "output_dir": tmp_path, "learner": "custom_learner:BestOfGroup"}
    [first] = example.main(example.Args(num_updates=1, **small))
    again, second = example.main(example.Args(num_updates=2, resume=True, **small))
    assert again == first
    assert second["update"] == 2
    assert second["rollouts/total"] == 8
