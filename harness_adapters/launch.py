"""Where an adapter finds and leaves things inside a sandbox.

The same paths in every rollout and on every machine, since they leak into prompts.
"""

from __future__ import annotations

import logging

HOME = "/root"
OPT = "/opt/clawgym"

_logger = logging.getLogger(__name__)


def no_command(instruction: str) -> str:
    """Return an instruction that products with slash commands pass on: a first line of "/new" would ask no model."""
    return f"\n{instruction}" if instruction.startswith("/") else instruction


def log_line(line: str) -> None:
    """Log one step of an install that nobody watches."""
    _logger.info("%s", line)
