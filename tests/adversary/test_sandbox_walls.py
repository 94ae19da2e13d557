"""No system call, file or signal leads an agent out of its sandbox or to the process that watches it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from arena import attempts, inside

from clawgym_env.sandbox.base import Sandbox, SandboxBackend

REFUSED = {
    "vsock, which reaches the hypervisor": "socket.socket(40, socket.SOCK_STREAM)",
    "the kernel's crypto sockets": "socket.socket(38, 5)",
    "raw sockets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "packet sockets": "socket.socket(17, socket.SOCK_RAW, 3)",
    "io_uring": "return call(425, 8, ctypes.create_string_buffer(120))",
    "a user namespace": "return call(272, 0x10000000)",
    "a mount namespace": "return call(272, 0x00020000)",
    "a network namespace by clone": "return call(56, 0x40000000 | 17, 0, 0, 0, 0)",
    "a mount": "return call(165, b'none', b'/tmp', b'tmpfs', 0, None)",
    "an unmount": "return call(166, b'/proc', 2)",
    "a mount by the new calls": "return call(430, b'tmpfs', 0)",
    "pivot_root": "return call(155, b'/tmp', b'/tmp')",
    "chroot": "os.chroot('/tmp')",
    "a namespace of the first process": "return call(308, os.open('/proc/1/ns/mnt', os.O_RDONLY), 0)",
    "ptrace of the first process": "return call(101, 16, 1, 0, 0)",
    "reading its memory": "return open('/proc/1/mem', 'rb').read(1)",
    "reading its memory by a call": "b = ctypes.create_string_buffer(16); return call(310, 1, b, 1, b, 1, 0)",
    "its descriptors": "return [os.readlink(f'/proc/1/fd/{fd}') for fd in os.listdir('/proc/1/fd')]",
    "its control socket": "return os.open('/proc/1/fd/3', os.O_RDWR)",
    "its environment": "return open('/proc/1/environ').read()",
    "its root folder": "return os.listdir('/proc/1/root')",
    "its descriptors by pidfd_getfd": "return call(438, os.pidfd_open(1), 0, 0)",
    "bpf": "return call(321, 0, ctypes.create_string_buffer(64), 64)",
    "perf events": "return call(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)",
    "keys of the host": "return call(250, 0, -3, 0)",
    "userfaultfd": "return call(323, 0)",
    "files by handle": "return call(304, -100, ctypes.create_string_buffer(64), 0)",
    "loading a kernel module": "return call(313, 0, b'', 0)",
    "a reboot": "return call(169, 0xFEE1DEAD, 672274793, 0, None)",
    "the clock": "time = ctypes.create_string_buffer(16); return call(227, 0, time)",
    "the host's name": "socket.sethostname('other')",
    "kernel settings": "open('/proc/sys/kernel/core_pattern', 'w').write('|/bin/sh')",
    "the sysrq trigger": "open('/proc/sysrq-trigger', 'w').write('h')",
    "making a disk device": "os.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))",
    "the kernel's log": "return call(103, 3, ctypes.create_string_buffer(64), 64)",
    "control groups": "os.makedirs('/sys/fs/cgroup/memory/mine')",
    "higher limits": "return call(160, 4, struct.pack('QQ', 1 << 20, 1 << 20))",
    "better scheduling": "os.setpriority(os.PRIO_PROCESS, 0, -20)",
    "limits of the first process": "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (3, 3))",
    "the first process's scheduling": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "the first process's processors": "os.sched_setaffinity(1, {0})",
    "a lower priority of the first process": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "a lower priority of all of a user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "choosing the first process to die when memory ends": "open('/proc/1/oom_score_adj', 'w').write('1000')",
    "a file system in memory without a bound": "open('/sys/fs/cgroup/file', 'w')",
    "the folder of devices": "open('/dev/file', 'w')",
    "programs of the system": "open('/usr/bin/env', 'a')",
    "the sandbox's own code": "os.remove(max(('/run/clawgym/supervisor.py', '/run/clawgym'), key=os.path.exists))",
}


@pytest.fixture(scope="module")
def answers(backend: SandboxBackend) -> dict[str, str]:
    """What every attempt came to, all in one sandbox: a container takes a second to start."""
    return attempts(backend, REFUSED)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers of system calls are this processor's")
@pytest.mark.parametrize("name", REFUSED)
def test_an_agent_is_refused(answers: dict[str, str], name: str) -> None:
    assert answers[name] == "refused"


def test_an_attempt_that_is_allowed_is_told_apart_from_a_refusal(backend: SandboxBackend) -> None:
    harmless = {"read": "return open('/proc/self/comm').read()", "call": "return call(39) == os.getpid()"}
    assert attempts(backend, harmless) == {"read": "got 'python3\\n'", "call": "got True"}


def test_the_first_process_cannot_be_killed_or_stopped_from_inside(backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        await sandbox.exec(
            ["sh", "-c", "for s in $(seq 1 64); do kill -$s 1; kill -$s -1; done; kill -9 -- -1 1"], timeout_s=10
        )
        await sandbox.exec(
            ["python3", "-c", "import os, signal\nfor s in (9, 19, 20, 15): os.kill(1, s)"], timeout_s=10
        )
        return (await sandbox.exec(["echo", "alive"], timeout_s=10)).stdout

    assert inside(backend, body) == b"alive\n"


def test_no_descriptor_of_ours_is_open_in_a_command(backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> str:
        return (
            await sandbox.exec(["sh", "-c", "ls -l /proc/self/fd | cut -d' ' -f10-; ls /proc/self/fd"])
        ).stdout.decode()

    *_, listing = inside(backend, body).partition("\n0\n")
    assert sorted(listing.split()) == ["1", "2", "3"], "0, 1, 2 and the folder that ls reads"


def test_no_process_of_the_host_or_of_another_sandbox_is_visible(backend: SandboxBackend) -> None:
    marker = f"{os.getpid()}.0000001"

    async def body(sandbox: Sandbox) -> str:
        other = await backend.open(sandbox.spec)
        try:
            await other.exec(["sh", "-c", f"sleep {marker} >/dev/null 2>&1 &"])
            seen = await sandbox.exec(
                ["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; ls /proc | grep -c '^[0-9]'"]
            )
            return seen.stdout.decode()
        finally:
            await other.close()

    shown = inside(backend, body)
    assert marker not in shown
    assert "pytest" not in shown
    assert int(shown.split()[-1]) < 12


def test_nothing_of_the_host_is_mounted_writable_but_what_dies_with_the_sandbox(backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> list[list[str]]:
        lines = (await sandbox.read_file("/proc/self/mounts")).decode().splitlines()
        return [line.split() for line in lines]

    writable = {(kind, target) for _, target, kind, options, *_ in inside(backend, body) if "rw" in options.split(",")}
    devices = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    kept = {(kind, target) for kind, target in writable if target not in devices}
    assert {kind for kind, _ in kept} <= {"tmpfs", "devpts", "proc", "mqueue", "overlay"}


def test_no_interface_but_loopback_and_no_route_is_there(backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> tuple[str, str]:
        interfaces = (await sandbox.read_file("/proc/net/dev")).decode()
        return interfaces, (await sandbox.read_file("/proc/net/route")).decode()

    interfaces, routes = inside(backend, body)
    assert [line.split(":")[0].strip() for line in interfaces.splitlines()[2:]] == ["lo"]
    assert routes.splitlines()[1:] == []


def test_no_socket_of_the_engine_or_of_ours_is_inside(backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> str:
        find = (
            "find / -path /proc -prune -o -type s -print 2>/dev/null; ls -d /var/run/docker* /run/docker* 2>/dev/null"
        )
        return (await sandbox.exec(["sh", "-c", find])).stdout.decode()

    assert inside(backend, body).strip() == ""


def test_a_process_has_no_capability_and_can_gain_none(backend: SandboxBackend) -> None:
    async def body(sandbox: Sandbox) -> dict[str, str]:
        status = (await sandbox.exec(["cat", "/proc/self/status"])).stdout.decode()
        return dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)

    status = inside(backend, body)
    assert {name: int(status[name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == dict.fromkeys(
        ("CapEff", "CapPrm", "CapInh", "CapAmb"), 0
    )
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


def test_files_of_the_host_are_unreachable_by_any_path(backend: SandboxBackend, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("host secret")

    async def body(sandbox: Sandbox) -> str:
        ways = (
            str(secret),
            f"/proc/1/root{secret}",
            f"/proc/self/root{secret}",
            f"/proc/1/cwd/{secret}",
            f"/dev/fd/../../..{secret}",
        )
        found = await sandbox.exec(["cat", *ways])
        return found.stdout.decode()

    assert inside(backend, body) == ""
