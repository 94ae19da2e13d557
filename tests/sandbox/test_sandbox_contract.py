"""What any backend's sandbox must do; the `backend` fixture says which are tried."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import stat
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import WORKDIR, Mount, Sandbox, SandboxBackend, SandboxSpec

InSandbox: TypeAlias = Callable[..., object]

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open("daemon-started", "w").close()
time.sleep(1000)
"""
"""Leaves its session, its process group and its parents."""


async def python(sandbox: Sandbox, code: str, *args: str, timeout_s: float | None = 30) -> str:
    """Run Python inside, expect success, return its output."""
    result = await sandbox.exec(["python3", "-c", code, *args], timeout_s=timeout_s)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def process_names(sandbox: Sandbox) -> list[str]:
    """Return the command lines of the sandbox's processes but the ones that look."""
    code = """
import os
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) not in (os.getpid(), os.getppid()):
        try: print(open(f"/proc/{pid}/cmdline").read().replace("\\0", " ") or open(f"/proc/{pid}/stat").read())
        except OSError: pass
"""
    lines = (await python(sandbox, code)).splitlines()
    return [line for line in lines if "supervisor" not in line and line]


async def until(condition: Callable[[], AsyncIterator[bool]]) -> None:
    """Wait, at most 10 s, until a condition holds."""
    deadline = time.monotonic() + 10
    async for held in condition():
        if held:
            return
        assert time.monotonic() < deadline, "Expected the condition to hold within 10 s."
        await asyncio.sleep(0.02)


def test_a_command_gets_stdin_environment_and_folder(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(
            ["sh", "-c", "cat; echo $A $B; pwd; echo err >&2; exit 3"], env={"B": "two"}, cwd="/tmp", stdin=b"in\n"
        )
        assert (result.exit_code, result.stdout, result.stderr) == (3, b"in\none two\n/tmp\n", b"err\n")
        assert not result.timed_out
        assert result.dropped_bytes == 0
        assert (await sandbox.exec(["pwd"])).stdout.decode().strip() == WORKDIR

    in_sandbox(body, env={"A": "one"})


def test_the_environment_is_clean(in_sandbox: InSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def body(sandbox: Sandbox) -> None:
        lines = (await sandbox.exec(["env"])).stdout.decode().splitlines()
        names = {line.partition("=")[0] for line in lines}
        assert names == {"PATH", "HOME", "LANG", "TERM", "TZ"}
        assert "HOME=/root" in lines

    in_sandbox(body)


def test_a_command_that_cannot_start_answers_as_a_shell_would(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        missing = await sandbox.exec(["no-such-program"])
        assert (missing.exit_code, missing.stderr) == (127, b"no-such-program: No such file or directory\n")
        await sandbox.write_file("plain", b"text")
        assert (await sandbox.exec([f"{WORKDIR}/plain"])).exit_code == 126

    in_sandbox(body)


def test_a_command_killed_by_a_signal_has_a_negative_exit_code(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", "kill -TERM $$"])).exit_code == -15

    in_sandbox(body)


def test_long_arguments_and_much_stdin_pass(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        words = ["x" * 100_000] * 15
        result = await sandbox.exec(["sh", "-c", "echo $#; wc -c", "sh", *words], stdin=bytes(20 << 20))
        assert result.stdout.split() == [b"15", str(20 << 20).encode()]

    in_sandbox(body)


def test_unread_stdin_is_no_error(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["true"], stdin=bytes(5 << 20))).exit_code == 0

    in_sandbox(body)


def test_output_beyond_the_limit_is_dropped_and_counted_without_using_memory(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        tracemalloc.start()
        try:
            result = await sandbox.exec(
                ["sh", "-c", "printf head; head -c 100000000 /dev/zero; printf x >&2"], max_output=1000, timeout_s=60
            )
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert result.exit_code == 0
        assert result.stdout == b"head" + bytes(996)
        assert result.stderr == b"x"
        assert result.dropped_bytes == 100_000_004 - 1000
        assert peak < 16 << 20

    in_sandbox(body)


def test_at_a_timeout_the_whole_tree_dies_daemons_included(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        bystander = asyncio.create_task(sandbox.exec(["sleep", "31"]))
        result = await sandbox.exec(
            [
                "sh",
                "-c",
                'python3 -c "$1"; nohup sleep 1000 & (setsid sleep 1000 &); echo out; sleep 1000',
                "sh",
                DAEMON,
            ],
            timeout_s=1.5,
        )
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"out\n")
        await sandbox.read_file("daemon-started")
        assert await process_names(sandbox) == ["sleep 31 "]
        await sandbox.kill_all()
        assert (await bystander).exit_code == -9

    in_sandbox(body)


def test_a_timeout_that_is_over_at_once_leaves_nothing(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        results = await asyncio.gather(*(sandbox.exec(["sleep", "1000"], timeout_s=0.001) for _ in range(8)))
        assert all(result.timed_out for result in results)
        assert await process_names(sandbox) == []

    in_sandbox(body)


def test_a_cancelled_command_is_killed(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        running = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        async def gone() -> AsyncIterator[bool]:
            while True:
                yield await process_names(sandbox) == []

        await until(gone)

    in_sandbox(body)


def test_a_daemon_outlives_its_command_until_kill_all(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        # It holds the command's stdout and goes on writing to it: neither waited for nor killed by SIGPIPE.
        code = ": > ticks; (while true; do echo tick; echo x >> ticks; sleep 0.01; done) & echo started"
        result = await sandbox.exec(["sh", "-c", code], timeout_s=20)
        assert result.exit_code == 0
        assert not result.timed_out
        before = len(await sandbox.read_file("ticks"))

        async def grown() -> AsyncIterator[bool]:
            while True:
                yield len(await sandbox.read_file("ticks")) > before + 5

        await until(grown)
        await sandbox.kill_all()
        assert await process_names(sandbox) == []
        assert await sandbox.read_file("ticks")

    in_sandbox(body)


def test_the_sandbox_survives_a_process_that_kills_everything(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["bash", "-c", "kill -INT 1; kill -TERM 1; kill -9 1; kill -9 -1"])
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    in_sandbox(body)


def test_a_fork_bomb_stops_at_the_limit_and_is_killed(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        code = """
import os, time
count = 0
try:
    while True:
        if os.fork() == 0: time.sleep(1000)
        count += 1
except BlockingIOError:
    print(count, flush=True)
time.sleep(1000)
"""
        counted = await sandbox.exec(["python3", "-c", code], timeout_s=3)
        assert 20 <= int(counted.stdout) <= 48
        bomb = await sandbox.exec(["bash", "-c", ":(){ :|:& };:; sleep 1000"], timeout_s=1)
        assert bomb.timed_out
        assert await process_names(sandbox) == []

    in_sandbox(body, max_processes=32)


def test_zombies_are_reaped(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", "for i in 1 2 3 4 5; do (setsid sleep 0.1 &); done; sleep 0.01 & exit 0"])

        async def reaped() -> AsyncIterator[bool]:
            while True:
                yield await process_names(sandbox) == []

        await until(reaped)

    in_sandbox(body)


@pytest.mark.parametrize("folder", [WORKDIR, "/tmp", "/dev/shm"])
def test_a_full_disk_says_so(in_sandbox: InSandbox, folder: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", f"head -c 80000000 /dev/zero > {folder}/big"])
        assert b"No space left" in result.stderr
        if folder == WORKDIR:
            with pytest.raises(OSError, match="No space left") as caught:
                await sandbox.write_file("more", bytes(1 << 20))
            assert caught.value.errno == errno.ENOSPC

    in_sandbox(body, disk_mb=16)


def test_memory_is_limited(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["python3", "-c", "x = b'x' * (400 << 20); print(len(x))"])
        assert result.stdout == b""
        assert result.exit_code != 0
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    in_sandbox(body, memory_mb=128)


def test_files_of_any_name_and_content_go_in_and_come_out(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        data = bytes(range(256)) * 5000
        for path in ("a b/ü 漢字.bin", "/tmp/x/'quoted\" $HOME.bin", "-rf", "new\nline"):
            await sandbox.write_file(path, data)
            assert await sandbox.read_file(path) == data
        await sandbox.write_file("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
        assert (await sandbox.exec(["./run.sh"])).stdout == b"ran\n"
        await sandbox.write_file("run.sh", b"")
        assert await sandbox.read_file("run.sh") == b""

    in_sandbox(body)


def test_only_regular_files_of_bounded_size_are_read(in_sandbox: InSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host only")

    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(
            ["sh", "-c", f"mkfifo fifo; ln -s {secret} link; ln -s /dev/zero zero; head -c 1001 /dev/zero > big"]
        )
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("missing")
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file("link")
        for path in ("fifo", "zero", "."):
            with pytest.raises(OSError, match="not a regular file"):
                await sandbox.read_file(path)
        with pytest.raises(OSError, match="larger than 1000 bytes"):
            await sandbox.read_file("big", max_bytes=1000)
        assert len(await sandbox.read_file("big", max_bytes=1001)) == 1001

    in_sandbox(body)


def test_folders_go_in_and_come_out_unchanged(in_sandbox: InSandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty dir").mkdir()
    (source / "deep" / "er" / "dätä.bin").write_bytes(os.urandom(300_000))
    (source / "run.sh").write_text("#!/bin/sh\n")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("deep/er/dätä.bin")
    os.utime(source / "run.sh", (1_000_000_000, 1_000_000_000))

    async def body(sandbox: Sandbox) -> None:
        await sandbox.copy_in(source, f"{WORKDIR}/sub")
        await sandbox.copy_out("sub", target)
        with pytest.raises(FileNotFoundError):
            await sandbox.copy_in(tmp_path / "missing", "sub")

    in_sandbox(body)
    found = {path.relative_to(target) for path in target.rglob("*")}
    assert found == {path.relative_to(source) for path in source.rglob("*")}
    assert (target / "link").read_bytes() == (source / "deep" / "er" / "dätä.bin").read_bytes()
    assert (target / "link").is_symlink()
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o755
    assert (target / "run.sh").stat().st_mtime == 1_000_000_000


def test_nothing_dangerous_comes_out(in_sandbox: InSandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "target"
    script = f"""
mkdir -p d/e; echo ok > good; mkfifo fifo; cp /bin/true suid; chmod 4755 suid
ln -s /etc/passwd out; ln -s ../../.. up; ln -s good inside; ln -s {WORKDIR}/d/../good absolute
ln -s ../.. d/e/top; ln -s d/e/top/../secret hop; truncate -s 1T sparse; python3 -c '
import socket; socket.socket(socket.AF_UNIX).bind("sock")'
"""

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", script])).exit_code == 0
        await sandbox.copy_out(WORKDIR, target)

    in_sandbox(body)
    found = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert found == {"d", "d/e", "d/e/top", "good", "suid", "inside", "absolute"}
    assert stat.S_IMODE((target / "suid").stat().st_mode) == 0o755
    assert (target / "absolute").read_text() == "ok\n"
    assert not os.readlink(target / "absolute").startswith("/")
    assert "Left 1 files" in caplog.text


@pytest.mark.parametrize(
    ("script", "left"),
    [
        (f"cd /; rm -rf {WORKDIR}", set()),
        (f"cd /; rm -rf {WORKDIR}; echo x > {WORKDIR}", set()),
        (f"cd /; rm -rf {WORKDIR}; ln -s {WORKDIR} {WORKDIR}", set()),
        ("mkdir d; touch d/f; chmod 000 d/f d . /root/.openclaw /root", {"d", "d/f"}),
        ("mkdir d; touch d/f; chmod 400 d", {"d", "d/f"}),
        ('python3 -c \'import os\nfor i in range(60): os.mkdir("a" * 200); os.chdir("a" * 200)\'', None),
        ('python3 -c \'import os\nfor i in range(3000): os.mkdir("a"); os.chdir("a")\'', None),
        ("ln -s $(head -c 4000 /dev/zero | tr '\\0' x) link; touch f", {"f"}),
    ],
)
def test_whatever_an_agent_does_to_its_workspace_it_comes_out(
    in_sandbox: InSandbox, tmp_path: Path, script: str, left: set[str] | None
) -> None:
    target = tmp_path / "target"

    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", script])).exit_code == 0
        await sandbox.kill_all()
        await sandbox.copy_out(WORKDIR, target)

    in_sandbox(body)
    found = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert found == left or (left is None and found)
    assert all(path.read_bytes() == b"" for path in target.rglob("f"))
    shutil.rmtree(target)


@pytest.mark.parametrize(
    "script",
    [
        "truncate -s 8M a b",
        "head -c 14M /dev/zero > a; head -c 1900K /dev/zero > b",
        'python3 -c \'for i in range(3900): open(str(i), "w").write("x")\'',
    ],
)
def test_what_comes_out_fits_into_a_fresh_sandbox_with_room_to_spare(
    backend: SandboxBackend, tmp_path: Path, script: str
) -> None:
    async def main() -> None:
        spec = SandboxSpec(disk_mb=16)
        full, fresh = await backend.open(spec), await backend.open(spec)
        try:
            assert (await full.exec(["sh", "-c", script])).exit_code == 0
            await full.copy_out(WORKDIR, tmp_path / "target")
            await fresh.copy_in(tmp_path / "target", WORKDIR)
            await fresh.write_file("hidden", bytes(3 << 19))
        finally:
            await asyncio.gather(full.close(), fresh.close())

    asyncio.run(main())
    assert any((tmp_path / "target").iterdir())


def test_a_written_file_replaces_a_link(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["sh", "-c", "echo old > other; ln -s other link"])
        await sandbox.write_file("link", b"new")
        assert await sandbox.read_file("other") == b"old\n"
        assert await sandbox.read_file("link") == b"new"

    in_sandbox(body)


def test_the_host_is_invisible(in_sandbox: InSandbox, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        for path in (
            tmp_path,
            Path(__file__),
            Path.home() / ".bashrc",
            Path("/etc/ssl/private"),
            Path("/etc/shadow"),
            Path("/etc/machine-id"),
        ):
            assert (await sandbox.exec(["ls", str(path)])).exit_code != 0, path
        assert (await sandbox.exec(["ls", "/tmp", "/home", "/opt"])).stdout.split() == [b"/home:", b"/opt:", b"/tmp:"]
        host_name = socket.gethostname()
        assert (await sandbox.exec(["hostname"])).stdout.decode().strip() == "sandbox" != host_name
        pids = [
            line for line in (await python(sandbox, "import os; print(*os.listdir('/proc'))")).split() if line.isdigit()
        ]
        assert len(pids) <= 4
        refused = await sandbox.exec(
            ["sh", "-c", "touch /x /usr/x /etc/x /run/x /dev/x; echo 1 > /proc/sys/kernel/core_pattern"]
        )
        assert refused.stderr.count(b"Read-only file system") == 6

    in_sandbox(body)


def test_every_sandbox_looks_the_same(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        return (
            await sandbox.exec(["sh", "-c", "id; pwd; hostname; env; ls -a / /etc /root; cat /etc/passwd /etc/hosts"])
        ).stdout

    assert in_sandbox(body) == in_sandbox(body)


def test_mounts_are_read_only_and_must_exist(in_sandbox: InSandbox, tmp_path: Path) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "file").write_text("content")
    mounts = [
        {"source": tmp_path / "tool", "target": "/opt/tool"},
        {"source": tmp_path / "tool" / "file", "target": "/root/f"},
    ]

    async def body(sandbox: Sandbox) -> None:
        assert await sandbox.read_file("/opt/tool/file") == await sandbox.read_file("/root/f") == b"content"
        assert (await sandbox.exec(["touch", "/opt/tool/file"])).exit_code != 0

    in_sandbox(body, mounts=mounts)
    for mount in (Mount(source=tmp_path / "nothing", target="/opt/x"), Mount(source=tmp_path, target="/opt/../usr")):
        with pytest.raises(SandboxError, match="Expected"):
            in_sandbox(body, mounts=[mount])


def test_a_workdir_outside_home_is_writable(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("x", b"1")
        assert (await sandbox.exec(["sh", "-c", "pwd; ls"])).stdout == b"/srv/task\nx\n"

    in_sandbox(body, workdir="/srv/task")


def test_there_is_no_way_to_more_privilege(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        status = dict(
            line.split(":\t", 1)
            for line in (await sandbox.read_file("/proc/self/status")).decode().splitlines()
            if ":\t" in line
        )
        assert {status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for command in (
            "unshare -U true",
            "unshare -m true",
            "unshare -n true",
            "mount -t tmpfs none /tmp",
            "chroot / true",
        ):
            assert (await sandbox.exec(["sh", "-c", command])).exit_code != 0, command
        code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (101, 310, 321, 323, 425, 435, 438):
    ctypes.set_errno(0)
    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())
"""
        if os.uname().machine == "x86_64":
            lines = (await python(sandbox, code)).splitlines()
            assert lines == ["-1 1"] * 5 + ["-1 38", "-1 1", "-1 1"]
        watched = await sandbox.exec(["sh", "-c", "cat /proc/1/environ; cat /proc/1/mem; cat /proc/1/fd/2"])
        assert watched.stderr.count(b"ermission denied") == 3

    in_sandbox(body)


def test_no_address_of_the_host_is_reachable(in_sandbox: InSandbox) -> None:
    loopback, everywhere = socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0))
    with contextlib.closing(loopback), contextlib.closing(everywhere), socket.socket(type=socket.SOCK_DGRAM) as probe:
        with contextlib.suppress(OSError):
            probe.connect(("10.255.255.255", 1))
        own_address = probe.getsockname()[0]
        ports = [listener.getsockname()[1] for listener in (loopback, everywhere)]
        code = """
import socket, sys
for family in (40, 38):
    try: socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_SEQPACKET); print("opened")
    except OSError as error: print(error.errno)
for address in ("127.0.0.1", sys.argv[1]):
    for port in sys.argv[2:]:
        try: socket.create_connection((address, int(port)), 1); print("connected")
        except OSError: print("refused")
"""

        async def body(sandbox: Sandbox) -> None:
            out = await python(sandbox, code, own_address, *map(str, ports))
            assert out.split() == [str(errno.EAFNOSUPPORT)] * 2 + ["refused"] * 4

        in_sandbox(body)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
    await writer.drain()
    writer.close()


def test_a_listener_inside_is_served_by_the_host(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        listener = await sandbox.listen(8123)
        with pytest.raises(OSError, match="in use"):
            await sandbox.listen(8123)
        server = await asyncio.start_server(_answer, sock=listener)
        async with server:
            code = "import urllib.request as u; print(u.urlopen('http://localhost:8123/x').read().decode())"
            assert await python(sandbox, code) == "hello\n"
        with socket.socket() as outside:
            assert outside.connect_ex(("127.0.0.1", 8123)) != 0

    in_sandbox(body)


def test_two_sandboxes_can_listen_on_one_port_and_do_not_meet(backend: SandboxBackend) -> None:
    async def main() -> None:
        first, second = await asyncio.gather(*(backend.open(SandboxSpec()) for _ in range(2)))
        try:
            listeners = [await sandbox.listen(8080) for sandbox in (first, second)]
            async with await asyncio.start_server(_answer, sock=listeners[0]):
                listeners[1].close()
                code = "import urllib.request as u; u.urlopen('http://127.0.0.1:8080/')"
                assert (await first.exec(["python3", "-c", code])).exit_code == 0
                assert (await second.exec(["python3", "-c", code])).exit_code == 1
        finally:
            await asyncio.gather(first.close(), second.close())

    asyncio.run(main())


def test_thirty_two_at_once(backend: SandboxBackend) -> None:
    async def one(index: int) -> bytes:
        sandbox = await backend.open(SandboxSpec())
        try:
            await sandbox.write_file("index", str(index).encode())
            results = await asyncio.gather(*(sandbox.exec(["cat", "index"]) for _ in range(3)))
            assert len({result.stdout for result in results}) == 1
            return results[0].stdout
        finally:
            await sandbox.close()

    async def main() -> list[bytes]:
        return await asyncio.gather(*map(one, range(32)))

    assert asyncio.run(main()) == [str(index).encode() for index in range(32)]


def test_close_is_idempotent_shielded_and_ends_what_runs(backend: SandboxBackend) -> None:
    async def main() -> None:
        sandbox = await backend.open(SandboxSpec())
        running = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
        await asyncio.sleep(0.1)
        closing = asyncio.create_task(sandbox.close())
        await asyncio.sleep(0)
        closing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await closing
        await asyncio.gather(sandbox.close(), sandbox.close())
        with pytest.raises(SandboxError):
            await running
        for action in (sandbox.exec(["true"]), sandbox.kill_all(), sandbox.read_file("x"), sandbox.listen(80)):
            with pytest.raises(SandboxError):
                await action

    asyncio.run(main())
