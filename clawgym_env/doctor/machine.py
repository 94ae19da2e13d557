"""The machine itself: its system, memory, disk and graphics processors.

Imports nothing of Unix alone, for it has to speak on other systems too. Invariant: it only reads.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from clawgym_env.doctor.findings import Finding

GB = 1e9
HARNESSES_GB = 4.0
"""All harnesses and policies in the cache, and room to unpack them."""
OPEN_FILES = 1024
PROGRAM_S = 10.0
CONTAINER_FLAGS = " ".join(f"--security-opt {name}=unconfined" for name in ("seccomp", "apparmor", "systempaths"))
"""What bubblewrap needs of the Docker container around it."""
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def elsewhere(system: str) -> str:
    """Return what to do on a system that is not Linux, as `platform.system()` names it."""
    way = "Run it in WSL2 (wsl --install, then a Linux shell)" if system == "Windows" else "Run it in a Linux machine"
    return (
        f"{way}, or with reduced isolation in a Linux container: docker run -it {CONTAINER_FLAGS} python:3.11 bash. "
        "What escapes a sandbox is then held by that container alone, whose own filters are off."
    )


def system() -> Iterator[Finding]:
    """Say which system this is."""
    name = platform.system()
    found = f"{name} {platform.release()}, {platform.machine()}{', in a container' if in_container() else ''}"
    if name != "Linux":
        yield Finding(topic="machine", name="system", status="problem", found=found, fix=elsewhere(name))
        return
    yield Finding(topic="machine", name="system", status="ok", found=found)


def python() -> Iterator[Finding]:
    """Say which Python runs this, and whether it reads and writes UTF-8."""
    found = f"{platform.python_version()}, {sys.prefix}"
    yield Finding(topic="machine", name="python", status="ok", found=found)
    if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8"):
        yield Finding(
            topic="machine",
            name="locale",
            status="warning",
            found=f"file names are {sys.getfilesystemencoding()}",
            fix="export LANG=C.UTF-8",
        )


def memory(needed_mb: Mapping[str, int]) -> Iterator[Finding]:
    """Say how much memory there is.

    Args:
        needed_mb: what each harness is given, by name.
    """
    total, free = _memory_bytes()
    found = f"{total / GB:.1f} GB, {free / GB:.1f} GB of it free"
    too_large = sorted(name for name, megabytes in needed_mb.items() if megabytes << 20 > free)
    if too_large:
        found = f"{found}: less than {', '.join(too_large)} may take"
        fix = "Close what takes it, or use a smaller harness."
        yield Finding(topic="machine", name="memory", status="warning", found=found, fix=fix)
    else:
        yield Finding(topic="machine", name="memory", status="ok", found=found)


def disk(cache: Path) -> Iterator[Finding]:
    """Say whether the cache can be written, and how much fits."""
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    found = f"{free / GB:.1f} GB free for the cache {cache}"
    fix = "Set CLAWGYM_CACHE to a folder of yours on a larger disk."
    if not os.access(there, os.W_OK):
        yield Finding(topic="machine", name="disk", status="warning", found=f"{cache} cannot be written", fix=fix)
    elif free < HARNESSES_GB * GB:
        found = f"{found}, where {HARNESSES_GB:.0f} GB hold every harness"
        yield Finding(topic="machine", name="disk", status="warning", found=found, fix=fix)
    else:
        yield Finding(topic="machine", name="disk", status="ok", found=found)


def open_files() -> Iterator[Finding]:
    """Warn of a bound on open files under which few sandboxes are open at once."""
    import resource  # not on Windows

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < OPEN_FILES:
        found = f"at most {soft} at once: few sandboxes"
        more = "unlimited" if hard == resource.RLIM_INFINITY else min(hard, 65536)
        yield Finding(topic="machine", name="open files", status="warning", found=found, fix=f"ulimit -n {more}")


def gpus() -> Iterator[Finding]:
    """Say which graphics processors there are, and whether this Python's torch can use them."""
    program = shutil.which("nvidia-smi")
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    listed = [] if program is None else _lines(program, *query)
    if not listed:
        found = "none by nvidia-smi; tiny and smollm2 need none"
        yield Finding(topic="machine", name="GPU", status="ok", found=found)
        return
    for line in listed:
        yield Finding(topic="machine", name="GPU", status="ok", found=line)
    build = _torch_build()
    if build is not None and not _torch_sees_gpu():
        found = f"torch {build} does not use it"
        fix = "Install a torch built for your driver's CUDA; a +cpu build has none."
        yield Finding(topic="machine", name="GPU in torch", status="warning", found=found, fix=fix)


def in_container() -> bool:
    """Whether this is Docker or Podman."""
    return Path("/.dockerenv").exists() or Path("/run/.containerenv").exists()


def _memory_bytes() -> tuple[int, int]:
    """Return all memory and what is free of it, within the limit of this container."""
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        values[name] = int(rest.split()[0]) << 10
    total = values["MemTotal"]
    for file in _MEMORY_LIMITS:
        with suppress(OSError, ValueError):  # "max"
            total = min(total, int(file.read_text()))
    return total, min(total, values["MemAvailable"])


def _torch_build() -> str | None:
    """Return torch's version with its CUDA, without importing it: that takes seconds."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    told = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    return f"{told.get('__version__')} (CUDA {told.get('cuda') or 'none'})"


def _torch_sees_gpu() -> bool:
    return _lines(sys.executable, "-c", "import torch; print(torch.cuda.is_available())") == ["True"]


def _lines(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines()
