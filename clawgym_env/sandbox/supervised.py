"""What sandboxes with a supervisor have in common: everything but how they begin and how they end.

A backend brings up `supervisor.py` as the first process of a sandbox, with a socket to the host (`Control`); from then
on commands, files, listeners and kills are requests on that socket, whatever walls the backend put up. Invariants: data
flows through pipes that the host made, never through the supervisor; `close` runs once, to its end, whoever cancels.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import folder_stream
from clawgym_env.sandbox.base import ExecResult, SandboxSpec
from clawgym_env.sandbox.completion import finished
from clawgym_env.sandbox.control import Control, Job
from clawgym_env.sandbox.pipes import InputPipe, OutputPipe
from clawgym_env.sandbox.threads import in_thread

_logger = logging.getLogger(__name__)

KILL_TIMEOUT_S = 10.0
_TIMED_OUT = 124
_COPY_TIMEOUT_S = 300.0


class SupervisedSandbox(ABC):
    """One sandbox, open once `start` has returned. A subclass begins (`_start`) and ends (`_end`) it."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._control = Control()
        self._environment: dict[str, str] = {}
        """Of every command; `_start` sets it."""
        self._lingering: set[OutputPipe] = set()
        """Pipes that daemons of finished commands still hold."""
        self._closing: asyncio.Task[None] | None = None

    @abstractmethod
    async def _start(self) -> None:
        """Bring the supervisor up and attach `_control` to it.

        Raises:
            SandboxError: it did not come up; `_end` is called then too.
        """

    @abstractmethod
    async def _end(self) -> None:
        """Kill every process and remove every trace, however far `_start` came. Called once, never cancelled."""

    async def start(self) -> Self:
        """Open the sandbox; whatever fails or is cancelled, nothing is left."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    @property
    def spec(self) -> SandboxSpec:
        """What was asked for."""
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
        environment = {**self._environment, **(env or {})}
        job: Job = ("exec", (list(argv), environment, self._resolve(cwd or self._spec.workdir)))
        return await self._run(job, stdin=stdin, timeout_s=timeout_s, max_output=max_output)

    async def read_file(self, path: str, *, max_bytes: int = 64 << 20) -> bytes:
        """Return a regular file's bytes; see `Sandbox.read_file`.

        Raises:
            OSError: as `open` would, also for what is not a regular file (EINVAL) or too large (EFBIG).
        """
        job: Job = ("read", (self._resolve(path), max_bytes))
        return _checked(await self._run(job, timeout_s=_COPY_TIMEOUT_S, max_output=max_bytes), path).stdout

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file; see `Sandbox.write_file`.

        Raises:
            OSError: as `open` and `write` would (ENOSPC on a full disk).
        """
        job: Job = ("write", (self._resolve(path), mode))
        _checked(await self._run(job, stdin=data, timeout_s=_COPY_TIMEOUT_S), path)

    async def copy_in(self, source: Path, target: str) -> None:
        """Copy a host folder's contents in; see `Sandbox.copy_in`."""
        limit = 1 << 40  # the sandbox's disk is the limit

        def feed(pipe: BinaryIO) -> None:
            os.listdir(source)  # packing takes anything, but a missing folder here is the caller's mistake
            folder_stream.pack(str(source), pipe, max_bytes=limit)

        job: Job = ("unpack", (self._resolve(target), str(source), limit))
        await self._stream(job, target, feed=feed)

    async def copy_out(self, source: str, target: Path) -> None:
        """Copy a sandbox folder's contents out; see `Sandbox.copy_out`.

        What an agent did to its folder is never an error: a folder that is gone comes out empty. A file that no right
        makes readable, or that would bring the copy over 90 % of `spec.disk_mb` (a sparse one, say), is left out with a
        warning: the copy goes into a sandbox of the same size, and the grader's own files go beside it.

        Raises:
            SandboxError: the sandbox or the disk of this machine failed.
        """
        limit = (self._spec.disk_mb << 20) * 9 // 10
        origin = self._resolve(source)

        def fetch(pipe: BinaryIO) -> None:
            try:
                skipped = folder_stream.unpack(pipe, str(target), origin=origin, max_bytes=limit)
            except (ValueError, OSError) as error:
                raise SandboxError(f"Expected the contents of {source} in {target}, got: {error}") from error
            if skipped:
                _logger.warning(
                    "Left %d files of %s behind: unreadable, too deep, or over %d MB together.",
                    skipped,
                    source,
                    limit >> 20,
                )

        await self._stream(("pack", (origin, origin, limit)), source, fetch=fetch)

    async def listen(self, port: int) -> socket.socket:
        """Return a listening socket bound inside; see `Sandbox.listen`.

        Raises:
            OSError: the port is taken, or below 1024 (nobody has the capability for those).
        """
        value, fd = await self._ask("listen", port)
        if fd is None:
            raise OSError(value, f"{os.strerror(value)}: 127.0.0.1:{port} in the sandbox")
        if (listener := _listener(fd, port)) is None:
            raise SandboxError(f"Expected a socket on 127.0.0.1:{port}, got another from the sandbox's supervisor.")
        listener.setblocking(False)
        return listener

    async def kill_all(self) -> None:
        """Kill every process but the supervisor; see `Sandbox.kill_all`."""
        await self._ask("kill_all")

    async def close(self) -> None:
        """Kill every process and remove every trace; see `Sandbox.close`."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await finished(self._closing)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _ask(self, kind: str, argument: int | None = None) -> tuple[int, int | None]:
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S):
                return await self._control.request(kind, argument)
        except TimeoutError:
            raise SandboxError(f"Expected an answer to {kind!r} within {KILL_TIMEOUT_S} s, got none.") from None

    async def _run(
        self, job: Job, *, stdin: bytes = b"", timeout_s: float | None = None, max_output: int = 1 << 20
    ) -> ExecResult:
        """Run a job on pipes of its own."""
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        stderr_read, stderr_write = os.pipe()
        feed = InputPipe(stdin_write, stdin)
        outputs = OutputPipe(stdout_read, max_output), OutputPipe(stderr_read, max_output)
        try:
            try:
                job_id, exit_code = await self._control.spawn(job, (stdin_read, stdout_write, stderr_write))
            finally:
                for fd in (stdin_read, stdout_write, stderr_write):
                    os.close(fd)
            code, timed_out = await self._wait(job_id, exit_code, timeout_s)
            stdout, stderr = (output.take() for output in outputs)
            return ExecResult(code, stdout, stderr, timed_out, sum(output.dropped for output in outputs))
        finally:
            feed.close()
            self._let_go(outputs)

    async def _wait(self, job_id: int, exit_code: asyncio.Future[int], timeout_s: float | None) -> tuple[int, bool]:
        """Wait for a job's end; at the time limit, and when cancelled, kill its tree."""
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(exit_code), False
            except TimeoutError:
                async with asyncio.timeout(KILL_TIMEOUT_S):
                    await self._control.request("kill", job_id=job_id)
                    await asyncio.shield(exit_code)
                return _TIMED_OUT, True
        except TimeoutError:
            raise SandboxError(f"Expected a command's processes to die within {KILL_TIMEOUT_S} s, got none.") from None
        except asyncio.CancelledError:
            self._control.kill_nowait(job_id)
            raise

    def _let_go(self, outputs: tuple[OutputPipe, ...]) -> None:
        self._lingering = {pipe for pipe in self._lingering if not pipe.closed}
        for output in outputs:
            if self._closing is not None:
                output.close()
            elif not output.closed:
                output.discard()
                self._lingering.add(output)

    async def _stream(
        self,
        job: Job,
        path: str,
        *,
        feed: Callable[[BinaryIO], None] | None = None,
        fetch: Callable[[BinaryIO], None] | None = None,
    ) -> None:
        """Run a job whose stdin or stdout is worked on by a thread."""
        ours, theirs = os.pipe() if fetch is not None else reversed(os.pipe())
        null = os.open(os.devnull, os.O_RDWR)
        stderr_read, stderr_write = os.pipe()
        stderr = OutputPipe(stderr_read, 4096)
        pipe = os.fdopen(ours, "rb" if fetch is not None else "wb")

        def work() -> None:
            try:
                with pipe:
                    (fetch or feed)(pipe)  # type: ignore[misc]
            except BrokenPipeError:
                pass  # the other side's error says why

        try:
            try:
                fds = (null, theirs, stderr_write) if fetch is not None else (theirs, null, stderr_write)
                job_id, exit_code = await self._control.spawn(job, fds)
            except BaseException:
                pipe.close()
                raise
            finally:
                for fd in (theirs, null, stderr_write):
                    os.close(fd)
            worker, over = in_thread(work), False
            worker.add_done_callback(lambda worker: worker.exception())  # nobody may be left to see it
            try:
                code, timed_out = await self._wait(job_id, exit_code, _COPY_TIMEOUT_S)
                over = True
            finally:
                # The job is over or killed, so the thread meets the end of its pipe; of a frozen one only at its close.
                await asyncio.wait({worker}, timeout=None if over else KILL_TIMEOUT_S)
            failure = worker.exception()
            if failure is not None and code >= 0 and not timed_out:
                raise failure  # the other side only met the end of the pipe
            _checked(ExecResult(code, b"", stderr.take(), timed_out), path)
            if failure is not None:
                raise failure
        finally:
            stderr.close()

    def _resolve(self, path: str) -> str:
        return os.path.join(self._spec.workdir, path)

    async def _close(self) -> None:
        try:
            await self._end()
        finally:
            self._control.close()
            for pipe in self._lingering:
                pipe.close()


def _listener(fd: int, port: int) -> socket.socket | None:
    """Return the socket of a descriptor that listens on a port of the loopback; close any other."""
    try:
        found = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None
    is_tcp = (found.family, found.type) == (socket.AF_INET, socket.SOCK_STREAM)
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if is_tcp and listens and found.getsockname() == ("127.0.0.1", port):
        return found
    found.close()
    return None


def _checked(result: ExecResult, path: str) -> ExecResult:
    """Turn a failed file job into the OSError that it met."""
    if result.timed_out:
        raise SandboxError(f"Expected {path} to be copied within {_COPY_TIMEOUT_S} s, got a time-out.")
    if result.exit_code != 0:
        number, _, text = result.stderr.decode(errors="replace").partition(" ")
        if number.isdigit():
            raise OSError(int(number), text, path)
        raise SandboxError(
            f"Expected {path} to be copied, got exit code {result.exit_code} from the sandbox: {number} {text}"
        )
    return result
