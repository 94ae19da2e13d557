"""The scripts that bring a private Docker engine, and take it away again."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="clawgym-") as folder:
        yield Path(folder)


@pytest.fixture
def installed() -> None:
    if os.geteuid() != 0 or shutil.which("dockerd", path=PATH) is None:
        pytest.skip("No dockerd that this user may start (see scripts/docker-up).")


def script(name: str, *arguments: str, folder: Path, path: str = PATH) -> subprocess.CompletedProcess[str]:
    env = {"PATH": path, "HOME": str(folder), "TMPDIR": str(folder)}
    return subprocess.run(
        [SCRIPTS / name, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def processes(folder: Path) -> list[str]:
    """Return the command lines of this machine's processes that name a folder."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = file.read_text(errors="replace").replace("\0", " ")
        except OSError:
            continue
        if str(folder) in command:
            found.append(command)
    return found


def test_an_engine_starts_once_and_stops_without_a_trace(installed: None, short: Path) -> None:
    first = script("docker-up", folder=short)
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"unix://{short}/.cache/clawgym/docker/docker.sock\n"
    running = processes(short)
    assert script("docker-up", folder=short).stdout == first.stdout
    assert processes(short) == running, "a second engine was started"
    assert script("docker-up", "--stop", folder=short).returncode == 0
    assert processes(short) == []
    assert script("docker-up", "--stop", folder=short).returncode == 0, "stopping what is stopped is no error"
    assert not [line for line in Path("/proc/mounts").read_text().splitlines() if str(short) in line]


def test_a_stale_pid_that_means_another_process_is_neither_believed_nor_killed(installed: None, short: Path) -> None:
    folder = short / ".cache/clawgym/docker"
    folder.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as other:
        try:
            (folder / "dockerd.pid").write_text(str(other.pid))
            assert script("docker-up", "--stop", folder=short).returncode == 0
            assert other.poll() is None
            assert script("docker-up", folder=short).returncode == 0
            assert script("docker-up", "--stop", folder=short).returncode == 0
            assert other.poll() is None
        finally:
            other.kill()
    assert processes(short) == []


def test_a_command_with_docker_has_an_engine_and_leaves_none(installed: None, short: Path) -> None:
    done = script(
        "with-docker", "sh", "-c", 'echo "$DOCKER_HOST"; test -S "${DOCKER_HOST#unix://}" && exit 7', folder=short
    )
    assert done.returncode == 7, done.stderr
    assert done.stdout.startswith(f"unix://{short}/clawgym-docker-")
    assert list(short.iterdir()) == []
    assert processes(short) == []


def test_where_no_engine_can_be_had_the_reason_is_told_and_the_command_runs_without(short: Path) -> None:
    bin_folder = short / "bin"
    bin_folder.mkdir()
    (bin_folder / "id").write_text("#!/bin/sh\necho 1000\n")
    (bin_folder / "id").chmod(0o755)
    path = f"{bin_folder}:{PATH}"
    alone = script("docker-up", folder=short, path=path)
    assert (alone.returncode, alone.stdout) == (1, "")
    assert "Expected root to start an engine" in alone.stderr
    done = script("with-docker", "sh", "-c", 'echo "${DOCKER_HOST-none}"', folder=short, path=path)
    assert (done.returncode, done.stdout) == (0, "none\n")
    assert "Expected root to start an engine" in done.stderr


def test_wrong_arguments_and_too_long_paths_are_refused(short: Path) -> None:
    assert "Expected no argument or --stop, got --up" in script("docker-up", "--up", folder=short).stderr
    deep = short / ("x" * 60)
    deep.mkdir()
    refused = script("docker-up", folder=deep)
    assert refused.returncode == 1
    assert "Set CLAWGYM_DOCKER" in refused.stderr
