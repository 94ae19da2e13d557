from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from clawgym_env import RolloutStore, cache_dir
from clawgym_env.policy import load_policy
from learners.metrics_log import read_metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "train_ppo.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_ppo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_ppo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def _threads() -> Iterator[None]:
    """The example sets torch's number of threads, which is the whole process's."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_example_fits_on_a_few_screens() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 150


@pytest.mark.policy
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("options", [{}, {"critic": "separate", "shuffle_rewards": True, "group_size": 2}], ids=str)
def test_a_run_leaves_everything_it_promises(
    example: ModuleType, tmp_path: Path, options: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"num_updates": 1, "num_tasks": 2, "pretrain_batches": 1, "eval_every": 1, "eval_tasks": 1}
    example.main(example.Args(output_dir=tmp_path / "run", **small | options))
    first, record = read_metrics(tmp_path / "run")
    assert first.keys() == {"update", "eval/reward"}
    assert record.keys() >= {"reward/mean", "eval/reward", "value/mean", "loss/value", "grad/critic_norm"}
    assert "explained" in capsys.readouterr().out
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    with RolloutStore(tmp_path / "run", read_only=True) as store:
        assert [len(ids) for ids in store.batches().values()] == [2 * options.get("group_size", 1)]
    assert load_policy(tmp_path / "run" / "checkpoint", cache=cache_dir()).name == "tiny"
    state = torch.load(tmp_path / "run" / "checkpoint" / "training.pt", weights_only=True)
    assert state["learner"]["critic"]["head.weight"].any()
