"""A sandbox that records what an adapter does to it and answers from a script."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import WORKDIR, ExecResult, SandboxSpec


@dataclass(frozen=True)
class Exec:
    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str | None
    stdin: bytes


@dataclass
class FakeSandbox:
    """Satisfies `sandbox.base.Sandbox` as far as adapters go."""

    results: list[ExecResult] = field(default_factory=list)
    execs: list[Exec] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    spec: SandboxSpec = field(default_factory=SandboxSpec)

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
        self.execs.append(Exec(tuple(argv), dict(env or {}), cwd, stdin))
        return self.results.pop(0) if self.results else ExecResult(0, b"", b"")

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        self.files[path] = data

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    async def copy_in(self, source: Path, target: str) -> None:
        raise NotImplementedError

    async def copy_out(self, source: str, target: Path) -> None:
        raise NotImplementedError

    async def listen(self, port: int) -> socket.socket:
        raise NotImplementedError

    async def kill_all(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


CONTEXT = HarnessContext(
    instruction="@- Écris hi.",
    base_url="http://127.0.0.1:8080/r/k3y",
    api_key="sk-dummy",
    model="policy",
    workdir=WORKDIR,
    context_length=32_768,
    max_tokens=2048,
    wall_clock_s=300.0,
    seed=7,
)
