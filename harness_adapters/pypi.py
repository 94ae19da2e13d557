"""Harnesses that PyPI delivers: how one is put into the install cache and started inside a sandbox.

A product runs on the sandbox's own Python and exactly the packages of its lock file, as wheels: nothing is built and
no package's code runs while they are fetched. Index, proxy and certificates come from the user's own pip settings.
Invariant: what an agent runs finds the packages neither in its environment nor in its Python.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import HarnessError, HarnessNotInstalled
from clawgym_env.sandbox.base import Mount
from clawgym_env.sandbox.bubblewrap import find_python
from harness_adapters.launch import OPT
from harness_adapters.staging import LINK, VERIFY_S, staged, tail

SITE = "packages"
# Importing thousands of modules makes no garbage worth looking for: mini-swe-agent starts a fifth sooner without.
LAUNCHER = """\
import gc, os, sys
gc.disable()
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "{site}"))
import {imports}
gc.enable()
sys.exit({call}())
"""


@dataclass(frozen=True, slots=True)
class PypiProduct:
    """One pinned product."""

    name: str
    version: str
    lock: Path
    """Every package with its exact version, one a line, as pip reads it."""
    entry: str
    """The command line's function, as `package.module.function`."""
    preload: tuple[str, ...] = ()
    """Modules that every run wants but imports late."""
    modules: tuple[Path, ...] = ()
    """Files of ours that are put beside the packages."""

    @property
    def root(self) -> str:
        """The install folder inside every sandbox."""
        return f"{OPT}/{self.name}-{self.version}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command inside a sandbox; isolated, since a task's files are none of the product's modules."""
        inside, _ = find_python()
        return (inside, "-I", "-S", f"{self.root}/{LINK}")

    def folder(self, cache: Path) -> Path:
        """Return where the product is kept, installed or not: wheels are for one Python."""
        return cache / "harnesses" / f"{self.name}-{self.version}-{host_python().name}"

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Return what a sandbox must show.

        Raises:
            HarnessNotInstalled: with the command to run.
        """
        if not self.folder(cache).is_dir():
            raise HarnessNotInstalled(self.name)
        return (Mount(source=self.folder(cache), target=self.root),)

    def install(self, cache: Path, log: Callable[[str], None]) -> None:
        """Put the product into `cache`; at once where it is there.

        Raises:
            HarnessError: with the end of pip's output, or the product does not start on this machine.
        """
        with staged(self.folder(cache), log) as stage:
            if stage is None:
                log(f"{self.name} {self.version} is installed in {self.folder(cache)}.")
                return
            log(f"{self.name} {self.version}: fetching from PyPI; this may take minutes.")
            self._fetch(stage / SITE)
            for file in self.modules:
                shutil.copy(file, stage / SITE)
            module = self.entry.rpartition(".")[0]
            text = LAUNCHER.format(site=SITE, imports=", ".join((module, *self.preload)), call=self.entry)
            (stage / LINK).write_text(text)
            # A sandbox shows the folder read-only, so bytecode is made now or anew in every run.
            subprocess.run([str(host_python()), "-m", "compileall", "-qq", "-j", "0", str(stage / SITE)], check=False)
            self._verify(stage)

    def _fetch(self, folder: Path) -> None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        wanted = ["--no-deps", "--only-binary", ":all:", "--python-version", host_python().name.removeprefix("python")]
        argv = [*pip, *wanted, "--target", str(folder), "--requirement", str(self.lock)]
        done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, check=False)
        if done.returncode != 0:
            raise HarnessError(
                f"Expected pip to install {self.lock.name} for {host_python()}, got exit code {done.returncode}. "
                f"The end of its output:\n{tail(done.stdout + done.stderr)}"
            )

    def _verify(self, stage: Path) -> None:
        command = [str(host_python()), "-I", "-S", str(stage / LINK), "--help"]
        with tempfile.TemporaryDirectory() as home:
            env = {"PATH": os.defpath, "HOME": home}
            try:
                done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=VERIFY_S)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise HarnessError(f"Expected {self.name} to start here, got: {error}") from error
        if done.returncode != 0:
            raise HarnessError(f"Expected {self.name} --help to work here, got: {tail(done.stdout + done.stderr)}")


def host_python() -> Path:
    """Return the sandbox's Python as this machine sees it; its last part is as in "python3.11"."""
    inside, mounted = find_python()
    return Path(sys.base_prefix, "bin", Path(inside).name) if mounted else Path(inside).resolve()
