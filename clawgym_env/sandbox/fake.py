"""A sandbox without walls: a temporary folder plays the file system, commands run on the host as they are.

For tests of what uses sandboxes (`clawgym_env.testing` is where to import it from); no root, no bubblewrap, no Docker.
Keeps the contract but for what `Capabilities` denies it: no limits and no isolation, so trusted code only. Commands see
the host's file system: they reach the sandbox's files by relative paths and through HOME, not by absolute ones.
Invariant: `close` leaves no process and no file.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import folder_stream
from clawgym_env.sandbox.base import Capabilities, ExecResult, Sandbox, SandboxSpec
from clawgym_env.sandbox.bubblewrap import HOME, base_environment
from clawgym_env.sandbox.completion import finished
from clawgym_env.sandbox.pipes import InputPipe, OutputPipe
from clawgym_env.sandbox.supervisor import NOT_FOUND, NOT_STARTED
from clawgym_env.sandbox.threads import in_thread
from clawgym_env.scratch import make_scratch_folder

_logger = logging.getLogger(__name__)

_MARK = "CLAWGYM_FAKE"
"""Environment variable `FOLDER/COMMAND`: daemons leave their session, group and parents, but keep it."""
_TIMED_OUT = 124
_UNPRIVILEGED_PORTS = range(1024, 65536)


class FakeSandbox:
    """A folder of the host that plays the sandbox's file system. Made by `FakeBackend.open`."""

    def __init__(self, spec: SandboxSpec, on_close: Callable[[FakeSandbox], None]) -> None:
        self._spec = spec
        self._on_close = on_close
        self._root = os.path.realpath(make_scratch_folder("fake"))
        self._environment = {**base_environment(sys.executable), "HOME": self._root + HOME, **spec.env}
        self._commands = itertools.count()
        self._lingering: set[OutputPipe] = set()
        """Pipes that daemons of finished commands still hold."""
        self._ports: set[int] = set()
        self._closing: asyncio.Task[None] | None = None
        self.port = 0
        """Where `listen` really listens: fakes share the host's network, so each takes a free port."""
        for folder in (HOME, "/tmp", spec.workdir, *spec.folders):
            os.makedirs(self._path(folder), exist_ok=True)
        for mount in spec.mounts:
            target = self._path(mount.target)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.symlink(mount.source.resolve(), target)

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
        """Run a command to its end; see `Sandbox.exec`. Daemons that it leaves go on running."""
        self._must_be_open()
        mark = f"{self._root}/{next(self._commands)}"
        environment = {**self._environment, **(env or {}), _MARK: mark}
        ends = [os.pipe() for _ in range(3)]
        feed = InputPipe(ends[0][1], stdin)
        outputs = OutputPipe(ends[1][0], max_output), OutputPipe(ends[2][0], max_output)
        try:
            try:
                process = await asyncio.create_subprocess_exec(
                    *argv,
                    env=environment,
                    cwd=self._path(cwd or ""),
                    stdin=ends[0][0],
                    stdout=ends[1][1],
                    stderr=ends[2][1],
                    start_new_session=True,
                )
            except OSError as error:
                code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED
                return ExecResult(code, b"", f"{argv[0]}: {error.strerror}\n".encode())
            finally:
                for fd in (ends[0][0], ends[1][1], ends[2][1]):
                    os.close(fd)
            try:
                async with asyncio.timeout(timeout_s):
                    code, timed_out = await process.wait(), False
            except TimeoutError:
                code, timed_out = _TIMED_OUT, True
                await _kill(mark)
            if self._closing is not None:
                raise SandboxError("The sandbox was closed.")
            stdout, stderr = (output.take() for output in outputs)
            return ExecResult(code, stdout, stderr, timed_out, sum(output.dropped for output in outputs))
        except asyncio.CancelledError:
            await _kill(mark)
            raise
        finally:
            feed.close()
            self._let_go(outputs)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Return a regular file's bytes; see `Sandbox.read_file`."""
        self._must_be_open()
        return _read(Path(self._inside(path)), max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file; see `Sandbox.write_file`."""
        self._must_be_open()
        folder, name = os.path.split(self._absolute(path))
        _write(Path(self._inside(folder), name), data, mode)

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a host folder's contents in; see `Sandbox.copy_in`."""
        self._must_be_open()
        os.listdir(source)
        await self._copy(str(source), self._inside(target), max_bytes=1 << 40)

    async def copy_out(self, source: str, target: Path) -> None:
        """Copy a sandbox folder's contents out; see `Sandbox.copy_out`."""
        self._must_be_open()
        limit = (self._spec.disk_mb << 20) * 9 // 10
        try:
            folder = self._inside(source)
        except FileNotFoundError:
            folder = os.devnull  # no folder comes out empty
        if skipped := await self._copy(folder, str(target), max_bytes=limit, make_readable=True):
            _logger.warning("Left %d files of %s behind: unreadable, too deep, or too large.", skipped, source)

    async def listen(self, port: int) -> socket.socket:
        """Return a listening socket on a free port of the host, `self.port`; see `Sandbox.listen`."""
        self._must_be_open()
        if port in self._ports or port not in _UNPRIVILEGED_PORTS:
            number = errno.EADDRINUSE if port in self._ports else errno.EACCES
            raise OSError(number, f"{os.strerror(number)}: 127.0.0.1:{port} in the sandbox")
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        listener.setblocking(False)
        self._ports.add(port)
        self.port = listener.getsockname()[1]
        return listener

    async def kill_all(self) -> None:
        """Kill every process that a command left; see `Sandbox.kill_all`."""
        self._must_be_open()
        await _kill(self._root)

    async def close(self) -> None:
        """Kill every process and remove every file; see `Sandbox.close`."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await finished(self._closing)

    async def _close(self) -> None:
        await _kill(self._root)
        for pipe in self._lingering:
            pipe.close()
        # Not shutil: it gives up on what is nested deeper than Python recurses, or forbidden to its owner.
        remove = 'rm -rf "$1" 2>/dev/null || { chmod -R u+rwX "$1"; rm -rf "$1"; }'
        await in_thread(lambda: subprocess.run(["sh", "-c", remove, "sh", self._root], check=True))
        self._on_close(self)

    async def _copy(self, source: str, target: str, *, max_bytes: int, make_readable: bool = False) -> int:
        """Copy a folder's contents by the real sandboxes' stream: the same is left out. Return how many files."""

        def work() -> int:
            with tempfile.TemporaryFile() as stream:
                folder_stream.pack(source, stream, max_bytes=max_bytes, make_readable=make_readable)
                stream.seek(0)
                return folder_stream.unpack(stream, target, origin=source, max_bytes=max_bytes)

        return await finished(in_thread(work))

    def _let_go(self, outputs: tuple[OutputPipe, ...]) -> None:
        self._lingering = {pipe for pipe in self._lingering if not pipe.closed}
        for output in outputs:
            if self._closing is not None:
                output.close()
            elif not output.closed:
                output.discard()
                self._lingering.add(output)

    def _must_be_open(self) -> None:
        if self._closing is not None:
            raise SandboxError("Expected an open sandbox, got one that was closed.")

    def _absolute(self, path: str) -> str:
        return os.path.normpath(os.path.join("/", self._spec.workdir, path))

    def _path(self, path: str) -> str:
        """Return where the host has a path of the sandbox, links not followed."""
        return self._root + self._absolute(path)

    def _inside(self, path: str) -> str:
        """Return the end of a path's links.

        Raises:
            FileNotFoundError: it lies outside the sandbox.
        """
        found = os.path.realpath(self._path(path))
        homes = (self._root, *(str(mount.source.resolve()) for mount in self._spec.mounts))
        if not any(found == home or found.startswith(f"{home}/") for home in homes):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return found


class FakeBackend:
    """Opens `FakeSandbox`es and knows which are alive."""

    name = "fake"
    capabilities = Capabilities(memory="none", processes="none", cpus="none", isolated=False)

    def __init__(self) -> None:
        self.alive: set[FakeSandbox] = set()
        self.most_alive = 0
        """The largest number of sandboxes ever open at once."""

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """Open a sandbox; see `SandboxBackend.open`."""
        if spec.image is not None:
            raise SandboxError(f"Expected a task without an image for the fake sandbox, got {spec.image}.")
        for mount in spec.mounts:
            if not mount.source.exists():
                raise SandboxError(f"Expected the mount {mount.source} to exist, got nothing there.")
        sandbox = FakeSandbox(spec, self.alive.discard)
        self.alive.add(sandbox)
        self.most_alive = max(self.most_alive, len(self.alive))
        return sandbox

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        """Remove nothing: the folders of dead processes are scratch folders, which the reaper sweeps."""
        return []


def _read(file: Path, max_bytes: int) -> bytes:
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    with file.open("rb") as source:
        data = source.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes} bytes", str(file))
    return data


def _write(file: Path, data: bytes, mode: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.is_symlink():
        file.unlink()
    target = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o600)
    with open(target, "wb") as handle:
        handle.write(data)
        os.fchmod(target, mode)


async def _kill(mark: str) -> None:
    """Kill the processes of one command, or of all commands of a sandbox, and wait until they are gone."""
    quiet = 0
    while quiet < 2:  # one that is just becoming another program shows no environment
        pids = _marked(mark)
        quiet = 0 if pids else quiet + 1
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.001)


def _marked(mark: str) -> list[int]:
    """Return the processes that carry a mark or one below it; none of them is a zombie, which carries nothing."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError):
            variables = Path("/proc", name, "environ").read_bytes().split(b"\0")
            if any(variable == wanted or variable.startswith(wanted + b"/") for variable in variables):
                found.append(int(name))
    return found
