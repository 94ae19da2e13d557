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


def session_id(number: int) -> str:
    """Return the id of a sandbox's session: the same in every rollout, since it gets into prompts through paths."""
    return f"c1a76000-0000-4000-8000-{number + 1:012d}"


def log_line(line: str) -> None:
    """Log one step of an install that nobody watches."""
    _logger.info("%s", line)
