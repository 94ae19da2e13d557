"""Contract of backends with walls: nothing of the host is seen, reached or changed from inside.

None of these tests may run against a backend with `Capabilities.isolated` False: some would end the host's processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from pathlib import Path

import pytest
from contract import InSandbox, python

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import Mount, Sandbox, SandboxBackend


@pytest.fixture(autouse=True)
def _only_with_walls(backend: SandboxBackend) -> None:
    assert backend.capabilities.isolated


def test_the_sandbox_survives_a_process_that_kills_everything(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.exec(["bash", "-c", "kill -INT 1; kill -TERM 1; kill -9 1; kill -9 -1"])
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"

    in_sandbox(body)


@pytest.mark.parametrize("then", ["time.sleep(1000)", "0"], ids=["goes-on", "ends"])
def test_a_command_that_stops_what_watches_it_dies_at_its_timeout(in_sandbox: InSandbox, then: str) -> None:
    async def body(sandbox: Sandbox) -> None:
        code = f"import os, signal, time\nos.kill(os.getppid(), signal.SIGSTOP)\n{then}"
        assert (await sandbox.exec(["python3", "-c", code], timeout_s=1)).timed_out
        processes = await python(sandbox, "import os; print(*filter(str.isdigit, os.listdir('/proc')))")
        assert len(processes.split()) == 3, "the first, and this one below its keeper"

    in_sandbox(body)


def test_the_host_is_invisible(in_sandbox: InSandbox, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        hidden = (tmp_path, Path(__file__), Path.home() / ".bashrc", Path("/etc/ssl/private"), Path("/etc/machine-id"))
        for path in hidden:
            assert (await sandbox.exec(["ls", str(path)])).exit_code != 0, path
        assert (await sandbox.exec(["ls", "/tmp", "/home", "/opt"])).stdout.split() == [b"/home:", b"/opt:", b"/tmp:"]
        assert (await sandbox.exec(["hostname"])).stdout.decode().strip() == "sandbox" != socket.gethostname()
        names = (await python(sandbox, "import os; print(*os.listdir('/proc'))")).split()
        assert sum(name.isdigit() for name in names) <= 6

    in_sandbox(body)


def test_the_system_cannot_be_changed(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        for path in ("/x", "/usr/x", "/etc/x", "/usr/bin/env", "/etc/passwd", "/proc/sys/kernel/core_pattern"):
            refused = await sandbox.exec(["sh", "-c", f": >> {path}"])
            assert b"Read-only file system" in refused.stderr or b"Permission denied" in refused.stderr, path

    in_sandbox(body)


def test_every_sandbox_looks_the_same(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> bytes:
        script = "id; pwd; hostname; env | sort; ls -a / /etc /root; cat /etc/passwd /etc/hosts"
        return (await sandbox.exec(["sh", "-c", script])).stdout

    assert in_sandbox(body) == in_sandbox(body)


def test_mounts_over_the_system_are_refused(in_sandbox: InSandbox, tmp_path: Path) -> None:
    async def body(sandbox: Sandbox) -> None:
        raise AssertionError("Expected the mount to be refused.")

    for target in ("/opt/../usr", "relative", "/"):
        with pytest.raises(SandboxError, match="Expected"):
            in_sandbox(body, mounts=[Mount(source=tmp_path, target=target)])


def test_there_is_no_way_to_more_privilege(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        lines = (await sandbox.read_file("/proc/self/status")).decode().splitlines()
        status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        assert {status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
        for command in ("unshare -U true", "unshare -m true", "unshare -n true", "mount -t tmpfs none /tmp"):
            assert (await sandbox.exec(["sh", "-c", command])).exit_code != 0, command
        assert (await sandbox.exec(["chroot", "/", "true"])).exit_code != 0
        code = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
for number in (101, 310, 321, 323, 425, 435, 438):
    ctypes.set_errno(0)
    print(libc.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno())
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())
"""
        if os.uname().machine == "x86_64":
            refusals = (await python(sandbox, code)).splitlines()
            assert refusals == ["-1 1"] * 5 + ["-1 38", "-1 1", "-1 1"]

    in_sandbox(body)


def test_no_address_of_the_host_is_reachable(in_sandbox: InSandbox) -> None:
    addresses = {"127.0.0.1", *_own_addresses()}
    loopback, everywhere = socket.create_server(("127.0.0.1", 0)), socket.create_server(("0.0.0.0", 0))
    with contextlib.closing(loopback), contextlib.closing(everywhere):
        ports = [str(listener.getsockname()[1]) for listener in (loopback, everywhere)]
        code = """
import socket, sys
for family in (40, 38):
    try: socket.socket(family, socket.SOCK_STREAM if family == 40 else socket.SOCK_SEQPACKET); print("opened")
    except OSError as error: print(error.errno)
for address in sys.argv[3:]:
    for port in sys.argv[1:3]:
        try: socket.create_connection((address, int(port)), 1); print("connected to", address)
        except OSError: pass
try: socket.getaddrinfo("example.com", 80); print("resolved")
except OSError: pass
print(*(name for _, name in socket.if_nameindex()))
"""

        async def body(sandbox: Sandbox) -> None:
            out = await python(sandbox, code, *ports, *addresses)
            assert out.splitlines() == [str(errno.EAFNOSUPPORT)] * 2 + ["lo"]

        in_sandbox(body)


def _own_addresses() -> set[str]:
    """Return this machine's addresses, bridges of container engines included."""
    found: set[str] = set()
    for line in Path("/proc/net/fib_trie").read_text().splitlines():
        _, bar, address = line.partition("|-- ")
        found.update({address.strip()} if bar else ())
    return found - {"0.0.0.0"}
