"""`clawgym install` and `policy`: what has to be there before a rollout."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from tyro.conf import Positional

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.errors import HarnessError


def install_command(name: Positional[str]) -> None:
    """Put a harness or a bundled MCP server into the cache, or all: clawgym install pi|claude-code|…|documents|all.

    Args:
        name: which; options as in "claude-code?version=2.0.76". Of all, what cannot be installed here is left out.
    """
    everything = [spec for spec in registry.HARNESSES if spec not in registry.NEEDS_OPTIONS]
    failed = []
    with printed("harness_adapters"):
        for spec in (*everything, *registry.MCP_SERVERS) if name == "all" else (name,):
            try:
                registry.installable(spec).install(cache_dir())
            except HarnessError as error:
                if name != "all":
                    raise
                print(f"{spec}: {error}", file=sys.stderr)
                failed.append(spec)
    if failed:
        raise HarnessError(f"Expected to install every harness, got no {', '.join(failed)}; the reasons are above.")


def policy_command(action: Positional[Literal["build"]], name: Positional[str]) -> None:
    """Make an embedded policy in the cache: clawgym policy build tiny|smollm2.

    Args:
        action: build it anew, replacing an older one.
        name: which.
    """
    print(f"{action}ing {name!r} ...", flush=True)
    print(registry.load("clawgym_env.policy:build_policy")(name, cache_dir()))


@contextmanager
def printed(*logger_names: str) -> Iterator[None]:
    """Print what loggers say of their progress, as it is."""
    handler = logging.StreamHandler(sys.stdout)
    loggers = [logging.getLogger(name) for name in logger_names]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagates) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates
