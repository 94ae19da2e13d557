"""Cost of a local sandbox: open + close, 32 at once, one command. Prints a table and, last, one JSON line.

`python benchmarks/sandbox.py`. The bound it is compared with is bubblewrap itself running `true` with the same
namespaces, without supervisor, seccomp filter, control groups or asyncio.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import tyro

from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.sandbox.bubblewrap import find_bwrap
from clawgym_env.sandbox.local import LocalBackend, LocalSandbox


@dataclass(frozen=True)
class Args:
    """What to measure."""

    repeats: int = 30
    """Samples of each figure."""
    concurrency: int = 32
    """Sandboxes open at once."""


def cpu_s() -> float:
    """CPU seconds of this process and its reaped children."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def timed(action: Callable[[], Awaitable[object]], repeats: int) -> tuple[float, float]:
    """Return median wall and mean CPU milliseconds of an action."""
    walls = []
    before = cpu_s()
    for _ in range(repeats):
        start = time.perf_counter()
        await action()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls) * 1e3, (cpu_s() - before) / repeats * 1e3


async def plain_bwrap() -> None:
    """Run `true` in bare bubblewrap."""
    args = [
        find_bwrap(),
        "--unshare-all",
        "--die-with-parent",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
        "--dev",
        "/dev",
    ]
    await asyncio.to_thread(subprocess.run, [*args, "true"], check=True)


async def main(args: Args) -> None:
    """Measure and print."""
    backend, spec = LocalBackend(), SandboxSpec()
    figures: dict[str, float] = {}

    async def cycle() -> None:
        await (await backend.open(spec)).close()

    async def cycle_with_exec() -> None:
        async with await backend.open(spec) as sandbox:
            await sandbox.exec(["true"])

    async with await backend.open(spec) as sandbox:
        actions: dict[str, Callable[[], Awaitable[object]]] = {
            "bwrap true (bound)": plain_bwrap,
            "open+close": cycle,
            "open+exec+close": cycle_with_exec,
            "exec true": lambda: sandbox.exec(["true"]),
            "exec sh -c true": lambda: sandbox.exec(["sh", "-c", "true"]),
            "write_file 1 kB": lambda: sandbox.write_file("file", bytes(1000)),
            "read_file 1 kB": lambda: sandbox.read_file("file"),
        }
        for name, action in actions.items():
            await action()
            wall, cpu = await timed(action, args.repeats)
            figures[f"{name} ms"], figures[f"{name} cpu ms"] = wall, cpu
            print(f"{name:22} {wall:8.1f} ms  {cpu:8.1f} ms CPU")

    start, before = time.perf_counter(), cpu_s()
    sandboxes: list[LocalSandbox] = await asyncio.gather(*(backend.open(spec) for _ in range(args.concurrency)))
    opened = time.perf_counter()
    await asyncio.gather(*(sandbox.exec(["true"]) for sandbox in sandboxes))
    ran = time.perf_counter()
    await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
    closed = time.perf_counter()
    spans = {"open": opened - start, "exec": ran - opened, "close": closed - ran}
    for name, seconds in spans.items():
        figures[f"{args.concurrency} at once, {name} ms"] = seconds * 1e3
        print(f"{args.concurrency} at once, {name:10} {seconds * 1e3:8.1f} ms")
    figures[f"{args.concurrency} at once, cpu ms each"] = (cpu_s() - before) / args.concurrency * 1e3
    print(json.dumps({name: round(value, 2) for name, value in figures.items()}))


if __name__ == "__main__":
    asyncio.run(main(tyro.cli(Args)))
