"""What the adapters of installed products share: a product is put into the cache once and shown to every sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from clawgym_env.harness import HarnessAdapter
from clawgym_env.sandbox.base import Mount
from harness_adapters.launch import log_line


class Product(Protocol):
    """One pinned product, wherever it comes from: see `npm` and `pypi`."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command inside a sandbox."""

    def install(self, cache: Path, log: Callable[[str], None]) -> None:
        """Put the product into `cache`, a line to `log` for each step. Idempotent."""

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Return what a sandbox must show.

        Raises:
            HarnessNotInstalled: with the command to run.
        """


class InstalledHarness(HarnessAdapter):
    """An adapter whose `product` is installed and mounted as it is."""

    product: Product

    def install(self, cache: Path) -> None:
        self.product.install(cache, log_line)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return self.product.mounts(cache)
