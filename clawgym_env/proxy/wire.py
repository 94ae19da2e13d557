"""What the dialect modules share: the shape of a dialect, and careful reading of JSON that others wrote.

Each of `chat`, `messages`, `responses` and `gemini` is a module with the functions of `WireDialect`; `dialects` lists
them, and `app` and `streaming` talk to them through it only.
Invariant: whatever a body holds, reading it ends in a value of the promised type or in a `ProxyError` that names the
field; never in another exception.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

import orjson

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Dialect, Json, Message, well_formed

if TYPE_CHECKING:
    from clawgym_env.proxy.bodies import BodyReader

Operation = Literal["generate", "count"]
ErrorKind = Literal["invalid_request", "memory_needed", "not_found", "too_large", "unavailable"]

STATUS: Mapping[ErrorKind, int] = {
    "invalid_request": 400,
    "memory_needed": 400,
    "not_found": 404,
    "too_large": 413,
    "unavailable": 503,
}
"""HTTP status of each kind of error. Never 429: Codex does not retry it."""

MAX_MESSAGE = 500
"""Characters of an error message: it quotes what the client sent, which may be megabytes."""

_LINE_ENDS: Mapping[bytes, bytes] = {end.encode(): f"\\u{ord(end):04x}".encode() for end in "\u0085\u2028\u2029"}
"""Characters that JSON may hold as they are, and their escapes: some stream readers (httpx's, Gemini's SDKs) take
them for the end of a line."""

MAX_STOPS = 256
"""Every reply is searched for each of a request's stop sequences; APIs take 4 to some dozens."""

TEXT_SEPARATOR = "\n"
"""Between the text parts of one message. A single part equals the same text as a plain string."""


class MemoryNeeded(ProxyError):
    """The request leaves to the server what only one with a memory could know; a client can send the whole instead."""


class WireDialect(Protocol):
    """One API as harnesses speak it. Implemented by modules."""

    NAME: Dialect
    ROUTES: tuple[str, ...]
    """What a POST may go to, behind the key and the API version, as an error message names it."""

    def operation(self, path: str) -> Operation | None:
        """Say what a POST to `path` asks for: a turn, the count of its prompt tokens, or nothing this dialect knows.

        Args:
            path: what stands behind the key and the API version, such as "chat/completions".
        """

    def parse_request(self, body: bytes, path: str = "", reader: BodyReader | None = None) -> ChatRequest:
        """Translate a request body.

        Args:
            path: as in `operation`, with the query; Gemini names model and streaming there.
            reader: knows earlier bodies of the rollout.

        Raises:
            ProxyError: the body is not a request of this dialect; the message names the field.
        """

    def render_completion(self, completion: Completion, request: ChatRequest) -> bytes:
        """Return the body of a non-streaming answer."""

    def opening_event(self, completion_id: str, request: ChatRequest, prompt_tokens: int) -> bytes:
        """Return what a stream begins with, known before anything is generated."""

    def keep_alive(self, completion_id: str, request: ChatRequest) -> bytes:
        """Return what is sent while a turn generates: it resets the client's clock and means nothing."""

    def stream_events(self, completion: Completion, request: ChatRequest) -> Iterator[bytes]:
        """Yield the rest of the stream; the last item ends the turn for the client."""

    def count_body(self, prompt_tokens: int) -> bytes:
        """Return the answer of the dialect's token counting route."""

    def models_body(self, name: str | None, context_length: int) -> bytes:
        """Return the card of one model, or the listing (None): any name is a model here."""

    def error_body(self, kind: ErrorKind, message: str) -> bytes:
        """Return an error in the dialect's own form."""

    def overflow_error(self, overflow: ContextOverflow) -> bytes:
        """Return the 400 whose words make harnesses compact their context."""


def read_object(body: bytes) -> dict[str, Json]:
    """Parse a request body that must be a JSON object.

    Raises:
        ProxyError: it is not.
    """
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        value = _read_leniently(body, error)
    if not isinstance(value, dict):
        raise ProxyError(f"Expected a JSON object as body, got {type_name(value)}.")
    return value


def _read_leniently(body: bytes, error: orjson.JSONDecodeError) -> Json:
    """Read what orjson refuses but clients write: half a surrogate pair (JavaScript), NaN and Infinity (Python)."""
    try:
        value: Json = json.loads(well_formed(json.dumps(json.loads(body), ensure_ascii=False)))
    except (ValueError, RecursionError):
        raise ProxyError(f"Expected a JSON object as body, got invalid JSON: {error}.") from error
    return value


def type_name(value: Json) -> str:
    """Return the JSON name of a value's type."""
    names: dict[type, str] = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return "null" if value is None else names.get(type(value), "object")


def as_object(value: Json, where: str) -> dict[str, Json]:
    """Return `value` as an object, or raise `ProxyError` naming `where`."""
    if not isinstance(value, dict):
        raise ProxyError(f"Expected an object at {where}, got {type_name(value)}.")
    return value


def as_list(value: Json, where: str) -> list[Json]:
    """Return `value` as an array (null is an empty one), or raise `ProxyError` naming `where`."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise ProxyError(f"Expected an array at {where}, got {type_name(value)}.")
    return value


def as_text(value: Json, where: str) -> str:
    """Return `value` as text (null is empty), or raise `ProxyError` naming `where`."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ProxyError(f"Expected a string at {where}, got {type_name(value)}.")
    return value


def as_budget(value: Json, where: str) -> int | None:
    """Return a token budget: a positive whole number or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value < 1 or value > 2**53:
        raise ProxyError(f"Expected a positive whole number at {where}, got {json.dumps(value)[:80]}.")
    return int(value)


def as_stops(value: Json, where: str) -> tuple[str, ...]:
    """Return stop sequences: null, one string or an array of strings; empty ones are dropped."""
    values = [value] if isinstance(value, str) else as_list(value, where)
    if len(values) > MAX_STOPS:
        raise ProxyError(f"Expected at most {MAX_STOPS} stop sequences at {where}, got {len(values)}.")
    return tuple(text for text in (as_text(item, f"{where}[]") for item in values) if text)


def content_text(value: Json, where: str) -> str:
    """Return the text of message content: null, a string, or an array of parts."""
    if value is None or isinstance(value, str):
        return value or ""
    parts = as_list(value, where)
    return TEXT_SEPARATOR.join(part_text(part, f"{where}[{i}]") for i, part in enumerate(parts))


def part_text(value: Json, where: str) -> str:
    """Return the text of one content part, or a short placeholder such as "[image]"."""
    if isinstance(value, str):
        return value
    part = as_object(value, where)
    kind = part.get("type", "text")
    for key in ("text", "refusal"):
        if key in part:
            return as_text(part[key], f"{where}.{key}")
    if kind in ("image", "image_url", "input_image"):
        return "[image]"
    if kind == "tool_reference":
        return f"[tool: {as_text(part.get('tool_name'), f'{where}.tool_name')}]"
    return f"[{as_text(kind, f'{where}.type')}]"


def arguments_text(value: Json) -> str:
    """Return tool arguments as JSON text; some clients send the object itself."""
    if isinstance(value, str):
        return value
    return "" if value is None else write_json(value).decode()


def write_json(value: Json) -> bytes:
    """Return JSON, also of what orjson refuses: nesting over 254 levels, large integers, halves of surrogate pairs.

    Raises:
        ProxyError: it nests too deeply for anyone.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        pass
    try:
        text = json.dumps(value)
        finite: Json = json.loads(text, parse_constant=lambda name: None)  # NaN is null, as orjson has it
        return json.dumps(finite).encode()
    except RecursionError as error:
        raise ProxyError("Expected values of at most some hundred levels, got deeper ones.") from error


def pick(body: Mapping[str, Json], names: Iterable[str]) -> dict[str, Json]:
    """Return the given fields of a body as far as they are there."""
    return {name: body[name] for name in names if name in body}


def require_conversation(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages, or raise `ProxyError` when there is nothing to answer."""
    if not messages:
        raise ProxyError("Expected at least one message in messages, got none.")
    return tuple(messages)


def bounded(message: str) -> str:
    """Return an error message of at most `MAX_MESSAGE` characters."""
    return message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 1]}…"


def sse(data: bytes, event: str | None = None) -> bytes:
    """Frame one server-sent event; `data` is JSON, or a word."""
    for character, escape in _LINE_ENDS.items():
        data = data.replace(character, escape)
    prefix = b"" if event is None else b"event: " + event.encode() + b"\n"
    return prefix + b"data: " + data + b"\n\n"


def openai_models(name: str | None, context_length: int) -> bytes:
    """Return a model card, or the listing of the one model (None), in a form OpenAI and Anthropic clients both read."""
    card: dict[str, Json] = {
        "id": name or "policy",
        "object": "model",
        "type": "model",
        "display_name": name or "policy",
        "created": 0,
        "created_at": "1970-01-01T00:00:00Z",
        "owned_by": "clawgym",
        "context_length": context_length,
        "max_model_len": context_length,
    }
    if name is not None:
        return write_json(card)
    return write_json(
        {"object": "list", "data": [card], "has_more": False, "first_id": card["id"], "last_id": card["id"]}
    )


def openai_error(kind: ErrorKind, message: str) -> bytes:
    """Return `{"error": {…}}` as both APIs of OpenAI word it."""
    types: Mapping[ErrorKind, str] = {"not_found": "not_found_error", "unavailable": "server_error"}
    error: dict[str, Json] = {"message": message, "type": types.get(kind, "invalid_request_error")}
    return write_json({"error": {**error, "param": None, "code": None}})


def openai_overflow(message: str, *, param: str) -> bytes:
    """Return `context_length_exceeded`, the code harnesses look for."""
    error: dict[str, Json] = {"message": message, "type": "invalid_request_error", "param": param}
    return write_json({"error": {**error, "code": "context_length_exceeded"}})
