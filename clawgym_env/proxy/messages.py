"""The Anthropic Messages dialect: bodies in, bodies and event streams out. Pure; no tokens, no sessions.

Invariant: a user message's tool results become messages of role "tool" in the order of its blocks, `cache_control`
never matters, a request that leaves its history to the server is refused, and a malformed tool call loses nothing:
streamed it is the raw text as `input_json_delta`, else an empty input beside the raw text as a text block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import orjson

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Dialect, Json, Message, ToolCall, ToolSpec
from clawgym_env.proxy import wire
from clawgym_env.proxy.bodies import BodyReader
from clawgym_env.proxy.wire import ErrorKind, MemoryNeeded, Operation

NAME: Dialect = "messages"
_OPERATIONS: Mapping[str, Operation] = {"messages": "generate", "messages/count_tokens": "count"}
ROUTES: tuple[str, ...] = tuple(_OPERATIONS)

_SIGNATURE = "Y2xhd2d5bQ=="
"""On thinking blocks. Clients send it back unverified, as base64."""
_SAMPLING = ("temperature", "top_p", "top_k", "tool_choice", "thinking", "output_config", "output_format")
_KNOWN = frozenset(_SAMPLING) | {
    "model",
    "messages",
    "system",
    "tools",
    "stream",
    "max_tokens",
    "stop_sequences",
    "metadata",
    "service_tier",
    "context_management",
    "betas",
    "cache_control",
    "thread",
}
_ERROR_TYPES: Mapping[ErrorKind, str] = {
    "invalid_request": "invalid_request_error",
    "memory_needed": "invalid_request_error",
    "not_found": "not_found_error",
    "too_large": "request_too_large",
    "unavailable": "api_error",
}
# `overloaded_error` would be the natural type of a 503, but clients treat it as a reason to switch models.


def operation(path: str) -> Operation | None:
    """Return what messages and messages/count_tokens ask for."""
    return _OPERATIONS.get(path)


def parse_request(body: bytes, path: str = "", reader: BodyReader | None = None) -> ChatRequest:
    """Translate a body of POST /v1/messages or /v1/messages/count_tokens."""
    reader = reader or BodyReader()
    fields = reader.read_object(body, "messages", NAME)
    if fields.get("thread") is not None:
        raise MemoryNeeded("Expected the whole conversation in messages, got a thread. No message is kept here.")
    messages: list[Message] = []
    items = wire.as_list(fields.get("messages"), "messages")
    system = wire.content_text(fields.get("system"), "system")
    if system:
        messages.append(Message("system", system))
    messages += reader.translate(items, _messages, "messages")
    return ChatRequest(
        dialect=NAME,
        model=wire.as_text(fields.get("model"), "model"),
        messages=wire.require_conversation(messages),
        tools=_tools(fields.get("tools"), frozenset(_loaded_tools(items))),
        stream=bool(fields.get("stream")),
        max_tokens=wire.as_budget(fields.get("max_tokens"), "max_tokens"),
        stop=wire.as_stops(fields.get("stop_sequences"), "stop_sequences"),
        client_sampling=wire.pick(fields, _SAMPLING),
        unknown_fields=tuple(name for name in fields if name not in _KNOWN),
    )


def _messages(value: Json, where: str) -> Iterator[Message]:
    message = wire.as_object(value, where)
    role = wire.as_text(message.get("role"), f"{where}.role")
    content = message.get("content")
    if role == "assistant":
        yield _assistant(content, f"{where}.content")
    elif role in ("system", "developer"):  # Claude Code sends system messages in mid-conversation
        yield Message("system", wire.content_text(content, f"{where}.content"))
    elif role == "user":
        yield from _user(content, f"{where}.content")
    else:
        raise ProxyError(f"Expected {where}.role to be user, assistant or system, got {role!r}.")


def _user(content: Json, where: str) -> Iterator[Message]:
    """Split a user message at its tool results, keeping the order."""
    if content is None or isinstance(content, str):
        yield Message("user", content or "")
        return
    texts: list[str] = []
    blocks = wire.as_list(content, where)
    for i, block in enumerate(blocks):
        place = f"{where}[{i}]"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            texts.append(wire.part_text(block, place))
            continue
        if texts:
            yield Message("user", wire.TEXT_SEPARATOR.join(texts))
            texts = []
        call_id = wire.as_text(block.get("tool_use_id"), f"{place}.tool_use_id")
        text = wire.content_text(block.get("content"), f"{place}.content")
        yield Message("tool", text or ("[error]" if block.get("is_error") else ""), tool_call_id=call_id)
    if texts or not blocks:
        yield Message("user", wire.TEXT_SEPARATOR.join(texts))


def _assistant(content: Json, where: str) -> Message:
    if content is None or isinstance(content, str):
        return Message("assistant", content or "")
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for i, item in enumerate(wire.as_list(content, where)):
        place = f"{where}[{i}]"
        block = wire.as_object({"type": "text", "text": item} if isinstance(item, str) else item, place)
        match block.get("type"):
            case "thinking":
                thoughts.append(wire.as_text(block.get("thinking"), f"{place}.thinking"))
            case "redacted_thinking":
                continue
            case "tool_use":
                name = wire.as_text(block.get("name"), f"{place}.name")
                arguments = block.get("input", {})
                calls.append(
                    ToolCall(wire.as_text(block.get("id"), f"{place}.id"), name, wire.arguments_text(arguments))
                )
            case _:
                texts.append(wire.part_text(block, place))
    reasoning = wire.TEXT_SEPARATOR.join(thoughts)
    return Message("assistant", wire.TEXT_SEPARATOR.join(texts), reasoning or None, tuple(calls))


def _loaded_tools(messages: list[Json]) -> Iterator[str]:
    """Yield the names of deferred tools that a tool search has brought into the conversation."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if isinstance(block, dict) else None
            for part in inner if isinstance(inner, list) else ():
                if isinstance(part, dict) and isinstance(name := part.get("tool_name"), str):
                    yield name


def _tools(value: Json, loaded: frozenset[str]) -> tuple[ToolSpec, ...]:
    """Return the tools the model sees: by the API's rules a deferred one only once it is loaded."""
    tools = []
    for i, item in enumerate(wire.as_list(value, "tools")):
        tool = wire.as_object(item, f"tools[{i}]")
        name = wire.as_text(tool.get("name"), f"tools[{i}].name")
        if not name:
            raise ProxyError(f"Expected a name at tools[{i}].name, got none.")
        if tool.get("defer_loading") and name not in loaded:
            continue
        schema = wire.as_object(tool.get("input_schema") or {}, f"tools[{i}].input_schema")
        tools.append(ToolSpec(name, wire.as_text(tool.get("description"), f"tools[{i}].description"), schema))
    return tuple(tools)


def render_completion(completion: Completion, request: ChatRequest) -> bytes:
    """Return the `message` body."""
    content: list[Json] = []
    if completion.reasoning:
        content.append({"type": "thinking", "thinking": completion.reasoning, "signature": _SIGNATURE})
    if completion.content:
        content.append({"type": "text", "text": completion.content})
    for call in completion.tool_calls:
        arguments = call.parsed_arguments()
        if arguments is None:
            content.append({"type": "text", "text": call.arguments})
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments or {}})
    body = _envelope(completion.id, completion.model, completion.prompt_tokens, completion.completion_tokens)
    return wire.write_json({**body, "content": content, **_stop(completion)})


def opening_event(completion_id: str, request: ChatRequest, prompt_tokens: int) -> bytes:
    """Return `message_start`, which tells the client its true prompt length, and a first `ping`."""
    message = _envelope(completion_id, request.model, prompt_tokens, 1)
    return _event("message_start", message=message) + keep_alive(completion_id, request)


def keep_alive(completion_id: str, request: ChatRequest) -> bytes:
    """Return a `ping`."""
    return wire.sse(b'{"type":"ping"}', "ping")


def stream_events(completion: Completion, request: ChatRequest) -> Iterator[bytes]:
    """Yield one item per content block, then `message_delta` with `message_stop`."""
    index = 0
    if completion.reasoning:
        start: dict[str, Json] = {"type": "thinking", "thinking": "", "signature": ""}
        thought: dict[str, Json] = {"type": "thinking_delta", "thinking": completion.reasoning}
        yield _block(index, start, thought, {"type": "signature_delta", "signature": _SIGNATURE})
        index += 1
    if completion.content:
        yield _block(index, {"type": "text", "text": ""}, {"type": "text_delta", "text": completion.content})
        index += 1
    for call in completion.tool_calls:
        start = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        yield _block(index, start, {"type": "input_json_delta", "partial_json": call.arguments})
        index += 1
    usage: dict[str, Json] = {"input_tokens": completion.prompt_tokens, "output_tokens": completion.completion_tokens}
    yield _event("message_delta", delta=_stop(completion), usage=usage) + _event("message_stop")


def _block(index: int, start: dict[str, Json], *deltas: dict[str, Json]) -> bytes:
    events = [_event("content_block_start", index=index, content_block=start)]
    events += [_event("content_block_delta", index=index, delta=delta) for delta in deltas]
    events.append(_event("content_block_stop", index=index))
    return b"".join(events)


def _event(kind: str, **fields: Json) -> bytes:
    return wire.sse(orjson.dumps({"type": kind, **fields}), kind)


def _envelope(completion_id: str, model: str, prompt_tokens: int, output_tokens: int) -> dict[str, Json]:
    return {
        "id": f"msg_{completion_id}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output_tokens,
        },
    }


def _stop(completion: Completion) -> dict[str, Json]:
    if completion.stop_sequence is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_sequence}
    reasons = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "abort": "end_turn"}
    return {"stop_reason": reasons[completion.finish_reason], "stop_sequence": None}


def count_body(prompt_tokens: int) -> bytes:
    """Return the answer of POST /v1/messages/count_tokens."""
    return orjson.dumps({"input_tokens": prompt_tokens})


def models_body(name: str | None, context_length: int) -> bytes:
    """Return a model card or `/models`."""
    return wire.openai_models(name, context_length)


def error_body(kind: ErrorKind, message: str) -> bytes:
    """Return `{"type": "error", …}` as Anthropic words it."""
    error: dict[str, Json] = {"type": _ERROR_TYPES[kind], "message": message}
    if kind == "memory_needed":  # the SDK's tool runner then sends the whole conversation, with no thread
        error["details"] = {"error_code": "thread_unsupported_request"}
    return orjson.dumps({"type": "error", "error": error})


def overflow_error(overflow: ContextOverflow) -> bytes:
    """Return the 400 whose text makes Claude Code compact."""
    message = f"prompt is too long: {overflow.prompt_tokens} tokens > {overflow.context_length} maximum"
    return error_body("invalid_request", message)
