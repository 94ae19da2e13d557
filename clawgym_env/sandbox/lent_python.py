"""This machine's Python for containers whose image has none, or one that cannot be relied on.

A container is shown the interpreter with its libraries and their loader, so it starts on any Linux image, whatever C
library that has. It serves our supervisor; what an agent starts is the image's own. Invariant: nothing of the image is
needed, and nothing else of the host is shown.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import Mount
from clawgym_env.sandbox.bubblewrap import find_python

INSIDE = "/run/clawgym/python"
_EXTENSIONS = ("_ctypes", "_socket", "_struct", "fcntl", "resource", "select", "zlib")
"""Modules in C that the supervisor imports: they bring libraries of their own."""


def lend_python() -> tuple[tuple[str, ...], tuple[Mount, ...]]:
    """Return the command that starts Python inside, and what must be shown for it.

    Raises:
        SandboxError: the interpreter's libraries cannot be listed.
    """
    inside, mounted = find_python()
    program = Path(sys.base_prefix, "bin", Path(inside).name) if mounted else Path(inside)
    program = program.resolve()
    modules = program.parent.parent / "lib" / program.name
    libraries: dict[str, Path] = {}
    for file in (program, *modules.glob("lib-dynload/*.so")):
        if file == program or file.name.partition(".")[0] in _EXTENSIONS:
            libraries.update(_libraries(file))
    loader = next((name for name in libraries if name.startswith("ld-")), None)
    if loader is None:
        raise SandboxError(f"Expected {program} to name its loader, got {sorted(libraries)} on {platform.machine()}.")
    shown = {f"lib/{name}": path for name, path in libraries.items()}
    shown |= {f"bin/{program.name}": program, f"lib/{program.name}": modules}
    mounts = tuple(Mount(source=source, target=f"{INSIDE}/{name}") for name, source in sorted(shown.items()))
    command = (f"{INSIDE}/lib/{loader}", "--library-path", f"{INSIDE}/lib", f"{INSIDE}/bin/{program.name}")
    return command, mounts


def _libraries(program: Path) -> dict[str, Path]:
    """Return the shared libraries of a program and its loader, by name."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    found = {}
    for line in done.stdout.splitlines():
        name, _, rest = line.strip().partition(" => ")
        path = Path((rest or name).partition(" ")[0])
        if path.is_absolute():
            found[Path(name.partition(" ")[0]).name] = path.resolve()
    return found
