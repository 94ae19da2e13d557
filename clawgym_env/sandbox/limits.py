"""Limits on a sandbox's whole process tree: control groups where we may make them, rlimits where not.

Root gets a directory per sandbox in the cgroup v1 hierarchies of memory, pids and cpu, or one in the v2 tree; an
ordinary user gets rlimits, which hold per process (memory) or per user namespace (processes), and `Capabilities` says
so. Invariant: no directory outlives its sandbox by more than one `open`: what a killed controller left is swept.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.ownership import owner_alive, owner_tag
from clawgym_env.sandbox.base import SandboxSpec

_PARENT = "clawgym"
CPU_PERIOD_US = 100_000
SHM_MB = 64
"""What /dev/shm may hold."""
_V1_CONTROLLERS = ("memory", "pids", "cpu")
OVERHEAD_PROCESSES = 8
"""Supervisor and keepers, which are not the task's."""


class ControlGroups:
    """Where this process may make control groups."""

    def __init__(self, parents: Mapping[str, Path], *, unified: bool) -> None:
        self._parents = parents
        """Controller -> directory that holds one directory per sandbox; one entry named "" for v2."""
        self._unified = unified

    @classmethod
    def find(cls, mounts: Path = Path("/proc/self/mounts")) -> ControlGroups | None:
        """Return the hierarchies with memory, pids and cpu that are ours to use, or None."""
        v1: dict[str, Path] = {}
        v2: Path | None = None
        for line in mounts.read_text().splitlines():
            _, target, kind, options = line.split()[:4]
            if kind == "cgroup":
                v1.update({name: Path(target) / _PARENT for name in _V1_CONTROLLERS if name in options.split(",")})
            elif kind == "cgroup2":
                v2 = Path(target)
        if len(v1) == len(_V1_CONTROLLERS):
            try:
                for parent in v1.values():
                    parent.mkdir(exist_ok=True)
                    if not os.access(parent, os.W_OK):
                        return None
            except OSError:
                return None
            _weigh(v1["cpu"] / "cpu.shares", 1024, most=262_144)
            return cls(v1, unified=False)
        if v2 is not None and _delegate(v2) and _delegate(v2 / _PARENT):
            _weigh(v2 / _PARENT / "cpu.weight", 100, most=10_000)
            return cls({"": v2 / _PARENT}, unified=True)
        return None

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        """Remove what dead controllers left and return its names, or only return them.

        Their processes died with them; one that did not is killed, and the next sweep removes its directory.
        """
        removed = []
        for path in self.directories():
            if owner_alive(path.name):
                continue
            with suppress(OSError):
                if not dry_run:
                    _kill_processes(path)
                    path.rmdir()
                removed.append(str(path))
        return removed

    def directories(self) -> list[Path]:
        """Return every sandbox's directories, of all controllers on this machine."""
        return [path for parent in self._parents.values() for path in parent.iterdir() if path.is_dir()]

    def make(self, spec: SandboxSpec, *, disks: int) -> ControlGroup:
        """Make one sandbox's directories, limits set.

        Args:
            disks: how many folders of the sandbox are file systems in memory.

        Raises:
            OSError: the kernel refused.
        """
        name = f"{owner_tag()}-{uuid.uuid4().hex[:8]}"
        group = ControlGroup(tuple(parent / name for parent in self._parents.values()))
        memory, processes = memory_bytes(spec, disks=disks), spec.max_processes + OVERHEAD_PROCESSES
        quota = cpu_quota_us(spec)
        try:
            for path in group.paths:
                path.mkdir()
            if self._unified:
                (path,) = group.paths
                _write(path / "memory.max", memory)
                _write(path / "pids.max", processes)
                _write(path / "cpu.max", f"{quota} {CPU_PERIOD_US}")
                with suppress(OSError):  # absent without swap
                    _write(path / "memory.swap.max", 0)
            else:
                _write(self._parents["memory"] / name / "memory.limit_in_bytes", memory)
                _write(self._parents["pids"] / name / "pids.max", processes)
                _write(self._parents["cpu"] / name / "cpu.cfs_period_us", CPU_PERIOD_US)
                _write(self._parents["cpu"] / name / "cpu.cfs_quota_us", quota)
                with suppress(OSError):  # absent without swap accounting
                    _write(self._parents["memory"] / name / "memory.memsw.limit_in_bytes", memory)
        except OSError:
            for path in group.paths:
                with suppress(OSError):
                    path.rmdir()
            raise
        return group


@dataclass(frozen=True, slots=True)
class ControlGroup:
    """One sandbox's directories."""

    paths: tuple[Path, ...]

    def add(self, pid: int) -> None:
        """Move a process in; what it forks from now on is born there."""
        for path in self.paths:
            _write(path / "cgroup.procs", pid)

    async def remove(self) -> None:
        """Remove the directories once their last process is gone."""
        for path in self.paths:
            for _ in range(200):
                try:
                    path.rmdir()
                    break
                except FileNotFoundError:
                    break
                except OSError:  # a killed process leaves its group a moment after it is reaped
                    await asyncio.sleep(0.005)


def memory_bytes(spec: SandboxSpec, *, disks: int) -> int:
    """Return the memory of a sandbox's tree: what its processes may use, and room for what its disks may hold.

    Without that room a full disk would cost processes their lives, the supervisor's first: it is often the largest.
    """
    return (spec.memory_mb + disks * spec.disk_mb + SHM_MB) << 20


def cpu_quota_us(spec: SandboxSpec) -> int:
    """Return the processor time per `CPU_PERIOD_US`; it may be more than this machine has."""
    return max(1000, int(spec.cpus * CPU_PERIOD_US))


def rlimits(spec: SandboxSpec, *, with_groups: bool) -> dict[int, int]:
    """Return the rlimits of a sandbox's processes, resource -> bytes or count."""
    limits = {resource.RLIMIT_CORE: 0}
    if not with_groups:
        # Not the address space: node and others reserve far more of that than they use.
        limits[resource.RLIMIT_DATA] = spec.memory_mb << 20
        limits[resource.RLIMIT_NPROC] = spec.max_processes + OVERHEAD_PROCESSES
    return {limit: _below_hard(limit, value) for limit, value in limits.items()}


def _below_hard(limit: int, value: int) -> int:
    hard = resource.getrlimit(limit)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def _delegate(path: Path) -> bool:
    """Make a v2 directory and let it hand memory, pids and cpu to its children."""
    try:
        path.mkdir(exist_ok=True)
        _write(path / "cgroup.subtree_control", "+memory +pids +cpu")
    except OSError:
        return False
    return True


def _weigh(file: Path, one: int, *, most: int) -> None:
    """Let all sandboxes together weigh as much as one process for each core: by default they weigh as a single one.

    Args:
        one: the weight of one process.
        most: what the kernel accepts.
    """
    with suppress(OSError):
        _write(file, min(most, one * (os.cpu_count() or 1)))


def _kill_processes(group: Path) -> None:
    """Kill a group's processes. Each is looked up again once a descriptor holds it: ids are reused."""
    file = group / "cgroup.procs"
    with suppress(OSError):
        for pid in file.read_text().split():
            process = os.pidfd_open(int(pid))
            try:
                if pid in file.read_text().split():
                    signal.pidfd_send_signal(process, signal.SIGKILL)
            finally:
                os.close(process)


def _write(path: Path, value: int | str) -> None:
    with open(path, "w") as file:
        file.write(str(value))
