"""The wire dialects the proxy speaks, and how a request shows which one it is.

`app` asks here once per request. A new dialect is a module and its rows. Invariant: the path decides where it can,
headers only where it says nothing (probes, unknown routes), so that even an error has the client's own form.
"""

from __future__ import annotations

from collections.abc import Mapping

from clawgym_env.proxy import chat, gemini, messages, responses
from clawgym_env.proxy.wire import WireDialect

DIALECTS: tuple[WireDialect, ...] = (chat, messages, responses, gemini)
_BY_FOLDER: Mapping[str, WireDialect] = {"messages": messages, "responses": responses}
"""By the first segment of a path; `models` is everybody's."""
_BY_HEADER: Mapping[str, WireDialect] = {"anthropic-version": messages, "x-goog-api-key": gemini}


def dialect_of(path: str, headers: Mapping[str, str]) -> WireDialect:
    """Return the dialect of a request, OpenAI Chat where nothing shows another.

    Args:
        path: what stands behind the key and the API version.
        headers: with names in lower case.
    """
    for dialect in DIALECTS:
        if dialect.operation(path) is not None:
            return dialect
    folder = _BY_FOLDER.get(path.partition("/")[0])
    return folder or next((dialect for name, dialect in _BY_HEADER.items() if name in headers), chat)


def routes() -> str:
    """Name the routes a POST may go to, for an error message."""
    return ", ".join(route for dialect in DIALECTS for route in dialect.ROUTES)
