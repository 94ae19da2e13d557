"""A sandbox as the Docker engine's API wants it: what a container may do, see and use, in one place.

Pure: it asks no engine. Podman's Docker API takes the same. Invariants: no network, no capability, no new privilege;
paths, names and environment as in every other sandbox; what can be written is bounded, but for an image that asks for a
writable file system, whose files are, each.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from clawgym_env.ownership import owner_tag
from clawgym_env.sandbox.base import Mount, SandboxSpec
from clawgym_env.sandbox.boot import SOCKET_FOLDER, supervisor_command, supervisor_files
from clawgym_env.sandbox.bubblewrap import HOME, HOSTNAME, absolute, base_environment, disks, mount_source
from clawgym_env.sandbox.limits import CPU_PERIOD_US, OVERHEAD_PROCESSES, SHM_MB, cpu_quota_us, memory_bytes

if TYPE_CHECKING:
    from clawgym_env.sandbox.images import ResolvedImage

OWNER, DEADLINE, RUN = "clawgym.owner", "clawgym.deadline", "clawgym.run"
"""Labels: the controller's owner tag, when the sandbox's lifetime is over (seconds since 1970), its own id."""
_READ_ONLY = ("/proc", "/dev", "/sys/fs/cgroup")
"""What engines leave writable to uid 0, capabilities or not: the supervisor's place among those to die when memory ends
(/proc/1/oom_score_adj), and file systems in memory that no disk limit bounds. The links to devices still work."""


def labels(spec: SandboxSpec, run: str) -> dict[str, str]:
    """Return what the reaper must know of a container whose controller may be gone."""
    return {OWNER: owner_tag(), DEADLINE: str(int(time.time() + spec.lifetime_s)), RUN: run}


def environment(spec: SandboxSpec, image: ResolvedImage) -> dict[str, str]:
    """Return the environment of every command: the image's own over ours, but for HOME, then the spec's."""
    # A Python behind a loader of its own is lent to our supervisor, not to the task.
    ours = base_environment(*image.python) if len(image.python) == 1 else base_environment()
    return {**ours, **image.environment, "HOME": HOME, **spec.env}


def container_config(
    spec: SandboxSpec,
    image: ResolvedImage,
    *,
    run: str,
    socket_folder: Path,
    seccomp: str,
    runtime: str | None = None,
) -> dict[str, object]:
    """Return the body of the request that creates a container.

    Args:
        socket_folder: on this machine, with the socket that the supervisor opens.
        seccomp: the profile of system calls, or the path of its file, whichever the engine takes.
        runtime: of the engine (`runsc`); None for its own choice.

    Raises:
        SandboxError: the spec mounts something that is not there, or names a path that is none.
    """
    writable = spec.image is not None and spec.image.writable
    folders = (spec.workdir, *spec.folders)
    command = supervisor_command(
        image.python, lifetime_s=spec.lifetime_s, connects=True, folders=[absolute(folder) for folder in folders]
    )
    tmpfs = {} if writable else _disks(spec)
    memory = memory_bytes(spec, disks=len(tmpfs))
    host = {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true", f"seccomp={seccomp}"],
        "ReadonlyRootfs": not writable,
        "ReadonlyPaths": list(_READ_ONLY),
        "Tmpfs": tmpfs,
        "Mounts": _mounts(spec, image, socket_folder),
        "Memory": memory,
        "MemorySwap": memory,
        # Not NanoCpus: that refuses more processors than there are.
        "CpuPeriod": CPU_PERIOD_US,
        "CpuQuota": cpu_quota_us(spec),
        "PidsLimit": spec.max_processes + OVERHEAD_PROCESSES,
        "ShmSize": SHM_MB << 20,
        "IpcMode": "private",
        "Dns": ["127.0.0.1"],
        "AutoRemove": True,
        "LogConfig": {"Type": "none"},
    }
    return {
        "Image": image.tag,
        "Entrypoint": command,
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": HOSTNAME,
        "Labels": labels(spec, run),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host if runtime is None else {**host, "Runtime": runtime},
    }


def _disks(spec: SandboxSpec) -> Mapping[str, str]:
    """Return the writable folders of a read-only file system and their mount options.

    Podman (4.3) lays a /tmp of its own over ours: there the memory limit alone bounds it.
    """
    modes = {HOME: "0700", "/tmp": "1777", "/var/tmp": "1777"}
    folders = disks(spec) if spec.image is None else disks(spec, "/var/tmp")  # in our own image a link to /tmp
    options = f"rw,exec,nosuid,nodev,size={spec.disk_mb}m,mode="
    return {folder: options + modes.get(folder, "0755") for folder in folders}


def _mounts(spec: SandboxSpec, image: ResolvedImage, socket_folder: Path) -> list[dict[str, object]]:
    """Return everything of this machine that is shown, read-only."""
    files = [Mount(source=source, target=inside) for source, inside in supervisor_files()]
    shown = [mount for mount in spec.mounts if mount.target not in image.holds]
    # Opening a socket writes to its file, not to the file system: read-only does not stop the supervisor.
    channel = Mount(source=socket_folder, target=SOCKET_FOLDER)
    return [
        {
            "Type": "bind",
            "Source": str(one.source),
            "Target": one.target,
            "ReadOnly": True,
            "BindOptions": {"NonRecursive": True},
        }
        for mount in (*image.mounts, *files, channel, *shown)
        for one in _with_inner(Mount(source=mount_source(mount), target=absolute(mount.target)))
    ]


def _with_inner(mount: Mount) -> Iterator[Mount]:
    """Yield a mount, then what is mounted inside its source: most engines would show that too, but not read-only."""
    yield mount
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = {Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])) for line in lines}
    for point in sorted(points):
        if point != mount.source and point.is_relative_to(mount.source) and point.exists():
            yield Mount(source=point, target=f"{mount.target}/{point.relative_to(mount.source)}")
