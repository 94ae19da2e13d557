"""What goes wrong in an example is one line, whichever it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train_grpo.py --policy nowhere", "Expected a policy out of tiny, smollm2 or a Hugging Face folder"),
        ("train_ppo.py --policy nowhere", "Expected a policy out of tiny, smollm2 or a Hugging Face folder"),
        ("train_mix.py --policy nowhere", "Expected a policy out of tiny, smollm2 or a Hugging Face folder"),
        ("custom_learner.py --learner nobody:Learner", "Expected a module 'nobody', got none."),
    ],
)
@pytest.mark.policy
def test_a_failing_example_says_so_in_a_line(command: str, said: str, tmp_path: Path) -> None:
    script, *flags = command.split()
    done = subprocess.run([sys.executable, EXAMPLES / script, *flags], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
