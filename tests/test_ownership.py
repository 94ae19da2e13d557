"""Leftovers of dead processes are swept, those of living ones are not, nor what nobody here can know about."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from clawgym_env.ownership import owner_alive, owner_is_elsewhere, owner_scope, owner_tag
from clawgym_env.scratch import ELSEWHERE_S, PREFIX, make_scratch_folder, scratch_folder, sweep_scratch_folders

PRINT_TAG = "from clawgym_env.ownership import owner_tag; print(owner_tag(), flush=True)"
IN_A_SANDBOX = "0badb007.4026530000"


def dead_owner() -> str:
    return subprocess.run([sys.executable, "-c", PRINT_TAG], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_this_process_owns_what_it_names() -> None:
    assert owner_alive(f"{owner_tag()}-rest")
    assert not owner_is_elsewhere(f"{owner_tag()}-rest")


def test_a_reused_process_id_is_another_owner() -> None:
    pid, start, scope = owner_tag().split("-")
    assert not owner_alive(f"{pid}-{int(start) + 1}-{scope}-rest")


def test_a_killed_process_that_its_parent_ignores_is_dead() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", f"{PRINT_TAG}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        tag = child.stdout.readline().strip()
        assert owner_alive(tag)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # leaves the zombie
        assert not owner_alive(tag)


@pytest.mark.parametrize(
    "name", ["somebody-elses", "", "-", "12", "12-34", "12-34-", "x-34-scope", "systemd-private-1-2"]
)
def test_a_name_that_is_not_ours_is_left_alone(name: str) -> None:
    assert owner_alive(name)
    assert not owner_is_elsewhere(name)


def test_an_owner_in_another_process_namespace_is_not_taken_for_dead() -> None:
    assert owner_alive(f"1-1-{IN_A_SANDBOX}-rest")
    assert owner_is_elsewhere(f"1-1-{IN_A_SANDBOX}-rest")


def test_another_process_namespace_is_another_scope() -> None:
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--pid",
        "--fork",
        "--mount-proc",
        sys.executable,
        "-c",
        PRINT_TAG,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no process namespace can be made here: {done.stderr.strip()}")
    assert done.stdout.strip().rpartition("-")[2] != owner_scope()
    assert owner_alive(done.stdout.strip())


def test_a_scratch_folder_is_gone_afterwards() -> None:
    async def use() -> Path:
        async with scratch_folder() as folder:
            (folder / "file").write_text("x")
            assert owner_alive(folder.name.removeprefix(PREFIX))
            return folder

    assert not asyncio.run(use()).exists()


def test_a_scratch_folder_that_is_cancelled_at_any_moment_leaves_nothing(folders: Path) -> None:
    async def use() -> None:
        async with scratch_folder():
            await asyncio.sleep(0)

    async def main() -> None:
        for turns in range(8):
            using = asyncio.create_task(use())
            for _ in range(turns):
                await asyncio.sleep(0)
            using.cancel()
            await asyncio.gather(using, return_exceptions=True)
        await asyncio.sleep(0.2)  # a removal that was cancelled goes on in its thread

    asyncio.run(main())
    assert list(folders.iterdir()) == []


def test_what_a_killed_process_left_is_swept(folders: Path) -> None:
    left, kept = folders / f"{PREFIX}{dead_owner()}-workspace-abc", make_scratch_folder("workspace")
    left.mkdir()
    (left / "file").write_text("x")
    assert sweep_scratch_folders(dry_run=True) == [str(left)]
    assert left.exists()
    assert sweep_scratch_folders() == [str(left)]
    assert (left.exists(), kept.exists()) == (False, True)
    assert sweep_scratch_folders() == []


def test_a_folder_of_another_scope_is_kept_until_no_rollout_can_be_that_old(folders: Path) -> None:
    young, old = (folders / f"{PREFIX}1-1-{IN_A_SANDBOX}-{age}" for age in ("young", "old"))
    for folder in (young, old):
        folder.mkdir()
    long_ago = time.time() - ELSEWHERE_S - 60
    os.utime(old, (long_ago, long_ago))
    assert sweep_scratch_folders() == [str(old)]
    assert young.exists()


def test_a_link_with_the_name_of_a_leftover_leads_the_sweep_nowhere(folders: Path) -> None:
    victim = folders / "victim"
    victim.mkdir()
    (victim / "file").write_text("x")
    (folders / f"{PREFIX}{dead_owner()}-workspace-abc").symlink_to(victim)
    assert sweep_scratch_folders() == []
    assert (victim / "file").exists()
