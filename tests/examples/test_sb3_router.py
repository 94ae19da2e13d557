from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "examples" / "sb3_router.py"
CHOICES = ["writer in mini", "editor in mini", "writer in agent-loop", "editor in agent-loop"]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("sb3_router", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sb3_router", module)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_each_kind_of_task_has_one_policy_and_one_harness_that_do_it(
    example: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    found = example.main(example.Args(algorithms=("ppo",), num_rollouts=32, num_tasks=2))
    assert list(found) == [*(f"always {choice}" for choice in CHOICES), "random", "ppo"]
    fixed = [found[f"always {choice}"] for choice in CHOICES]
    # Half of the tasks each, less the price of the prompts; no tool to edit with in mini.
    assert all(0.4 < reward < 0.5 for reward in (fixed[0], fixed[2], fixed[3]))
    assert -0.1 < fixed[1] < 0.0
    assert fixed[0] > fixed[2], "the longer prompts of agent-loop cost more"
    assert found["random"] == pytest.approx(sum(fixed) / 4)
    assert "against the best fixed choice" in capsys.readouterr().out


@pytest.mark.slow
def test_routers_beat_the_best_fixed_choice_and_from_shuffled_rewards_they_do_not(example: ModuleType) -> None:
    best = 0.5
    found = example.main(example.Args())
    assert found["ppo"] > best + 0.1
    assert found["dqn"] > best + 0.1
    control = example.main(example.Args(algorithms=("ppo",), shuffle_rewards=True))
    assert control["ppo"] < best + 0.1
