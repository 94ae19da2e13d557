"""The sandbox contract: a throw-away machine in which one harness run (or one grader) happens.

The runner opens one per rollout, an adapter runs the harness in it, the runner copies the workspace out, closes it,
and a fresh one is opened for the grader. Invariant: nothing of a sandbox survives `close`, and no address but the
listener made by `listen` is reachable from inside.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

WORKDIR = "/root/.openclaw/workspace"
"""Where every ClawGym task lives, in every sandbox: paths leak into prompts."""


class Mount(BaseModel):
    """A host folder or file shown read-only inside the sandbox."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Path
    target: str


class Image(BaseModel):
    """The file system a task brings along: a container image by name, or a folder with a `Dockerfile` to build."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str | None = None
    build: Path | None = None
    writable: bool = False
    """The whole file system may be written, not only HOME, the workspace and /tmp: tasks that install packages."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.name is None) == (self.build is None):
            raise ValueError(f"Expected an image to have a name or a folder to build, got {self.name!r}, {self.build}.")
        return self


class SandboxSpec(BaseModel):
    """What a task asks of its sandbox. Limits hold for the whole process tree where the backend can."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    workdir: str = WORKDIR
    image: Image | None = None
    """None: the backend's own. A backend without images refuses any other."""
    folders: tuple[str, ...] = ()
    """Absolute folders outside the workspace that must exist, empty and writable (`/tests`, `/logs`)."""
    memory_mb: int = Field(default=2048, ge=64)
    """Of its processes; what files on disks in memory take comes on top, as far as `disk_mb` allows."""
    max_processes: int = Field(default=512, ge=8)
    disk_mb: int = Field(default=512, ge=16)
    """Bound on what HOME (the workspace included) and /tmp may each hold."""
    cpus: float = Field(default=2.0, gt=0.0)
    mounts: tuple[Mount, ...] = ()
    env: Mapping[str, str] = Field(default_factory=dict)
    lifetime_s: float = Field(default=7200.0, gt=0.0)
    """After this the reaper may remove it, whoever owns it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the limits of a `SandboxSpec` mean with one backend on this machine."""

    memory: Literal["tree", "process", "none"]
    processes: Literal["tree", "namespace", "none"]
    """`namespace`: counted per sandbox by kernels from 5.14 on, per user before. The kernel never counts root's."""
    cpus: Literal["tree", "none"]
    isolated: bool = True
    """False: no security border at all, for trusted code in unit tests."""
    images: bool = False
    """Whether `SandboxSpec.image` is understood."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The end of one command inside a sandbox."""

    exit_code: int
    """Negative: killed by that signal. 124 with `timed_out`."""
    stdout: bytes
    """At most `max_output` bytes: the head is kept, the rest is dropped and counted."""
    stderr: bytes
    timed_out: bool = False
    dropped_bytes: int = 0


@runtime_checkable
class Sandbox(Protocol):
    """One open sandbox. `await backend.open(spec)` makes it; whoever opened it closes it."""

    @property
    def spec(self) -> SandboxSpec: ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        max_output: int = 4 << 20,
    ) -> ExecResult:
        """Run a command to its end. At a timeout the command's whole process tree is killed.

        Args:
            argv: the program is searched in the sandbox's PATH.
            env: added to the sandbox's environment (HOME, PATH, LANG and the spec's `env`).
            cwd: defaults to the spec's `workdir`, and is relative to it.
        """

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Return a regular file's bytes; links are not followed out of the sandbox."""

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file, making its parent folders; a link in its place is replaced."""

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a host folder's contents into the sandbox folder `target` (made if missing)."""

    async def copy_out(self, source: str, target: Path) -> None:
        """Copy a sandbox folder's contents to the host folder `target`: regular files, folders and links that stay
        inside; no devices, fifos, setuid bits or links that lead out.

        Never an error for what an agent did to the folder: one that is gone comes out empty, and what cannot be read or
        would not fit into a sandbox of the same spec is left out with a warning.
        """

    async def listen(self, port: int) -> socket.socket:
        """Return a listening TCP socket bound to 127.0.0.1:`port` *inside* the sandbox, accepted on by the host."""

    async def kill_all(self) -> None:
        """Kill every process of the sandbox but keep its files: the harness is over, the grader may look."""

    async def close(self) -> None:
        """Kill every process and remove every trace. Idempotent, shielded from cancellation, verified."""


@runtime_checkable
class SandboxBackend(Protocol):
    """Opens sandboxes of one kind."""

    name: str

    @property
    def capabilities(self) -> Capabilities:
        """How strong the limits are here."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox.

        Raises:
            SandboxError: with what this machine lacks and how to get it.
        """

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        """Remove what dead controllers left and what is past its lifetime; return the names of what was removed.

        Never touches what a living controller owns. Not an error where the backend cannot run: nothing was left then.
        Two reapers at once are none either: what one finds gone the other removed.

        Args:
            dry_run: only return the names of what would be removed.
        """
