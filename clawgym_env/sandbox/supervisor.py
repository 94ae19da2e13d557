"""PID 1 of a sandbox: starts commands for the host, kills them, tells how they ended.

Run by a backend (see `boot`) with a SOCK_SEQPACKET socket to the host, its stdin or one that it opens. The host sends
marshalled tuples `(kind, id, argument)` with file descriptors and gets back `(kind, id, value)` structs. Data never
passes through here: each command works on pipes that the host made. Every command runs under a *keeper*, a fork of this
process that adopts the command's orphans (PR_SET_CHILD_SUBREAPER), so that a daemon cannot leave its command's tree.
Invariant: whatever happens inside, this process lives until the host hangs up or the sandbox's lifetime is over, and
its end ends the pid namespace.

Stdlib only, and its private C modules at that: `socket`, `signal` or `json` would cost 5 to 12 ms each per sandbox.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _socket
import ctypes
import marshal
import os
import resource
import select
import struct
import time

REPLY = struct.Struct("<BIi")
"""kind, id, value."""
READY, EXITED, LISTENING, DONE, REFUSED = range(5)
NOT_FOUND, NOT_STARTED = 127, 126
"""Exit codes of a command that could not be started, as in a shell."""

_SIGINT, _SIGKILL, _SIGPIPE, _SIGALRM, _SIGCHLD, _SIGSTOP, _SIGXFSZ = 2, 9, 13, 14, 17, 19, 25
_SIG_DFL, _SIG_IGN = ctypes.c_void_p(0), ctypes.c_void_p(1)
_PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 4, 36
_MSG_CMSG_CLOEXEC = 0x40000000
_MAX_FDS = 4
_STATUS = struct.Struct("<i")

_libc = ctypes.CDLL(None)


class Supervisor:
    """The loop of PID 1."""

    def __init__(self, control: _socket.socket) -> None:
        self.control = control
        self.poll = select.poll()
        self.poll.register(control.fileno(), select.POLLIN)
        self.keepers: dict[int, tuple[int, int]] = {}
        """Status pipe -> (command id, keeper's pid)."""

    def serve(self, fault: int = 0) -> None:
        """Say what went wrong before, if anything, and obey until the host hangs up."""
        self.reply(READY, 0, fault)
        load_everything()
        while True:
            for fd, _ in self.poll.poll():
                if fd != self.control.fileno():
                    self.report_exit(fd)
                elif not self.obey():
                    return

    def reply(self, kind: int, job_id: int, value: int, *fds: int) -> None:
        """Send one reply."""
        rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))] if fds else []
        self.control.sendmsg([REPLY.pack(kind, job_id, value)], rights)

    def obey(self) -> bool:
        """Carry out one request; False when the host has hung up."""
        size = _socket.CMSG_SPACE(_MAX_FDS * 4)
        message, ancillary, _, _ = self.control.recvmsg(4096, size, _MSG_CMSG_CLOEXEC)
        if not message:
            return False
        fds = [fd for _, _, data in ancillary for fd in struct.unpack(f"{len(data) // 4}i", data)]
        kind, job_id, argument = marshal.loads(message)
        if kind == "spawn":
            self.spawn(job_id, fds)
        elif kind == "kill":
            for status_fd, (other, keeper) in self.keepers.items():
                if other == job_id:
                    kill_job(keeper, status_fd)
            self.reply(DONE, job_id, 0)
        elif kind == "kill_all":
            kill_all()
            self.reply(DONE, job_id, 0)
        elif kind == "listen":
            self.listen(job_id, argument)
        elif kind == "limits":
            for limit, value in argument.items():
                resource.setrlimit(limit, (value, value))
            self.reply(DONE, job_id, 0)
        for fd in fds:
            os.close(fd)
        return True

    def listen(self, job_id: int, port: int) -> None:
        """Bind 127.0.0.1:`port` in this network namespace and hand the socket to the host."""
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM, 0)
        try:
            listener.setsockopt(_socket.SOL_SOCKET, _socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(128)
            self.reply(LISTENING, job_id, 0, listener.fileno())
        except OSError as error:
            self.reply(REFUSED, job_id, error.errno or 0)
        finally:
            listener.close()

    def spawn(self, job_id: int, fds: list[int]) -> None:
        """Start a keeper and its command; `fds` are the job, stdin, stdout and stderr."""
        with open(fds[0], "rb", closefd=False) as file:
            job = marshal.loads(file.read())
        status_read, status_write = os.pipe()
        try:
            keeper = os.fork()
        except OSError as error:
            os.close(status_read)
            os.close(status_write)
            _write_all(fds[3], f"sandbox: {error.strerror}\n".encode())
            self.reply(EXITED, job_id, NOT_STARTED)
            return
        if keeper == 0:
            try:
                self.control.close()
                keep(job, fds[1:], status_write)
            finally:
                os._exit(1)
        os.close(status_write)
        self.keepers[status_read] = (job_id, keeper)
        self.poll.register(status_read, select.POLLIN)

    def report_exit(self, status_fd: int) -> None:
        """Tell the host how a command ended; a keeper that died silently was killed."""
        job_id, _ = self.keepers.pop(status_fd)
        self.poll.unregister(status_fd)
        data = os.read(status_fd, _STATUS.size)
        os.close(status_fd)
        self.reply(EXITED, job_id, _STATUS.unpack(data)[0] if data else -_SIGKILL)


def keep(job: tuple[str, object], fds: list[int], status_fd: int) -> None:
    """Run a job in a child, report its end, then stay as the parent of its orphans until the last is gone."""
    _libc.signal(_SIGCHLD, _SIG_DFL)
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = os.fork()
    except OSError as error:
        _write_all(fds[2], f"sandbox: {error.strerror}\n".encode())
        os.write(status_fd, _STATUS.pack(NOT_STARTED))
        return
    if child == 0:
        try:
            for target, fd in enumerate(fds):
                os.dup2(fd, target)
            os._exit(run(job))
        finally:
            os._exit(NOT_STARTED)
    for fd in fds:
        os.close(fd)
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            os._exit(0)
        if pid == child:
            os.write(status_fd, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(status_fd)


def run(job: tuple[str, object]) -> int:
    """Do one job on file descriptors 0, 1 and 2; errors go to 2 as `ERRNO text`, or as a shell would say it."""
    kind, argument = job
    if kind == "exec":
        return execute(*argument)  # type: ignore[misc]
    try:
        if kind == "read":
            read_file(*argument)  # type: ignore[misc]
        elif kind == "write":
            write_file(*argument)  # type: ignore[misc]
        else:
            copy_folder(kind, *argument)  # type: ignore[misc]
    except OSError as error:
        _write_all(2, f"{error.errno} {error.strerror}".encode())
        return 1
    except ValueError as error:
        _write_all(2, f"22 {error}".encode())
        return 1
    return 0


def execute(argv: list[str], env: dict[str, str], cwd: str) -> int:
    """Become the command; returns only when that fails."""
    os.setsid()
    for signal in (_SIGINT, _SIGPIPE, _SIGXFSZ):
        _libc.signal(signal, _SIG_DFL)
    try:
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        _write_all(2, f"{argv[0]}: {error.strerror}\n".encode())
        return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_STARTED


def read_file(path: str, max_bytes: int) -> None:
    """Copy a regular file to stdout."""
    import stat

    source = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    info = os.fstat(source)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(22, "not a regular file")
    left = max_bytes
    while data := os.read(source, 1 << 20):
        left -= len(data)
        if left < 0:
            raise OSError(27, f"larger than {max_bytes} bytes")
        _write_all(1, data)


def write_file(path: str, mode: int) -> None:
    """Copy stdin to a file; a link in its place is replaced, never followed."""
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    if os.path.islink(path):
        os.unlink(path)
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    while data := os.read(0, 1 << 20):
        _write_all(target, data)
    os.fchmod(target, mode)


def copy_folder(kind: str, folder: str, origin: str, max_bytes: int) -> None:
    """Pack a folder to stdout or unpack stdin into it."""
    import folder_stream  # type: ignore[import-not-found]

    if kind == "pack":
        with open(1, "wb") as output:
            folder_stream.pack(folder, output, max_bytes=max_bytes, make_readable=True)
    else:
        with open(0, "rb") as source:
            folder_stream.unpack(source, folder, origin=origin, max_bytes=max_bytes)


def kill_all() -> None:
    """Kill every process but this one and wait until they are gone; no fork slips through a kill by PID 1."""
    if os.getpid() != 1:  # run outside a pid namespace, this would end the machine's processes
        raise RuntimeError("Expected to be the first process of a sandbox, got another.")
    _kill(-1, _SIGKILL)
    for _ in range(1000):
        if not any(name.isdigit() and name != "1" for name in os.listdir("/proc")):
            return
        time.sleep(0.002)


def kill_job(keeper: int, status_fd: int) -> None:
    """Kill a keeper's tree until it reports the command's end: it may not have started the command yet."""
    for _ in range(100):
        kill_tree(keeper)
        if select.select([status_fd], [], [], 0.005)[0]:
            kill_tree(keeper)
            return
    # Stopped by somebody inside it would never report. Stopped by us it starts nothing more; its end is a report too.
    _kill(keeper, _SIGSTOP)
    kill_tree(keeper)
    _kill(keeper, _SIGKILL)


def kill_tree(keeper: int) -> None:
    """Kill every descendant of `keeper`, daemons included: first stop them all, so that none can fork away."""
    stopped: set[int] = set()
    for _ in range(1000):  # somebody inside may wake them all the time
        fresh = descendants(keeper) - stopped
        if not fresh:
            break
        for pid in fresh:
            _kill(pid, _SIGSTOP)
        stopped |= fresh
    for _ in range(1000):
        living = descendants(keeper)
        if not living:
            return
        for pid in living:
            _kill(pid, _SIGKILL)
        time.sleep(0.002)


def descendants(ancestor: int) -> set[int]:
    """Return the pids below `ancestor`, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rsplit(b")", 1)[1].split()[:2]
        except OSError:
            continue
        children.setdefault(int(parent), []).append(int(name))
        if state in b"ZX":
            zombies.add(int(name))
    found: set[int] = set()
    pending = [ancestor]
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in found:
                found.add(pid)
                pending.append(pid)
    return found - zombies


def _kill(pid: int, number: int) -> None:
    try:  # noqa: SIM105 (contextlib costs 5 ms at start)
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def load_everything() -> None:
    """Load what jobs need before the first runs, and nothing after: an agent may write to where modules would be."""
    import sys
    import warnings  # noqa: F401 (os.execvpe imports it)

    import folder_stream  # noqa: F401

    sys.path.clear()


def end_after(seconds: float) -> None:
    """End this process, whatever it waits for, once its time is over; anybody inside may send the signal before."""
    deadline = time.monotonic() + seconds

    def ring(*_: object) -> None:
        if time.monotonic() >= deadline:
            os._exit(0)

    _signal.signal(_SIGALRM, ring)
    _signal.setitimer(_signal.ITIMER_REAL, seconds + 0.001, 1.0)


def main(address: str | None = None, *, lifetime_s: float, folders: tuple[str, ...] = ()) -> None:
    """Serve the host on the socket at `address`, or on the one that is stdin.

    Args:
        folders: made first, where they are missing.
    """
    if address is None:
        control = _socket.socket(fileno=os.dup(0))
    else:
        control = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0)
        control.connect(address)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, control.fileno() + 64)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.umask(0o022)
    # Nobody inside may read or write this process's memory or file descriptors, nor interrupt it.
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    _libc.signal(_SIGINT, _SIG_IGN)
    # Orphans of killed keepers come here; ignored children are reaped by the kernel.
    _libc.signal(_SIGCHLD, _SIG_IGN)
    end_after(lifetime_s)
    fault = 0
    try:
        for folder in folders:
            os.makedirs(folder, exist_ok=True)
    except OSError as error:
        fault = error.errno or 0
    Supervisor(control).serve(fault)
