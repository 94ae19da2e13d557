"""Fakes at the two outer borders of a rollout, for tests of everything in between, ours and yours.

`FakeBackend` opens sandboxes that are temporary folders, `InProcessHarness` is an agent that is one coroutine; proxy,
runner, pool, tree and store between them are the real ones. Nothing here isolates anything: trusted code only.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import httpx

from clawgym_env.errors import SandboxError
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.sandbox.base import Capabilities, ExecResult, Sandbox, SandboxSpec

ANSWER_FILE = "answer.txt"


class FakeSandbox:
    """A folder of the host that plays the sandbox's file system; commands run on the host, in their own sessions."""

    def __init__(self, spec: SandboxSpec, on_close: Callable[[FakeSandbox], None]) -> None:
        self._spec = spec
        self._on_close = on_close
        self._root = Path(tempfile.mkdtemp(prefix="clawgym-fake-"))
        self._processes: set[asyncio.subprocess.Process] = set()
        self.port = 0
        """Where `listen` really listens: fakes share the host's network, so each takes a free port."""
        self._at(spec.workdir).mkdir(parents=True)

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

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
        home = {"HOME": str(self._at("/root")), "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**home, **self._spec.env, **(env or {})},
            cwd=self._at(cwd or self._spec.workdir),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._processes.add(process)
        try:
            async with asyncio.timeout(timeout_s):
                stdout, stderr = await process.communicate(stdin)
        except TimeoutError:
            return ExecResult(124, b"", b"", timed_out=True)
        finally:
            await self._kill(process)
        dropped = max(len(stdout) - max_output, 0) + max(len(stderr) - max_output, 0)
        return ExecResult(process.returncode or 0, stdout[:max_output], stderr[:max_output], dropped_bytes=dropped)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        file = self._at(path)
        if not file.is_file():
            raise SandboxError(f"Expected a file at {path}, got none.")
        with file.open("rb") as handle:
            return handle.read(max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        file = self._at(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(mode)

    async def copy_in(self, source: Path, target: str) -> None:
        shutil.copytree(source, self._at(target), dirs_exist_ok=True, symlinks=True)

    async def copy_out(self, source: str, target: Path) -> None:
        shutil.copytree(self._at(source), target, dirs_exist_ok=True, symlinks=True)

    async def listen(self, port: int) -> socket.socket:
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        self.port = listener.getsockname()[1]
        return listener

    async def kill_all(self) -> None:
        for process in list(self._processes):
            await self._kill(process)

    async def close(self) -> None:
        await self.kill_all()
        shutil.rmtree(self._root, ignore_errors=True)
        self._on_close(self)

    def _at(self, path: str) -> Path:
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if ".." in parts:
            raise SandboxError(f"Expected a path without '..', got {path!r}.")
        return self._root.joinpath(*parts)

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        self._processes.discard(process)
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            await process.wait()


class FakeBackend:
    """Opens `FakeSandbox`es and knows which are alive."""

    name = "fake"
    capabilities = Capabilities(memory="none", processes="none", cpus="none", isolated=False)

    def __init__(self) -> None:
        self.alive: set[FakeSandbox] = set()
        self.most_alive = 0
        """The largest number of sandboxes ever open at once."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        sandbox = FakeSandbox(spec, self.alive.discard)
        self.alive.add(sandbox)
        self.most_alive = max(self.most_alive, len(self.alive))
        return sandbox

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        return []


Ask: TypeAlias = Callable[[str], Awaitable[str]]
"""Says something to the model as the user and returns the reply's text; the conversation is kept."""
Act: TypeAlias = Callable[[Ask, Sandbox, HarnessContext], Awaitable[str]]
"""What the agent does; it returns the answer shown to the user."""


async def answer_once(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    """Pass the instruction on and keep the reply in `answer.txt`."""
    answer = await ask(context.instruction)
    await sandbox.write_file(f"{context.workdir}/{ANSWER_FILE}", answer.encode())
    return answer


class InProcessHarness(HarnessAdapter):
    """A harness without a process: `act` talks to the proxy over a real socket from the event loop."""

    name = "in-process"
    version = "1"
    dialect: Dialect = "chat"

    def __init__(self, act: Act = answer_once) -> None:
        self._act = act

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        """Run `act`; needs a `FakeSandbox`, whose port is reachable from this process."""
        if not isinstance(sandbox, FakeSandbox):
            raise SandboxError(f"Expected a FakeSandbox, got {type(sandbox).__name__}. Pass sandbox=FakeBackend().")
        key = context.base_url.rpartition("/")[2]
        url = f"http://127.0.0.1:{sandbox.port}/r/{key}/v1/chat/completions"
        history: list[dict[str, str]] = []
        async with httpx.AsyncClient(timeout=context.wall_clock_s, trust_env=False, verify=False) as client:

            async def ask(text: str) -> str:
                history.append({"role": "user", "content": text})
                body = {"model": context.model, "messages": history, "max_tokens": context.max_tokens}
                response = await client.post(url, json=body)
                response.raise_for_status()
                reply = str(response.json()["choices"][0]["message"]["content"] or "")
                history.append({"role": "assistant", "content": reply})
                return reply

            answer = await self._act(ask, sandbox, context)
        return HarnessExit(0, answer.encode(), b"", answer)


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits for a lazy parent to collect it does not."""
    status = _status(pid)
    return status is not None and status[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Return the ids of a process's living children, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))) is not None:
            children.setdefault(status[1], []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        fresh = children.get(todo.pop(), [])
        found.update(fresh)
        todo += fresh
    return {one for one in found if is_running(one)}


def _status(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and its parent, None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])
