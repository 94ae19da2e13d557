"""What only the Docker backend promises: hardened containers that the engine forgets, whoever dies first."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker
import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import supervised
from clawgym_env.sandbox.base import Image, Mount, SandboxSpec
from clawgym_env.sandbox.docker import DockerBackend, DockerSandbox
from clawgym_env.sandbox.docker_spec import DEADLINE, OWNER

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def client(docker_host: str) -> Iterator[docker.DockerClient]:
    client = docker.DockerClient(docker_host)
    yield client
    client.close()


@pytest.fixture
def backend(docker_host: str) -> DockerBackend:
    return DockerBackend(url=docker_host)


@pytest.fixture
def folders(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this test a folder for temporary files of its own, with a path far too long for a socket's."""
    folder = tmp_path_factory.mktemp("x" * 120)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def inspect(client: docker.DockerClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = client.api.inspect_container(name)
    return found


def names(client: docker.DockerClient, owner: int) -> list[str]:
    """Return the containers of one controller; other tests may share the engine."""
    found = client.api.containers(all=True, filters={"label": OWNER})
    return [entry["Names"][0] for entry in found if entry["Labels"][OWNER].startswith(f"{owner}-")]


def leftover(client: docker.DockerClient, like: str, name: str, labels: dict[str, str]) -> None:
    """Make a container of the image of another, that carries these labels."""
    image = inspect(client, like)["Image"]
    client.containers.create(image, ["true"], name=name, labels=labels, network_mode="none")


INSIDE = """
import errno, json, os, socket
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
def refusal(call):
    try:
        call()
        return "allowed"
    except OSError as error:
        return errno.errorcode[error.errno]
found = {key: status[key].strip() for key in ("CapEff", "CapBnd", "CapPrm", "NoNewPrivs", "Seccomp")}
found["vsock"] = refusal(lambda: socket.socket(40, socket.SOCK_STREAM))
found["alg"] = refusal(lambda: socket.socket(38, socket.SOCK_SEQPACKET))
found["root"] = refusal(lambda: open("/x", "w"))
found["usr"] = refusal(lambda: open("/usr/x", "w"))
found["supervisor"] = refusal(lambda: open("/run/clawgym/supervisor.py", "a"))
found["its memory"] = refusal(lambda: open("/proc/1/mem", "rb"))
found["its files"] = refusal(lambda: open("/proc/1/fd/0", "rb"))
found["cgroup"] = refusal(lambda: open("/sys/fs/cgroup/x", "w"))
found["socket folder"] = os.listdir("/run/clawgym/host")
found["plant there"] = refusal(lambda: open("/run/clawgym/host/x", "w"))
found["links"] = os.listdir("/sys/class/net")
found["resolvers"] = set(open("/etc/resolv.conf").read().split()) <= {"nameserver", "127.0.0.1"}
found["devices"] = refusal(lambda: os.mknod("/tmp/device", 0o60666, os.makedev(254, 0)))
print(json.dumps(found))
"""
SYSCALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
numbers = {"unshare": 272, "mount": 165, "ptrace": 101, "bpf": 321, "keyctl": 250, "io_uring_setup": 425, "clone3": 435}
for name, number in numbers.items():
    libc.syscall(number, 0x10000000, 0, 0, 0)
    print(name, errno.errorcode[ctypes.get_errno()])
for bit in (17, 25, 26, 27, 28, 29, 30):
    libc.syscall(56, 1 << bit, 0, 0, 0, 0)
    print("clone", errno.errorcode[ctypes.get_errno()])
libc.syscall.argtypes = [ctypes.c_long] * 4
libc.syscall(41, 40 | 7 << 32, 1, 0)
print("vsock", errno.errorcode[ctypes.get_errno()])
"""


def test_from_inside_a_container_is_hardened(backend: DockerBackend) -> None:
    async def main() -> dict[str, object]:
        async with await backend.open(SandboxSpec()) as sandbox:
            result = await sandbox.exec(["python3", "-c", INSIDE])
            assert result.exit_code == 0, result
            found: dict[str, object] = json.loads(result.stdout)
            return found

    assert asyncio.run(main()) == {
        "CapEff": "0" * 16,
        "CapBnd": "0" * 16,
        "CapPrm": "0" * 16,
        "NoNewPrivs": "1",
        "Seccomp": "2",
        "vsock": "EAFNOSUPPORT",
        "alg": "EAFNOSUPPORT",
        "root": "EROFS",
        "usr": "EROFS",
        "supervisor": "EROFS",
        "its memory": "EACCES",
        "its files": "EACCES",
        "cgroup": "EROFS",
        "socket folder": [],
        "plant there": "ENOENT",
        "links": ["lo"],
        "resolvers": True,
        "devices": "EPERM",
    }


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are those of x86_64")
def test_the_engine_applies_our_table_of_system_calls(backend: DockerBackend) -> None:
    async def main() -> list[str]:
        async with await backend.open(SandboxSpec()) as sandbox:
            result = await sandbox.exec(["python3", "-c", SYSCALLS])
            assert result.exit_code == 0, result
            return result.stdout.decode().splitlines()

    denied = ["unshare", "mount", "ptrace", "bpf", "keyctl", "io_uring_setup"]
    expected = [f"{name} EPERM" for name in denied] + ["clone3 ENOSYS"] + ["clone EPERM"] * 7 + ["vsock EAFNOSUPPORT"]
    assert asyncio.run(main()) == expected


def test_a_container_carries_its_limits_and_says_whose_it_is(
    backend: DockerBackend, client: docker.DockerClient, folders: Path
) -> None:
    async def main() -> None:
        spec = SandboxSpec(memory_mb=256, max_processes=32, cpus=0.5, lifetime_s=100)
        async with await backend.open(spec) as sandbox:
            found = inspect(client, sandbox.container)
            assert os.listdir(folders) == []
            labels, host = found["Config"]["Labels"], found["HostConfig"]
            assert labels[OWNER].startswith(f"{os.getpid()}-")
            assert 0 < int(labels[DEADLINE]) - time.time() <= 100
            assert host["Memory"] == host["MemorySwap"] == (256 + 2 * spec.disk_mb + 64) << 20
            assert 32 <= host["PidsLimit"] <= 48
            assert (host["CpuQuota"], host["CpuPeriod"]) == (50_000, 100_000)
            assert host["AutoRemove"]
        with pytest.raises(docker.errors.NotFound):
            inspect(client, sandbox.container)

    asyncio.run(main())


def test_a_sandbox_ends_by_itself_after_its_lifetime(backend: DockerBackend, client: docker.DockerClient) -> None:
    async def main() -> None:
        async with await backend.open(SandboxSpec(lifetime_s=1.5)) as sandbox:
            # A signal from inside does not end it sooner.
            assert (await sandbox.exec(["sh", "-c", "kill -ALRM 1; echo alive"])).stdout == b"alive\n"
            with pytest.raises(SandboxError):
                await sandbox.exec(["sleep", "1000"], timeout_s=60)
            for _ in range(500):
                if sandbox.container not in str(names(client, os.getpid())):
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("Expected the engine to remove a container that ended by itself.")

    asyncio.run(main())


CONTROLLER = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.docker import DockerBackend

async def main():
    backend = DockerBackend(url=sys.argv[2])
    sandbox = await backend.open(SandboxSpec())
    await sandbox.exec(["sh", "-c", "(setsid sh -c 'setsid sleep 1000 & sleep 1000' &)"])
    print("open", flush=True)
    await asyncio.gather(*(backend.open(SandboxSpec()) for _ in range(2)))
    print("all open", flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize("in_the_middle", [False, True])
def test_nothing_outlives_a_killed_controller(
    docker_host: str, client: docker.DockerClient, *, in_the_middle: bool
) -> None:
    command = [sys.executable, "-c", CONTROLLER, str(REPOSITORY), docker_host]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        assert controller.stdout.readline() == "open\n"
        if in_the_middle:
            time.sleep(0.15)  # two more containers are being made
        else:
            assert controller.stdout.readline() == "all open\n"
            assert len(names(client, controller.pid)) == 3
        controller.kill()
        controller.wait()
    deadline = time.monotonic() + 30
    while names(client, controller.pid):
        assert time.monotonic() < deadline, "Expected no container of a controller that was killed."
        if in_the_middle:  # one that was created but not started is left to the reaper
            asyncio.run(DockerBackend(url=docker_host).reap())
        time.sleep(0.05)


def test_the_reaper_takes_what_is_dead_or_too_old_and_nothing_else(
    backend: DockerBackend, client: docker.DockerClient, folders: Path
) -> None:
    code = "from clawgym_env.ownership import owner_tag; print(owner_tag())"
    dead = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    (folders / f"clawgym-docker-{dead}-x").mkdir()
    elsewhere = f"{dead.rsplit('-', 1)[0]}-00000000.1"
    soon, past = str(int(time.time()) + 600), str(int(time.time()) - 1)

    async def main() -> None:
        async with await backend.open(SandboxSpec()) as sandbox:
            mark = sandbox.container
            leftover(client, mark, f"{mark}-dead", {OWNER: dead, DEADLINE: soon})
            leftover(client, mark, f"{mark}-old", {OWNER: elsewhere, DEADLINE: past})
            leftover(client, mark, f"{mark}-elsewhere", {OWNER: elsewhere, DEADLINE: soon})
            leftover(client, mark, f"{mark}-foreign", {"someone": "else"})
            expected = {f"{mark}-dead", f"{mark}-old", str(folders / f"clawgym-docker-{dead}-x")}
            try:
                assert expected <= set(await backend.reap(dry_run=True))
                assert expected <= set(await backend.reap())
                assert not expected & set(await backend.reap())
                left = {found["Names"][0][1:] for found in client.api.containers(all=True)}
                assert {name for name in left if name.startswith(mark)} == {
                    mark,
                    f"{mark}-elsewhere",
                    f"{mark}-foreign",
                }
                assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"
            finally:
                for kind in ("elsewhere", "foreign"):
                    client.api.remove_container(f"{mark}-{kind}", force=True)

    asyncio.run(main())


def test_a_cancelled_open_leaves_nothing(backend: DockerBackend, client: docker.DockerClient, folders: Path) -> None:
    async def main() -> None:
        await backend.reap()  # connects
        for delay in (0.0, 0.01, 0.1, 0.3):
            opening = asyncio.create_task(backend.open(SandboxSpec()))
            await asyncio.sleep(delay)
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await (await opening).close()  # a fast machine had it open by then
            assert names(client, os.getpid()) == []
            assert os.listdir(folders) == []

    asyncio.run(main())


def test_open_and_close_leave_no_descriptor_open(backend: DockerBackend) -> None:
    async def main() -> None:
        counts = []
        for _ in range(3):
            async with await backend.open(SandboxSpec()) as sandbox:
                await sandbox.exec(["sh", "-c", "sleep 1000 &"])
                (await sandbox.listen(8080)).close()
            counts.append(len(os.listdir("/proc/self/fd")))
        assert counts[0] == counts[1] == counts[2]

    asyncio.run(main())


def test_a_container_that_someone_removes_is_an_error_and_closes(
    backend: DockerBackend, client: docker.DockerClient
) -> None:
    async def main() -> None:
        sandbox = await backend.open(SandboxSpec())
        client.api.remove_container(sandbox.container, force=True)
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        await sandbox.close()

    asyncio.run(main())


def built(path: Path, *lines: str, programs: Sequence[str] = ("/bin/sh",)) -> Path:
    """Write a folder whose image holds programs of this machine and nothing else but what `lines` add."""
    listed = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    for file in {*programs, *re.findall(r"(/\S+) \(", listed)}:
        target = path / "root" / file[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, target)
    (path / "Dockerfile").write_text("\n".join(["FROM scratch", "COPY root /", *lines]))
    return path


def test_an_image_needs_no_python_and_keeps_its_own_environment(backend: DockerBackend, tmp_path: Path) -> None:
    image = Image(build=built(tmp_path, "ENV PATH=/own:/bin TOOL=own HOME=/else", "USER 1000", "VOLUME /data"))

    async def main() -> None:
        spec = SandboxSpec(image=image, folders=("/logs", "/root/deep/er"), env={"TASK": "mine"})
        async with await backend.open(spec) as sandbox:
            result = await sandbox.exec(["sh", "-c", "pwd; echo $PATH $TOOL $HOME $TASK; [ -O /root ] && echo owner"])
            assert result.stdout.decode().splitlines() == [spec.workdir, "/own:/bin own /root mine", "owner"]
            assert (await sandbox.exec(["python3"])).exit_code == 127
            for folder in ("/logs", "/root/deep/er", "/tmp", "/var/tmp", spec.workdir):
                await sandbox.write_file(f"{folder}/file", b"data")
            with pytest.raises(OSError, match="Read-only"):
                await sandbox.write_file("/opt/file", b"data")

    asyncio.run(main())


def test_a_writable_image_shows_what_it_brings_and_takes_what_is_written_anywhere(
    backend: DockerBackend, tmp_path: Path
) -> None:
    image = Image(build=built(tmp_path, "COPY Dockerfile /root/.openclaw/workspace/brought"), writable=True)

    async def main() -> None:
        spec = SandboxSpec(image=image, folders=("/logs",), disk_mb=16)
        async with await backend.open(spec) as sandbox:
            assert (await sandbox.read_file("brought")).startswith(b"FROM")
            for path in ("/opt/deep/file", "/logs/file", "file"):
                await sandbox.write_file(path, b"data")
            with pytest.raises(OSError, match="too large"):
                await sandbox.write_file("/opt/big", bytes(17 << 20))
        async with await backend.open(spec) as sandbox:
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file("/opt/deep/file")

    asyncio.run(main())


def test_what_an_agent_puts_in_the_place_of_our_code_is_never_loaded(backend: DockerBackend, tmp_path: Path) -> None:
    """A folder of a writable file system can be moved away, mounts below and all."""
    image = Image(build=built(tmp_path / "image", programs=("/bin/sh", "/bin/mv")), writable=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "expected.txt").write_text("42")
    plant = (
        "for module in folder_stream warnings stat posixpath; do echo 'print(1.0)' > /planted/$module.py; done; "
        "mv /run/clawgym /run/old && mv /planted /run/clawgym"
    )

    async def main() -> tuple[bytes, bytes]:
        spec = SandboxSpec(image=image, folders=("/planted",))
        async with await backend.open(spec) as sandbox:
            moved = await sandbox.exec(["sh", "-c", plant])
            assert moved.exit_code == 0, moved
            await sandbox.kill_all()
            await sandbox.copy_in(tmp_path / "secret", "reward")
            return await sandbox.read_file("reward/expected.txt"), (await sandbox.exec(["sh", "-c", ":"])).stdout

    assert asyncio.run(main()) == (b"42", b"")


@pytest.mark.parametrize("step", ["exec", "kill_all", "listen", "copy_out"])
def test_a_frozen_container_is_an_error_and_closes(
    backend: DockerBackend, client: docker.DockerClient, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "KILL_TIMEOUT_S", 0.2)
    monkeypatch.setattr(supervised, "_COPY_TIMEOUT_S", 0.2)
    steps: dict[str, Callable[[DockerSandbox], Awaitable[object]]] = {
        "exec": lambda sandbox: sandbox.exec(["true"], timeout_s=0.2),
        "kill_all": lambda sandbox: sandbox.kill_all(),
        "listen": lambda sandbox: sandbox.listen(8080),
        "copy_out": lambda sandbox: sandbox.copy_out(".", tmp_path / "out"),
    }

    async def main() -> None:
        async with await backend.open(SandboxSpec()) as sandbox:
            client.api.pause(sandbox.container)
            async with asyncio.timeout(20):
                with pytest.raises(SandboxError, match="got none"):
                    await steps[step](sandbox)
        with pytest.raises(docker.errors.NotFound):
            inspect(client, sandbox.container)

    asyncio.run(main())


def test_the_backend_may_have_an_image_for_tasks_that_bring_none(docker_host: str, tmp_path: Path) -> None:
    image = Image(build=built(tmp_path, "ENV MINE=1"))

    async def main() -> bytes:
        async with await DockerBackend(url=docker_host, image=image).open(SandboxSpec()) as sandbox:
            return (await sandbox.exec(["sh", "-c", "echo $MINE"])).stdout

    assert asyncio.run(main()) == b"1\n"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (SandboxSpec(workdir="relative"), "absolute path"),
        (SandboxSpec(folders=("/logs/../etc",)), "absolute path"),
        (SandboxSpec(mounts=(Mount(source=Path("/nonexistent"), target="/x"),)), "/nonexistent to exist"),
        (SandboxSpec(image=Image(name="clawgym.invalid/none:1")), "registry"),
    ],
)
def test_a_spec_that_cannot_be_met_is_an_error_and_leaves_nothing(
    backend: DockerBackend, client: docker.DockerClient, folders: Path, spec: SandboxSpec, words: str
) -> None:
    with pytest.raises(SandboxError, match=words):
        asyncio.run(backend.open(spec))
    assert os.listdir(folders) == []
    assert names(client, os.getpid()) == []


def test_a_folder_that_cannot_be_made_is_an_error(backend: DockerBackend, tmp_path: Path) -> None:
    spec = SandboxSpec(image=Image(build=built(tmp_path), writable=True), folders=("/bin/sh/deep",))
    with pytest.raises(SandboxError, match="folders of the sandbox to be made, got: Not a directory"):
        asyncio.run(backend.open(spec))


def test_an_engine_that_refuses_is_quoted(docker_host: str, client: docker.DockerClient) -> None:
    with pytest.raises(SandboxError, match="no-such-runtime"):
        asyncio.run(DockerBackend(url=docker_host, runtime="no-such-runtime").open(SandboxSpec()))
    assert names(client, os.getpid()) == []


def test_without_an_engine_there_is_the_next_step_and_nothing_to_reap(tmp_path: Path) -> None:
    backend = DockerBackend(url=f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match=r"none\.sock.*scripts/docker-up"):
        asyncio.run(backend.open(SandboxSpec()))
    assert asyncio.run(backend.reap()) == []


def test_an_engine_elsewhere_is_refused() -> None:
    with pytest.raises(SandboxError, match="on this machine"):
        asyncio.run(DockerBackend(url="tcp://127.0.0.1:2375").open(SandboxSpec()))


def test_without_the_package_there_is_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == "docker" or name.startswith("docker.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("clawgym_env.sandbox.docker_engine", "clawgym_env.sandbox.images"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "docker", None)
    opening: Callable[[], object] = lambda: asyncio.run(DockerBackend().open(SandboxSpec()))  # noqa: E731
    with pytest.raises(SandboxError, match=r"pip install 'clawgym\[docker\]'"):
        opening()
    assert asyncio.run(DockerBackend().reap()) == []
