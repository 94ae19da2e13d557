"""Checkpoints: what a learner needs to go on exactly, in one folder.

Written by training loops between updates. The folder is a plain Hugging Face one (`--policy FOLDER` and transformers
read it; adapters are merged) with `training.pt` beside it: the learner's state, which holds adapters and the weights
under them apart, the global random numbers of torch (every device), numpy and Python, and the loop's own cursor, in
which a `Trainer` keeps where its environments stand. Invariant: at any moment, `kill -9` included, a complete
checkpoint is found.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from clawgym_env.messages import Json
from learners.base import Learner, LearnerState

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

STATE_FILE = "training.pt"


def save_checkpoint(folder: Path, *, policy: Policy | None, learner: Learner, cursor: Mapping[str, Json]) -> None:
    """Replace the checkpoint in `folder`.

    Args:
        policy: what the learner trains; adapters are merged into the weights written. None writes `training.pt` alone.
        cursor: where the loop stands; given back by `load_checkpoint`.
    """
    from clawgym_env.policy import save_policy

    new, old = _beside(folder, "new"), _beside(folder, "old")
    if policy is None:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    else:
        save_policy(policy, new)
    state = {"learner": dict(learner.state_dict()), "cursor": dict(cursor), "rng": _random_state()}
    torch.save(state, new / STATE_FILE)
    for file in (*new.rglob("*"), new):
        _sync(file)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    new.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path, *, learner: Learner) -> Mapping[str, Json]:
    """Put learner and random numbers where they were, and return the cursor.

    The learner may have been made from any policy of the same shape, this folder's included: all weights are replaced.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it belongs to a learner of another shape.
    """
    found = _find(folder)
    if found is None:
        raise FileNotFoundError(
            f"Expected a checkpoint in {folder}, got none. Name the folder that holds {STATE_FILE}."
        )
    state = torch.load(found / STATE_FILE, map_location="cpu", weights_only=True)
    learner.load_state_dict(cast(LearnerState, state["learner"]))
    _set_random_state(state["rng"])
    return cast(Mapping[str, Json], state["cursor"])


def has_checkpoint(folder: Path) -> bool:
    """Whether `load_checkpoint` would find one."""
    return _find(folder) is not None


def _find(folder: Path) -> Path | None:
    # A crash between the two renames of `save_checkpoint` leaves the one before under its other name.
    return next((place for place in (folder, _beside(folder, "old")) if (place / STATE_FILE).is_file()), None)


def _random_state() -> dict[str, object]:
    kind, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (kind, torch.as_tensor(np.asarray(keys, dtype=np.int64)), *rest),
        "python": random.getstate(),
    }


def _set_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f"{folder.name}.{suffix}")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
