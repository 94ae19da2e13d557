"""Where an adapter finds and leaves things inside a sandbox.

The same paths in every rollout and on every machine, since they leak into prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from clawgym_env.messages import Json

HOME = "/root"
OPT = "/opt/clawgym"


def json_lines(output: bytes) -> Iterator[dict[str, Json]]:
    """Yield every line of a product's output that is a JSON object; other lines are noise."""
    for line in output.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
