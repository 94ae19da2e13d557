"""Tool calls as text: reading a call out of what a policy wrote, and its arguments back into JSON text.

Used by the reply parsers and by `rendering.parse_reply`. Invariant: nothing a policy said is lost. What does not parse
stays as it was written, and every text that comes out can be encoded.
"""

from __future__ import annotations

import json
import re

from clawgym_env.messages import well_formed

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*(.*)', re.DOTALL)


def object_or_text(arguments: str) -> dict[str, object] | str:
    """Return JSON text as the object it is, or unchanged when it is none. Blank text is the empty object."""
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def arguments_text(arguments: object, raw: str | None = None) -> str:
    """Return arguments as JSON text that UTF-8 can carry; out of `raw` where they nest too deeply to be written."""
    if isinstance(arguments, str):
        return well_formed(arguments)
    value = arguments if arguments is not None else {}
    try:
        text = json.dumps(value, ensure_ascii=False)
        return text if well_formed(text) == text else json.dumps(value)
    except RecursionError:
        if raw is None:
            raise
        return recovered_arguments(raw)


def recovered_name(raw: str) -> str | None:
    """Return the name in the text of a call that is no JSON, if it can be read."""
    found = _NAME.search(raw)
    return found.group(1) if found else None


def recovered_arguments(raw: str) -> str:
    """Return what stands after `"arguments":`, without the brace that closes the call."""
    found = _ARGUMENTS.search(raw)
    if found is None:
        return raw
    text = found.group(1).strip()
    return text[:-1].rstrip() if text.endswith("}") and text.count("}") > text.count("{") else text
