"""Whose leftovers are these? Names that say which process made a thing, safe against reused process ids.

Control groups and scratch folders carry such a name; the next controller sweeps what dead ones left.
Invariant: what a living process owns is never taken for a leftover.
"""

from __future__ import annotations

import os
from pathlib import Path


def owner_tag() -> str:
    """Return `PID-STARTTIME` of this process; what follows in a name is free."""
    return f"{os.getpid()}-{_start_time(os.getpid())}"


def owner_alive(name: str) -> bool:
    """Whether the process in a name that begins with an owner tag still lives; True for a name that is not ours."""
    pid, _, rest = name.partition("-")
    if not pid.isdigit():
        return True
    return _start_time(int(pid)) == rest.partition("-")[0] != ""


def _start_time(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return ""
