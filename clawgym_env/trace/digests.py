"""When two messages are the same, whatever a harness did to their spelling.

Made once per message by `transcript`; `matching` finds the parent of a call with them. What is equal: tool-call ids
altered or dropped, arguments parsed and written again (spacing, key order, escapes, `1.0` for `1`), white space around
a reply, and reasoning that is left out. What is not: another name, repaired or replaced arguments, other text, other
reasoning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import orjson

from clawgym_env.messages import Json, Message, ToolCall, ToolSpec, well_formed

Digest = bytes
EMPTY: Digest = b""


def chain(key: Digest, item: Digest) -> Digest:
    """Digest a sequence one item longer than the one `key` stands for."""
    return blake2b(key + item, digest_size=16).digest()


def message_digest(message: Message) -> Digest:
    """Digest what must agree for two messages to be the same: no ids, no reasoning."""
    hasher = blake2b(digest_size=16)
    hasher.update(message.role.encode())
    content = message.content.strip() if message.role == "assistant" else message.content
    for part in (content, *(_call_text(call) for call in message.tool_calls)):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.digest()


def spelling_digest(message: Message, digest: Digest) -> Digest:
    """Digest all of a message that a renderer writes, to the letter; `digest` is its `message_digest`."""
    if message.role != "assistant":
        return digest
    spelling = "\0".join([message.content, message.reasoning or "", *(c.arguments for c in message.tool_calls)])
    return chain(digest, spelling.encode("utf-8", "surrogatepass"))


def canonical_arguments(arguments: str) -> str:
    """Return one spelling for all spellings of the same JSON; text that is no JSON stays as it is."""
    if not arguments.strip():
        return "{}"
    try:
        value: Json = json.loads(arguments, parse_float=_plain_number)
        # Half a surrogate pair goes out as an escape and comes back as U+FFFD.
        return well_formed(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    except (ValueError, RecursionError):
        return arguments


def bare_id(call_id: str) -> str:
    """Return the letters and digits of an id: OpenClaw sends `call_8ef1` back as `call8ef1`."""
    return "".join(filter(str.isalnum, call_id))


def reasoning_kept(sent: str | None, echoed: str | None) -> bool:
    """Whether an echo's reasoning allows the sampled ids to stand for it.

    Reasoning left out is fine: the policy goes on from what it really thought. Reasoning replaced is not.
    """
    return not (echoed or "").strip() or (echoed or "").strip() == (sent or "").strip()


def tools_digest(tools: Sequence[ToolSpec]) -> Digest:
    """Digest the tool list as it is rendered: order counts."""
    hasher = blake2b(digest_size=16)
    for tool in tools:
        hasher.update(_written([tool.name, tool.description, dict(tool.parameters)]))
    return hasher.digest()


def _written(value: Json) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # half a surrogate pair, a huge number or deep nesting
        return json.dumps(value).encode()


def _call_text(call: ToolCall) -> str:
    return f"{call.name}\0{canonical_arguments(call.arguments)}"


def _plain_number(text: str) -> float:
    """Read whole floats as integers, as JavaScript writes them."""
    value = float(text)
    return int(value) if value.is_integer() else value


def echoed_ids(message: Message) -> Iterator[str]:
    """Return the bare ids of the tool calls a message echoes."""
    return (bare_id(call.id) for call in message.tool_calls if call.id)
