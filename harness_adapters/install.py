"""`clawgym install NAME`: puts a harness into the install cache.

Each adapter knows its own product; this is only the list of those that need installing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clawgym_env.errors import HarnessError


def install(name: str, cache: Path, *, log: Callable[[str], None]) -> None:
    """Install one harness, or every one for "all". Idempotent; `log` gets a line per step.

    Raises:
        HarnessError: an unknown name, or what pip, npm or the product said.
    """
    from harness_adapters import claude_code, openclaw, pi

    products = {module.PRODUCT.name: module.PRODUCT for module in (pi, claude_code, openclaw)}
    if name != "all" and name not in products:
        raise HarnessError(f"Expected a harness to install out of all, {', '.join(products)}, got {name!r}.")
    for product in products.values() if name == "all" else (products[name],):
        product.install(cache, log)
