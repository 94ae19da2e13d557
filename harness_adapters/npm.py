"""Harnesses that npm delivers: how one is put into the install cache and shown to a sandbox.

Install scripts never run: none of the supported products needs one, and they are other people's code outside any
sandbox. Registry, proxy and certificates come from the user's own npm settings.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from clawgym_env.errors import HarnessError, HarnessNotInstalled
from clawgym_env.sandbox.base import Mount
from harness_adapters.launch import OPT
from harness_adapters.node import PROGRAM, install_node, node_folder, node_mount
from harness_adapters.staging import LINK, VERIFY_S, staged, tail


@dataclass(frozen=True, slots=True)
class NpmProduct:
    """One pinned product."""

    name: str
    version: str
    package: str
    program: str
    """What is run, relative to the install folder, as a pattern: a script for node, or (`native`) an executable. Where
    several match, as builds for older processors do, the first that starts here is taken."""
    native: bool = False
    spec: str = ""
    """As in `clawgym install SPEC`, where the name alone means another version."""

    @property
    def root(self) -> str:
        """The install folder inside every sandbox."""
        return f"{OPT}/{self.name}-{self.version}"

    @property
    def argv(self) -> tuple[str, ...]:
        """The command inside a sandbox."""
        program = f"{self.root}/{LINK}"
        return (program,) if self.native else (PROGRAM, program)

    def folder(self, cache: Path) -> Path:
        """Return where the product is kept, installed or not."""
        return cache / "harnesses" / f"{self.name}-{self.version}"

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Return what a sandbox must show.

        Raises:
            HarnessNotInstalled: with the command to run.
        """
        if not self.folder(cache).is_dir() or not node_folder(cache).is_dir():
            raise HarnessNotInstalled(self.spec or self.name)
        return (node_mount(cache), Mount(source=self.folder(cache), target=self.root))

    def install(self, cache: Path, log: Callable[[str], None]) -> None:
        """Put the product into `cache`; at once where it is there.

        Raises:
            HarnessError: with the end of npm's output, or the product does not start on this machine.
        """
        node = install_node(cache, log)
        with staged(self.folder(cache), log) as stage:
            if stage is None:
                log(f"{self.name} {self.version} is installed in {self.folder(cache)}.")
                return
            log(f"{self.name} {self.version}: fetching {self.package} with npm; this may take minutes.")
            (stage / "package.json").write_text('{"private": true}\n')
            npm = [str(node / "bin/node"), str(node / "lib/node_modules/npm/bin/npm-cli.js"), "install"]
            flags = ["--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund", "--no-update-notifier"]
            argv = [*npm, *flags, "--prefix", str(stage), f"{self.package}@{self.version}"]
            done = subprocess.run(argv, capture_output=True, stdin=subprocess.DEVNULL, cwd=stage, check=False)
            if done.returncode != 0:
                raise HarnessError(
                    f"Expected npm to install {self.package}@{self.version}, got exit code {done.returncode}. "
                    f"The end of its output:\n{tail(done.stdout + done.stderr)}"
                )
            self._link(stage, node)

    def _link(self, stage: Path, node: Path) -> None:
        """Link the first match that starts on this machine.

        Raises:
            HarnessError: none does.
        """
        fault: str | None = (
            f"Expected a {self.program} in {self.package}@{self.version}, got none. "
            "There may be no build for this processor."
        )
        link = stage / LINK
        for found in sorted(stage.glob(self.program)):
            link.symlink_to(found.relative_to(stage))
            fault = self._fault(link, node)
            if fault is None:
                return
            link.unlink()
        raise HarnessError(fault)

    def _fault(self, program: Path, node: Path) -> str | None:
        """Return why the product does not start on this machine; None where it does."""
        command = [program] if self.native else [node / "bin/node", program]
        with tempfile.TemporaryDirectory() as home:
            env = {"PATH": os.defpath, "HOME": home}
            try:
                done = subprocess.run(
                    [*command, "--version"], capture_output=True, stdin=subprocess.DEVNULL, env=env, timeout=VERIFY_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"Expected {self.name} to start here, got: {error}"
        if self.version.encode() not in done.stdout + done.stderr:
            return f"Expected {self.name} --version to print {self.version}, got: {tail(done.stdout + done.stderr)}"
        return None
