"""How a sandbox's supervisor is started: its files inside, and its command line, whatever backend runs it.

Invariant: what is started imports nothing but this machine's `supervisor.py`, whatever lies about inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from clawgym_env.sandbox import folder_stream, supervisor

INSIDE = "/run/clawgym"
SOCKET_FOLDER = f"{INSIDE}/host"
SOCKET_NAME = "control"


def supervisor_files() -> Iterator[tuple[Path, str]]:
    """Yield each file of the supervisor on this machine and its path inside; cached bytecode where there is some."""
    for module in (supervisor, folder_stream):
        source, cached = Path(str(module.__file__)), Path(str(module.__cached__))
        yield source, f"{INSIDE}/{source.name}"
        if cached.exists():
            yield cached, f"{INSIDE}/__pycache__/{cached.name}"


def supervisor_command(
    python: Sequence[str], *, lifetime_s: float, connects: bool = False, folders: Sequence[str] = ()
) -> list[str]:
    """Return the command line of the first process of a sandbox.

    Args:
        python: the command that starts Python inside.
        connects: its socket to the host is the one in `SOCKET_FOLDER`, else its stdin.
        folders: to make before anything else.
    """
    path = f"{SOCKET_FOLDER}/{SOCKET_NAME}" if connects else None
    call = f"supervisor.main({path!r}, lifetime_s={lifetime_s!r}, folders={tuple(folders)!r})"
    # Imported, rather than run as a script, since only an import uses cached bytecode (5 ms).
    return [*python, "-I", "-S", "-B", "-c", f"import sys; sys.path[:0] = [{INSIDE!r}]; import supervisor; {call}"]
