"""Contract of backends with limits: memory, processes, processors and disk, each as strong as `Capabilities` says."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from contract import WALLED, WITHOUT_GROUPS, InSandbox, count, python, unique

from clawgym_env.sandbox.base import WORKDIR, Sandbox, SandboxBackend
from clawgym_env.sandbox.limits import ControlGroups

with_limits = pytest.mark.parametrize("backend", [*WALLED, WITHOUT_GROUPS], indirect=True)

FORK = """
import os, sys, time
count = 0
try:
    while count < 100:
        if os.fork() == 0: time.sleep(float(sys.argv[1]))
        count += 1
except BlockingIOError: pass
print(count, flush=True)
time.sleep(float(sys.argv[1]))
"""


@with_limits
def test_a_backend_states_what_its_limits_mean(request: pytest.FixtureRequest, backend: SandboxBackend) -> None:
    stated = backend.capabilities
    weaker = {"local-as-user": ("process", "namespace", "none"), WITHOUT_GROUPS: ("process", "none", "none")}
    name = request.node.callspec.params["backend"]
    if name == "local" and ControlGroups.find() is None:
        name = WITHOUT_GROUPS
    expected = weaker.get(name, ("tree", "tree", "tree"))
    assert (stated.memory, stated.processes, stated.cpus) == expected


@with_limits
def test_processes_are_limited_and_too_many_of_them_can_be_killed(
    in_sandbox: InSandbox, backend: SandboxBackend
) -> None:
    async def body(sandbox: Sandbox) -> None:
        word = unique()
        forks = await sandbox.exec(["python3", "-c", FORK, word], timeout_s=3)
        if backend.capabilities.processes == "none":
            assert int(forks.stdout) == 100
        else:
            assert 20 <= int(forks.stdout) <= 48
        assert await count(sandbox, word) == 0

    in_sandbox(body, max_processes=32)


def test_a_fork_bomb_is_killed_and_its_sandbox_lives(in_sandbox: InSandbox, backend: SandboxBackend) -> None:
    assert backend.capabilities.processes != "none"

    async def body(sandbox: Sandbox) -> None:
        word = unique()
        bomb = await sandbox.exec(["bash", "-c", ":(){ :|:& };:; sleep $0", word], timeout_s=1)
        assert bomb.timed_out
        assert await count(sandbox, word) == 0
        # A bomb that goes off unattended: nobody waits for it.
        left = await sandbox.exec(["bash", "-c", "(:(){ :|:& };:) >/dev/null 2>&1 & exit 0"], timeout_s=10)
        assert not left.timed_out
        await sandbox.kill_all()
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    in_sandbox(body, max_processes=32)


def test_a_sandbox_full_of_processes_can_be_closed(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        bomb = asyncio.create_task(sandbox.exec(["bash", "-c", ":(){ :|:& };:; sleep 1000"]))
        await asyncio.sleep(0.5)
        bomb.cancel()

    in_sandbox(body, max_processes=32)


@with_limits
def test_memory_is_limited_and_the_sandbox_lives(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", "x = b'x' * (400 << 20); print(len(x))"])
        assert result.stdout == b""
        assert result.exit_code != 0
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    in_sandbox(body, memory_mb=128, disk_mb=16)


@with_limits
def test_memory_is_limited_for_the_tree_where_that_is_promised(in_sandbox: InSandbox, backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> None:
        hog = "x = b'x' * (80 << 20); print('fits', flush=True); import time; time.sleep(3)"
        results = await asyncio.gather(*(sandbox.exec(["python3", "-c", hog]) for _ in range(4)))
        survivors = [result for result in results if result.exit_code == 0]
        assert len(survivors) == 4 if backend.capabilities.memory == "process" else len(survivors) < 4
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    in_sandbox(body, memory_mb=160, disk_mb=16)


def test_full_disks_leave_processes_their_memory(in_sandbox: InSandbox, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        fill = 'for folder in "$@"; do head -c 300000000 /dev/zero > $folder/big; done 2>/dev/null; echo filled'
        result = await sandbox.exec(["sh", "-c", fill, "sh", "/tmp", "/dev/shm", "/logs", "."])
        assert result.stdout == b"filled\n"
        assert await python(sandbox, "print(len(b'x' * (30 << 20)))") == f"{30 << 20}\n"
        await sandbox.copy_out("/logs", tmp_path)

    in_sandbox(body, memory_mb=100, disk_mb=100, folders=("/logs",))


@with_limits
def test_processors_are_limited_where_that_is_promised(in_sandbox: InSandbox, backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> None:
        code = "import time; start = time.time()\nwhile time.process_time() < 0.3: pass\nprint(time.time() - start)"
        elapsed = float(await python(sandbox, code))
        # Without the promise nothing is known: a busy machine is slow as well.
        assert backend.capabilities.cpus == "none" or elapsed > 0.8

    in_sandbox(body, cpus=0.25)


@pytest.mark.parametrize("folder", [WORKDIR, "/tmp", "/dev/shm"])
def test_a_full_disk_says_so_and_what_lies_on_it_comes_out(in_sandbox: InSandbox, tmp_path: Path, folder: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file(f"{folder}/small", b"kept")
        result = await sandbox.exec(["sh", "-c", f"head -c 80000000 /dev/zero > {folder}/big"])
        assert b"No space left" in result.stderr
        if folder != "/dev/shm":
            with pytest.raises(OSError, match="No space left") as caught:
                await sandbox.write_file(f"{folder}/more", bytes(1 << 20))
            assert caught.value.errno == errno.ENOSPC
        await sandbox.copy_out(folder, tmp_path / "target")

    in_sandbox(body, disk_mb=16)
    assert (tmp_path / "target" / "small").read_bytes() == b"kept"


def test_home_and_tmp_are_full_apart_from_each_other(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", "head -c 80000000 /dev/zero > /tmp/big"])
        await sandbox.write_file("room", bytes(8 << 20))
        assert len(await sandbox.read_file("room")) == 8 << 20

    in_sandbox(body, disk_mb=16)


def test_a_copy_in_that_does_not_fit_says_so(in_sandbox: InSandbox, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(20 << 20))

    async def body(sandbox: Sandbox) -> None:
        with pytest.raises(OSError, match="No space left"):
            await sandbox.copy_in(tmp_path, WORKDIR)
        assert (await sandbox.exec(["rm", "big"])).exit_code == 0
        await sandbox.write_file("small", b"fits")

    in_sandbox(body, disk_mb=16)
