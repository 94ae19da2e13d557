"""Cost of a sandbox on each backend: one from open to the end of its last process, many at once, memory, one command.

`python benchmarks/sandbox.py [--backend local docker] [--rounds 20] [--json FILE]`. A cycle is what a rollout does:
open, 20 workspace files in, the proxy's listener, one command, close, and /proc shows none of its processes any more.
The bounds it is compared with are the bare tools running `true` with the same namespaces: no supervisor, no limits.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import tyro

from clawgym_env.sandbox.base import WORKDIR, Sandbox, SandboxBackend, SandboxSpec
from clawgym_env.sandbox.bubblewrap import find_bwrap
from clawgym_env.sandbox.docker import DockerBackend
from clawgym_env.sandbox.local import LocalBackend

FILES = 20
PORT = 8080
TARGETS_MS = {"local": 60.0, "docker": 900.0}
"""Median cycle on two cores as root."""
MAKE: dict[str, Callable[[], SandboxBackend]] = {"local": LocalBackend, "docker": DockerBackend}


@dataclass(frozen=True)
class Args:
    """What to measure."""

    backend: tuple[Literal["local", "docker"], ...] = ("local", "docker")
    rounds: int = 20
    """Samples of each median."""
    at_once: tuple[int, ...] = (32, 100)
    """Sandboxes open together."""
    json: Path | None = None
    """Where the figures go, too."""


Figures = dict[str, float]


class Table:
    """Figures of one backend, printed as they come."""

    def __init__(self, backend: str) -> None:
        self.figures: Figures = {}
        self._backend = backend

    def add(self, name: str, value: float, note: str = "") -> None:
        """Keep and print one figure; the unit is part of its name."""
        self.figures[name] = round(value, 2)
        print(f"{self._backend:7} {name:34} {value:9.1f}  {note}", flush=True)


async def median_ms(action: Callable[[], Awaitable[object]], rounds: int) -> float:
    """Return the median wall time of an action, the first run left out."""
    await action()
    walls = []
    for _ in range(rounds):
        start = time.perf_counter()
        await action()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls) * 1e3


def cpu_s() -> float:
    """Return the CPU seconds of this process and its reaped children: unlike wall time, they bear a busy machine."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def pid_namespace(sandbox: Sandbox) -> str:
    """Return the name that /proc gives the sandbox's pid namespace."""
    return (await sandbox.exec(["readlink", "/proc/self/ns/pid"])).stdout.decode().strip()


def members(namespace: str) -> list[int]:
    """Return the processes of a pid namespace."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.readlink(f"/proc/{name}/ns/pid") == namespace:
                    found.append(int(name))
            except OSError:
                continue
    return found


def resident_mb(namespace: str) -> float:
    """Return the proportional memory of a sandbox: its processes and those of its engine for it alone."""
    pids = set(members(namespace))
    for pid in list(pids):
        while (pid := _parent(pid)) not in (0, 1, os.getpid()) and pid not in pids:
            if b"containerd\0" in (command := _command(pid)) or b"dockerd\0" in command:
                break
            pids.add(pid)
    return sum(_pss_kb(pid) for pid in pids) / 1024


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def _pss_kb(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


async def cycle(backend: SandboxBackend, workspace: Path) -> dict[str, float]:
    """Do what a rollout does with a sandbox and return the milliseconds of each step."""
    marks = [("", time.perf_counter())]
    sandbox = await backend.open(SandboxSpec())
    marks.append(("open", time.perf_counter()))
    try:
        await sandbox.copy_in(workspace, WORKDIR)
        marks.append((f"{FILES} files in", time.perf_counter()))
        listener = await sandbox.listen(PORT)
        marks.append(("listen", time.perf_counter()))
        namespace = await pid_namespace(sandbox)
        marks.append(("exec", time.perf_counter()))
        listener.close()
    finally:
        await sandbox.close()
    while members(namespace):  # noqa: ASYNC110 (nothing tells)
        await asyncio.sleep(0.001)
    marks.append(("close until none is left", time.perf_counter()))
    steps = {name: (at - before) * 1e3 for (_, before), (name, at) in pairwise(marks)}
    return {"cycle": sum(steps.values()), **steps}


async def many(backend: SandboxBackend, number: int, table: Table) -> None:
    """Open many at once, run a command in each, close them at once."""
    start = time.perf_counter()
    opened = await asyncio.gather(*(backend.open(SandboxSpec()) for _ in range(number)), return_exceptions=True)
    table.add(f"{number} at once: open s", time.perf_counter() - start)
    sandboxes = [sandbox for sandbox in opened if not isinstance(sandbox, BaseException)]
    failures = [error for error in opened if isinstance(error, BaseException)]
    try:
        start = time.perf_counter()
        ran = await asyncio.gather(*(pid_namespace(sandbox) for sandbox in sandboxes), return_exceptions=True)
        table.add(f"{number} at once: exec s", time.perf_counter() - start)
        failures += [error for error in ran if isinstance(error, BaseException)]
        namespaces = [namespace for namespace in ran if isinstance(namespace, str)]
        table.add(
            f"{number} at once: memory each MB", resident_mb(namespaces[0]), "PSS of one, engine's share included"
        )
    finally:
        start = time.perf_counter()
        closed = await asyncio.gather(*(sandbox.close() for sandbox in sandboxes), return_exceptions=True)
        table.add(f"{number} at once: close s", time.perf_counter() - start)
    failures += [error for error in closed if error is not None]
    failures += [RuntimeError(f"{name} is not empty") for name in namespaces if members(name)]
    table.add(f"{number} at once: failures", len(failures), "; ".join({str(error) for error in failures})[:200])


async def bound(backend: SandboxBackend, rounds: int) -> float:
    """Return the median milliseconds of the backend's bare tool that runs `true`."""
    if not isinstance(backend, DockerBackend):
        namespaces = ["--unshare-all", "--die-with-parent", "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev"]
        bwrap = [find_bwrap(), *namespaces, "true"]
        return await median_ms(lambda: asyncio.to_thread(subprocess.run, bwrap, check=True), rounds)
    import docker

    client = docker.from_env()
    sandbox = await backend.open(SandboxSpec())
    try:
        image = client.containers.get(sandbox.container).attrs["Config"]["Image"]
    finally:
        await sandbox.close()
    usr = {"/usr": {"bind": "/usr", "mode": "ro"}}
    try:
        return await median_ms(
            lambda: asyncio.to_thread(
                client.containers.run, image, ["/usr/bin/true"], network_mode="none", volumes=usr, remove=True
            ),
            rounds,
        )
    finally:
        client.close()


async def measure(name: str, args: Args, workspace: Path) -> Figures:
    """Measure one backend."""
    table, backend = Table(name), MAKE[name]()
    table.add("bound: bare tool runs true, ms", await bound(backend, args.rounds))
    await cycle(backend, workspace)
    before = cpu_s()
    rounds = [await cycle(backend, workspace) for _ in range(args.rounds)]
    table.add("cycle, mean CPU ms", (cpu_s() - before) / args.rounds * 1e3, "this process and its children: no engine")
    for step in rounds[0]:
        values = [one[step] for one in rounds]
        note = f"target {TARGETS_MS[name]:.0f}, fastest {min(values):.1f}" if step == "cycle" else ""
        table.add(f"{step}, median ms", statistics.median(values), note)
    sandbox = await backend.open(SandboxSpec())
    try:
        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "exec true": lambda: sandbox.exec(["true"]),
            "write_file 1 kB": lambda: sandbox.write_file("file", bytes(1000)),
            "read_file 1 kB": lambda: sandbox.read_file("file"),
        }
        for action_name, action in actions.items():
            table.add(f"{action_name}, median ms", await median_ms(action, args.rounds))
    finally:
        await sandbox.close()
    for number in args.at_once:
        await many(backend, number, table)
    return table.figures


def fill(workspace: Path) -> None:
    """Write the files of a task."""
    for index in range(FILES):
        (workspace / f"file-{index}.txt").write_text(f"line {index}\n" * 100)


async def main(args: Args) -> None:
    """Measure and print; the load average before and after tells how quiet the machine was."""
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        fill(Path(folder))
        figures: dict[str, Figures] = {name: await measure(name, args, Path(folder)) for name in args.backend}
    figures["load average"] = {"before": load_before, "after": os.getloadavg()[0]}
    print(f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after, {os.cpu_count()} processors")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Args)))
