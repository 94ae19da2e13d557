"""Texts with placeholders, from which the `command` adapter makes a command line.

`{name}` becomes a value and `{name:json}` the same as JSON, quotes included; a doubled `{{name}}` stays as `{name}`,
and braces around anything but a name are just braces, so JSON and shell need no escaping.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

_PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)(:json)?\}")


def placeholders(template: str) -> set[str]:
    """Return the names a template asks for."""
    return {match[2] for match in _PLACEHOLDER.finditer(template) if match[2] is not None}


def fill(template: str, values: Mapping[str, object]) -> str:
    """Return a template with its placeholders filled in.

    Raises:
        KeyError: there is no such value.
    """

    def value(match: re.Match[str]) -> str:
        literal, name, as_json = match.groups()
        if literal is not None:
            return f"{{{literal}}}"
        return json.dumps(values[name], ensure_ascii=False) if as_json else str(values[name])

    return _PLACEHOLDER.sub(value, template)
