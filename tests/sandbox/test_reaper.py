"""The reaper removes what dead controllers left, of every backend, and nothing stops it."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from clawgym_env import registry
from clawgym_env.cli import main
from clawgym_env.errors import SandboxError
from clawgym_env.ownership import owner_tag
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.limits import ControlGroups
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.sandbox.reaper import Leftover, reap
from clawgym_env.scratch import PREFIX, make_scratch_folder
from clawgym_env.testing import FakeBackend, descendants, is_running

needs_groups = pytest.mark.skipif(
    ControlGroups.find() is None, reason="no control groups are ours to make on this machine"
)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this test a folder for temporary files of its own: others on this machine may leave things too."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def dead() -> str:
    """Return the owner tag of a process that is gone."""
    code = "from clawgym_env.ownership import owner_tag; print(owner_tag())"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


class Leaving(FakeBackend):
    """A backend with given leftovers, or a given trouble."""

    def __init__(self, names: Sequence[str] = (), trouble: Exception | None = None) -> None:
        super().__init__()
        self.names = list(names)
        self._trouble = trouble

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        if self._trouble is not None:
            raise self._trouble
        found = list(self.names)
        if not dry_run:
            self.names.clear()
        return found


def test_leftovers_of_every_backend_and_scratch_folders_are_named(folders: Path, dead: str) -> None:
    scratch = folders / f"{PREFIX}{dead}-workspace-x"
    scratch.mkdir()
    backend = Leaving(["a", "b"])
    expected = [Leftover("fake", "a"), Leftover("fake", "b"), Leftover("scratch", str(scratch))]
    assert asyncio.run(reap([backend], dry_run=True)) == expected
    assert asyncio.run(reap([backend])) == expected
    assert asyncio.run(reap([backend])) == []


@pytest.mark.parametrize("trouble", [SandboxError("no engine"), PermissionError("no"), KeyError("a bug")])
def test_trouble_with_one_backend_is_logged_and_the_others_are_reaped(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = asyncio.run(reap([Leaving(trouble=trouble), Leaving(["a"])]))
    assert found == [Leftover("fake", "a")]
    assert "Could not look for what earlier runs left of fake sandboxes" in caplog.text


def test_two_reapers_at_once_are_no_error(folders: Path, dead: str) -> None:
    for number in range(20):
        (folders / f"{PREFIX}{dead}-workspace-{number}" / "deep" / "er").mkdir(parents=True)

    async def both() -> None:
        await asyncio.gather(*(reap([LocalBackend()]) for _ in range(4)))

    asyncio.run(both())
    assert not list(folders.iterdir())


def test_what_this_process_owns_stays(folders: Path) -> None:
    folder = make_scratch_folder("workspace")

    async def body() -> None:
        backend = LocalBackend()
        async with await backend.open(SandboxSpec()) as sandbox:
            await reap([backend])
            assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    asyncio.run(body())
    assert folder.exists()


def test_a_local_sandbox_ends_after_its_lifetime_though_its_owner_lives() -> None:
    async def body() -> None:
        sandbox = await LocalBackend().open(SandboxSpec(lifetime_s=1.0))
        try:
            with pytest.raises(SandboxError):
                await sandbox.exec(["sh", "-c", "(setsid sleep 1000 &); sleep 1000"])
        finally:
            await sandbox.close()

    asyncio.run(body())
    assert not [pid for pid in descendants(os.getpid()) if is_running(pid)]


@needs_groups
def test_a_control_group_of_a_dead_controller_is_emptied_and_removed(dead: str) -> None:
    groups = ControlGroups.find()
    assert groups is not None
    made = groups.make(SandboxSpec(), disks=2)
    paths = [path.rename(path.with_name(f"{dead}-orphan")) for path in made.paths]
    with subprocess.Popen(["sleep", "1000"]) as orphan:
        for path in paths:
            (path / "cgroup.procs").write_text(str(orphan.pid))
        backend = LocalBackend()
        assert set(map(str, paths)) <= set(asyncio.run(backend.reap(dry_run=True)))
        assert orphan.poll() is None
        asyncio.run(backend.reap())
        assert orphan.wait(10) == -9
    asyncio.run(backend.reap())
    assert not [path for path in paths if path.exists()]


@pytest.fixture
def run_cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*argv: str) -> tuple[int, str]:
        code = main(["reap", *argv])
        return code, capsys.readouterr().out

    return run


def test_the_command_prints_what_it_removed(
    folders: Path, dead: str, run_cli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "BACKENDS", {"fake": "tests_fake:Leaving"})
    monkeypatch.setattr(registry, "backend", lambda name: Leaving(["box-1"]))
    folder = folders / f"{PREFIX}{dead}-workspace-x"
    folder.mkdir()
    assert run_cli("--dry-run") == (0, f"fake  box-1\nscratch  {folder}\n2 leftovers found\n")
    assert folder.exists()
    assert run_cli("--sandbox", "fake") == (0, f"fake  box-1\nscratch  {folder}\n2 leftovers removed\n")
    assert not folder.exists()


def test_the_command_is_content_on_a_machine_without_an_engine(
    run_cli: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> FakeBackend:
        raise SandboxError("No engine here.")

    monkeypatch.setattr(registry, "backend", missing)
    assert run_cli() == (0, "0 leftovers removed\n")


def test_the_command_knows_no_backend_of_another_name(run_cli: Callable[..., tuple[int, str]]) -> None:
    assert run_cli("--sandbox", "dokcer")[0] == 2


def test_owner_tags_are_fit_for_file_names_and_labels() -> None:
    assert all(character.isalnum() or character in "-." for character in owner_tag())
    assert len(owner_tag()) < 63
