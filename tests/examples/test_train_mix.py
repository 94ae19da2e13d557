from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from clawgym_env import RolloutStore, cache_dir
from clawgym_env.policy import load_policy
from clawgym_env.registry import adapter
from learners.metrics_log import read_metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "train_mix.py"
SMALL = ["--num-updates", "1", "--num-pairs", "2", "--group-size", "2", "--eval-tasks", "1", "--seed", "6"]


def test_the_example_fits_on_a_few_screens() -> None:
    assert len(SCRIPT.read_text().splitlines()) <= 150


@pytest.mark.policy
@pytest.mark.harness
def test_one_policy_is_cold_started_and_trained_through_mini_and_real_pi(tmp_path: Path) -> None:
    adapter("pi").install(cache_dir())
    command = [sys.executable, str(SCRIPT), *SMALL, "--demonstrations", "2", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    first, update = read_metrics(tmp_path)
    assert {"eval/reward", "eval/mini", "eval/pi"} <= first.keys() & update.keys()
    assert update["harness/mini/rollouts"] == update["harness/pi/rollouts"] == 2.0
    for name in ("mini", "pi"):
        with RolloutStore(tmp_path / "demonstrations" / name, read_only=True) as store:
            assert [rollout.harness for rollout in store.rollouts()] == [name] * 2
    with RolloutStore(tmp_path, read_only=True) as store:
        [ids] = store.batches().values()
        assert [store.load(name).harness for name in ids] in (["mini"] * 2 + ["pi"] * 2, ["pi"] * 2 + ["mini"] * 2)
    for folder in ("cold_start", "checkpoint"):
        assert load_policy(tmp_path / folder, cache=cache_dir()).context_length > 100_000
