"""How the bundled document search is installed and started: the `mcp` package from PyPI, our one module beside it."""

from __future__ import annotations

from pathlib import Path

from clawgym_env.sandbox.base import Mount
from harness_adapters.launch import log_line
from harness_adapters.pypi import PypiProduct

PRODUCT = PypiProduct(
    name="documents",
    version="1",
    lock=Path(__file__).with_name("mcp_lock.txt"),
    entry="document_search.main",
    modules=(Path(__file__).with_name("document_search.py"),),
)


class DocumentSearch:
    """The server `clawgym:documents`; its only option is `--folder`, the workspace where not given."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command inside a sandbox."""
        return PRODUCT.argv

    def install(self, cache: Path) -> None:
        """Put the server into `cache`. Idempotent."""
        PRODUCT.install(cache, log_line)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Return what the sandbox must show.

        Raises:
            HarnessNotInstalled: with the command to run.
        """
        return PRODUCT.mounts(cache)
