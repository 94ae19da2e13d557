"""ClawGym's stock `reward.sh`, recognised so that its named sub-scores are not lost.

The script, byte for byte the same in all released tasks, pipes the JSON object printed by `reward/check.py` into a
mean and shows only that. `CommandGrader` runs the same checker itself and takes the mean here. Invariant: the reward is
the one the script would have printed, save that what is neither an object nor a number is an error here and 0 there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import WORKDIR, ExecResult

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

STOCK_SHA256 = "2c892af9d8248934e5e67646a02524d9da0f5a1fcc5fadadd077e485238d6e65"


def stock_checker(task: Task) -> Sequence[str] | None:
    """Return the command that prints the sub-scores, or None where the task has a script of its own."""
    files = {file.path: file for file in task.hidden_files}
    if "reward/reward.sh" not in files or "reward/check.py" not in files or task.workdir != WORKDIR:
        return None
    if task.grading != CommandGrading():
        return None
    if hashlib.sha256(files["reward/reward.sh"].read()).hexdigest() != STOCK_SHA256:
        return None
    return ("python3", f"{WORKDIR}/reward/check.py", WORKDIR)


def with_mean(result: ExecResult) -> ExecResult:
    """Return the checker's result with its JSON on one line and the mean of its values on the next, as last line.

    What is no object of numbers, and no number, is left as it is: it has no mean, and the reader will say so.
    """
    try:
        value = json.loads(result.stdout)
        if isinstance(value, dict):
            mean = sum(float(part) for part in value.values()) / len(value) if value else 0.0
        else:
            mean = float(value)
    except (ValueError, TypeError, RecursionError):
        return result
    return replace(result, stdout=f"{json.dumps(value)}\n{mean}\n".encode())
