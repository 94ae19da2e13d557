"""Whose leftovers are these? Names that say which process made a thing, safe against reused process ids.

Control groups, scratch folders and the labels of containers carry such a name; the reaper removes what dead processes
left. Invariant: what a living process owns is never taken for a leftover, and neither is what cannot be known: the
name of a process in another pid namespace, or of another boot or machine.
"""

from __future__ import annotations

import os
from pathlib import Path


def owner_tag() -> str:
    """Return `PID-STARTTIME-SCOPE` of this process; what follows in a name, after a dash, is free."""
    return f"{os.getpid()}-{_start_time(os.getpid())}-{owner_scope()}"


def owner_scope() -> str:
    """Return where a process id means the same process: this boot of this kernel, this pid namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return f"{boot}.{os.stat('/proc/self/ns/pid').st_ino}"


def owner_alive(name: str) -> bool:
    """Whether the process in a name that begins with an owner tag still lives.

    True also where that cannot be known: a name that is not ours, or of another scope.
    """
    pid, started, scope, *_ = [*name.split("-"), "", "", ""]
    if not (pid.isdigit() and started.isdigit()) or scope != owner_scope():
        return True
    return _start_time(int(pid)) in (started, None)


def owner_is_elsewhere(name: str) -> bool:
    """Whether a name begins with an owner tag of another scope."""
    pid, started, scope, *_ = [*name.split("-"), "", "", ""]
    return pid.isdigit() and started.isdigit() and "." in scope and scope != owner_scope()


def _start_time(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot; empty when it is gone, None when that is a secret."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    except OSError:
        return None
    return "" if state in "ZX" else fields[18]  # killed, and only waits for its parent to notice
