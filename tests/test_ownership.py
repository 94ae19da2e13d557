"""Leftovers of dead controllers are swept, those of living ones are not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from clawgym_env.ownership import owner_alive, owner_tag
from clawgym_env.scratch import PREFIX, scratch_folder, sweep_scratch_folders


def test_this_process_owns_what_it_names() -> None:
    assert owner_alive(f"{owner_tag()}-rest")


def test_a_reused_process_id_is_another_owner() -> None:
    pid, _, start = owner_tag().partition("-")
    assert not owner_alive(f"{pid}-{int(start) + 1}-rest")


def test_a_name_that_is_not_ours_is_left_alone() -> None:
    assert owner_alive("somebody-elses")


def test_a_scratch_folder_is_gone_afterwards() -> None:
    async def use() -> Path:
        async with scratch_folder() as folder:
            (folder / "file").write_text("x")
            assert owner_alive(folder.name.removeprefix(PREFIX))
            return folder

    assert not asyncio.run(use()).exists()


def test_what_a_killed_controller_left_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    code = "from clawgym_env.ownership import owner_tag; print(owner_tag())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    left, kept = tmp_path / f"{PREFIX}{dead}-abc", tmp_path / f"{PREFIX}{owner_tag()}-abc"
    for folder in (left, kept):
        folder.mkdir()
    sweep_scratch_folders()
    assert (left.exists(), kept.exists()) == (False, True)
