"""Whether a sandbox opens here, and what its walls are: the proof is one that was opened, not a version number.

Invariant: what is reported of a sandbox was read inside it, and it is closed before the report is made.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from clawgym_env.doctor.findings import Finding, Status, looked_at
from clawgym_env.doctor.machine import CONTAINER_FLAGS, in_container
from clawgym_env.errors import SandboxError
from clawgym_env.extras import is_installed
from clawgym_env.registry import backend
from clawgym_env.sandbox.base import SandboxBackend, SandboxSpec
from clawgym_env.sandbox.bubblewrap import find_bwrap
from clawgym_env.sandbox.seccomp import seccomp_filter

NAMESPACES = ("user", "mnt", "pid", "net", "ipc", "uts", "cgroup")
SHARED_BY: Mapping[str, set[str]] = {"docker": {"user", "cgroup"}}
"""Namespaces that sandboxes of a kind may have in common with this machine: Docker's engine decides on these."""
FILTERED = "2"
"""The mode of seccomp with a filter, in a process's status."""
OPEN_S = 60.0
_PROBE = f"true && for name in {' '.join(NAMESPACES)}; do readlink /proc/self/ns/$name; done; cat /proc/self/status"
_SYSCTLS: Mapping[str, tuple[str, str]] = {
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "15000"),
}
"""Settings under which no ordinary user has namespaces: the value that forbids them, and one that allows them."""


def examine(private_engine: Path) -> list[Finding]:
    """Look at everything a sandbox is made of, and open one.

    Where only Docker can, one is opened there; its engine keeps the image of this machine's /usr, as it does for runs.

    Args:
        private_engine: the socket of the engine that `scripts/docker-up` starts.
    """
    local = looked_at("sandbox", "local", lambda: _opened("local", backend("local")), broken="problem")
    docker = looked_at("sandbox", "docker", lambda: _docker(private_engine), broken="optional")
    works = any(finding.status == "ok" for finding in local)
    if not works and any(finding.status == "ok" for finding in docker):
        docker = looked_at("sandbox", "docker", lambda: _opened("docker", backend("docker")), broken="warning")
        if any(finding.status == "ok" for finding in docker):  # there is a way, though not the usual one
            local = [_milder(finding) for finding in local]
    parts = [
        *looked_at("sandbox", "user namespaces", _namespaces),
        *looked_at("sandbox", "bubblewrap", _bubblewrap),
        *looked_at("sandbox", "seccomp", _seccomp),
        *looked_at("sandbox", "limits", _limits),
    ]
    return [*parts, *local, *docker]


def _milder(finding: Finding) -> Finding:
    status: Status = "warning" if finding.status == "problem" else finding.status
    return finding.model_copy(update={"status": status, "fix": f"{finding.fix} Or use --sandbox docker.".lstrip()})


def _namespaces() -> Iterator[Finding]:
    who = "root" if os.geteuid() == 0 else f"user {os.geteuid()}"
    for name, (forbids, allows) in _SYSCTLS.items():
        file = Path("/proc/sys", *name.split("."))
        if os.geteuid() != 0 and file.is_file() and file.read_text().strip() == forbids:
            found, fix = f"{who}, and {name} = {forbids} forbids them", f"sudo sysctl -w {name}={allows}"
            yield Finding(topic="sandbox", name="user namespaces", status="warning", found=found, fix=fix)
            return
    yield Finding(topic="sandbox", name="user namespaces", status="ok", found=f"{who}, no setting forbids them")


def _bubblewrap() -> Iterator[Finding]:
    try:
        program = find_bwrap()
    except SandboxError as error:
        yield Finding.of_error("sandbox", "bubblewrap", error, status="warning")
        return
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=OPEN_S, check=True)
    yield Finding(topic="sandbox", name="bubblewrap", status="ok", found=f"{done.stdout.split()[-1]}, {program}")


def _has_bubblewrap() -> bool:
    try:
        return bool(find_bwrap())
    except SandboxError:
        return False


def _seccomp() -> Iterator[Finding]:
    count = len(seccomp_filter()) // 8  # bytes of an instruction
    if Path("/proc/sys/kernel/seccomp/actions_avail").is_file():
        yield Finding(topic="sandbox", name="seccomp", status="ok", found=f"a filter of {count} instructions")
    else:
        found, fix = "this kernel has none", "Use a kernel with CONFIG_SECCOMP_FILTER, as every distribution's is."
        yield Finding(topic="sandbox", name="seccomp", status="warning", found=found, fix=fix)


def _limits() -> Iterator[Finding]:
    held = backend("local").capabilities
    if (held.memory, held.processes, held.cpus) == ("tree", "tree", "tree"):
        found = f"{_cgroups()}: memory, processes and CPU of the whole tree"
        yield Finding(topic="sandbox", name="limits", status="ok", found=found)
        return
    processes = "of the whole sandbox" if held.processes == "namespace" else "without a bound"
    found = f"{_cgroups()}, not ours to use: memory of each process alone, processes {processes}, CPU without a bound"
    how = "Make control groups writable here" if os.geteuid() == 0 else "Run as root"
    fix = f"{how}, or use --sandbox docker, where limits have to hold for all processes together."
    yield Finding(topic="sandbox", name="limits", status="warning", found=found, fix=fix)


def _cgroups() -> str:
    kinds = [line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()]
    if "cgroup" in kinds:
        return "control groups v1"
    return "control groups v2" if "cgroup2" in kinds else "no control groups"


def _opened(name: str, made: SandboxBackend) -> Iterator[Finding]:
    """Open a sandbox, run `true` in it, and say which walls it saw from inside."""
    started = time.perf_counter()
    try:
        seen = asyncio.run(_inside(made))
    except (SandboxError, TimeoutError) as error:
        finding = Finding.of_error("sandbox", name, error)
        if in_container() and name == "local" and _has_bubblewrap():  # whose own words are of other causes
            finding = finding.model_copy(update={"fix": f"Start this container with {CONTAINER_FLAGS}"})
        yield finding
        return
    seconds = time.perf_counter() - started
    own = [kind for kind in NAMESPACES if seen.get(kind, _link(kind)) != _link(kind)]
    walls = {
        f"namespaces of its own ({', '.join(own)})": {*own} >= {*NAMESPACES} - SHARED_BY.get(name, set()),
        "a seccomp filter": seen.get("Seccomp") == FILTERED,
        "no capabilities": int(seen.get("CapEff", "1"), 16) == 0,
    }
    standing = "; ".join(wall for wall, stands in walls.items() if stands)
    missing = "; ".join(wall for wall, stands in walls.items() if not stands)
    found = f"opened, ran true, closed in {seconds:.1f} s: {standing}"
    if missing:
        fix = "Let only code that you trust run here."
        yield Finding(topic="sandbox", name=name, status="warning", found=f"{found}; NOT COMPLETE: {missing}", fix=fix)
        return
    yield Finding(topic="sandbox", name=name, status="ok", found=found)


async def _inside(made: SandboxBackend) -> dict[str, str]:
    """Return what a process inside sees of itself: `kind` of namespace to its id, field of its status to its value."""
    async with asyncio.timeout(OPEN_S):
        sandbox = await made.open(SandboxSpec(memory_mb=256, disk_mb=16))
        try:
            done = await sandbox.exec(["sh", "-c", _PROBE])
        finally:
            await sandbox.close()
    if done.exit_code != 0:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()[-200:]
        raise SandboxError(f"Expected `true` to run in a sandbox, got exit code {done.exit_code}: {said or 'silence'}.")
    pairs = (line.partition(":") for line in done.stdout.decode().splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _link(kind: str) -> str:
    return os.readlink(f"/proc/self/ns/{kind}").partition(":")[2]


def _docker(private_engine: Path) -> Iterator[Finding]:
    if not is_installed("docker"):
        fix = "pip install 'clawgym[docker]'"
        yield Finding(topic="sandbox", name="docker", status="optional", found="no Python package docker", fix=fix)
        return
    from clawgym_env.sandbox.docker_engine import DockerEngine

    try:
        engine = DockerEngine()
    except SandboxError as error:
        finding = Finding.of_error("sandbox", "docker", error, status="optional")
        if private_engine.is_socket():
            finding = finding.model_copy(update={"fix": f"export DOCKER_HOST=unix://{private_engine}"})
        yield finding
        return
    try:
        version = engine.client.version()["Version"]
    finally:
        engine.close()
    found = f"{'Podman' if engine.is_podman else 'Docker'} {version} answers"
    yield Finding(topic="sandbox", name="docker", status="ok", found=found)
