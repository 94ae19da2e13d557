"""What the files of the contract suite share: which backends are tried, and questions to ask inside a sandbox.

Where a backend promises less, it says so in its `Capabilities`, and the tests assert the lesser promise.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from clawgym_env.ownership import owner_tag
from clawgym_env.sandbox.base import Sandbox, SandboxBackend
from clawgym_env.sandbox.docker import DockerBackend
from clawgym_env.sandbox.fake import FakeBackend
from clawgym_env.sandbox.limits import ControlGroups
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.testing import descendants

InSandbox: TypeAlias = Callable[..., object]
"""`in_sandbox(body, **spec)` runs `body(sandbox)` in an open sandbox and gives back its result."""

WALLED = ("local", "local-as-user", "docker") if os.geteuid() == 0 else ("local-as-user", "docker")
"""Backends that isolate. An ordinary user's local sandbox is `local-as-user`, whoever started these tests."""
every_backend = pytest.mark.parametrize("backend", [*WALLED, "fake"], indirect=True)
"""The mark of a test, or of a file, that the fake passes too."""
WITHOUT_GROUPS = "local-without-groups"
"""Limits by rlimits, as root."""

LOCAL: dict[str, Callable[[], SandboxBackend]] = {
    "local": LocalBackend,
    "local-as-user": LocalBackend,
    WITHOUT_GROUPS: lambda: LocalBackend(use_cgroups=False),
    "fake": FakeBackend,
}

DAEMON = """
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
open("daemon-started", "w").close()
time.sleep(float(sys.argv[1]))
"""
"""Leaves its session, its process group and its parents."""

_COUNT = """
import os, sys
word = sys.stdin.buffer.read()
count = 0
for pid in os.listdir("/proc"):
    if pid.isdigit():
        try: count += word in open(f"/proc/{pid}/cmdline", "rb").read().split(bytes(1))
        except OSError: pass
print(count)
"""


def unique() -> str:
    """Return about a thousand seconds that nobody else on this machine sleeps for."""
    return f"{1000 + random.SystemRandom().random():.9f}"


async def python(sandbox: Sandbox, code: str, *args: str, timeout_s: float | None = 60) -> str:
    """Run Python inside, expect success, return its output."""
    result = await sandbox.exec(["python3", "-c", code, *args], timeout_s=timeout_s)
    assert result.exit_code == 0, result
    return result.stdout.decode()


async def count(sandbox: Sandbox, word: str) -> int:
    """Return how many processes inside have `word` among their arguments."""
    result = await sandbox.exec(["python3", "-c", _COUNT], stdin=word.encode(), timeout_s=60)
    assert result.exit_code == 0, result
    return int(result.stdout)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait, at most 20 s, until a condition holds."""
    deadline = time.monotonic() + 20
    while not await condition():
        assert time.monotonic() < deadline, "Expected the condition to hold within 20 s."
        await asyncio.sleep(0.02)


def leftovers(backend: SandboxBackend) -> list[str]:
    """Return what this process's sandboxes have on the machine: processes, folders, control groups, containers."""
    groups = ControlGroups.find()
    paths = list(Path(tempfile.gettempdir()).glob(f"clawgym*{owner_tag()}-*"))
    paths += [] if groups is None else [path for path in groups.directories() if path.name.startswith(owner_tag())]
    found = [*map(str, paths), *(f"process {pid}" for pid in descendants(os.getpid()))]
    if isinstance(backend, DockerBackend):
        found += [name for name, owner in containers(backend) if owner == owner_tag()]
    return found


def containers(backend: DockerBackend) -> list[tuple[str, str]]:
    """Return name and owner of every container of ours in the backend's engine."""
    return [(container.name, container.owner) for container in backend._connect()[0].containers()]


def isolated(backend: SandboxBackend) -> bool:
    """Whether a backend says that it isolates."""
    return backend.capabilities.isolated
