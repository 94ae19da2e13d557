"""The OpenAI Chat Completions dialect: bodies in, bodies and event streams out. Pure; no tokens, no sessions.

Invariant: what a client sees of a completion is the same whether it streams or not, and a malformed tool call travels
as the raw text that was sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import orjson

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Dialect, FinishReason, Json, Message, Role, ToolCall, ToolSpec
from clawgym_env.proxy import wire
from clawgym_env.proxy.bodies import BodyReader
from clawgym_env.proxy.wire import ErrorKind, Operation

NAME: Dialect = "chat"
ROUTES: tuple[str, ...] = ("chat/completions",)
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "reasoning_effort",
    "function_call",
)
_KNOWN = frozenset(_SAMPLING) | {
    "model",
    "messages",
    "tools",
    "functions",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "stop",
    "n",
    "store",
    "user",
    "metadata",
    "service_tier",
    "prompt_cache_key",
}
_ROLES: Mapping[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_FINISH: Mapping[FinishReason, str] = {"stop": "stop", "tool_calls": "tool_calls", "length": "length", "abort": "stop"}


def operation(path: str) -> Operation | None:
    """Return "generate" for the only route."""
    return "generate" if path in ROUTES else None


def parse_request(body: bytes, path: str = "", reader: BodyReader | None = None) -> ChatRequest:
    """Translate a body of POST /v1/chat/completions."""
    reader = reader or BodyReader()
    fields = reader.read_object(body, "messages", NAME)
    if fields.get("n") not in (None, 1):
        raise ProxyError(f"Expected n to be 1, got {fields['n']!r}. Send one request per sample.")
    messages = reader.translate(wire.as_list(fields.get("messages"), "messages"), _messages, "messages")
    options = wire.as_object(fields.get("stream_options") or {}, "stream_options")
    max_tokens = wire.as_budget(fields.get("max_completion_tokens"), "max_completion_tokens")
    if max_tokens is None:
        max_tokens = wire.as_budget(fields.get("max_tokens"), "max_tokens")
    return ChatRequest(
        dialect=NAME,
        model=wire.as_text(fields.get("model"), "model"),
        messages=wire.require_conversation(messages),
        tools=_tools(fields),
        stream=bool(fields.get("stream")),
        include_usage=bool(options.get("include_usage")),
        max_tokens=max_tokens,
        stop=wire.as_stops(fields.get("stop"), "stop"),
        client_sampling=wire.pick(fields, _SAMPLING),
        unknown_fields=tuple(name for name in fields if name not in _KNOWN),
    )


def _messages(value: Json, where: str) -> Iterator[Message]:
    yield _message(value, where)


def _message(value: Json, where: str) -> Message:
    message = wire.as_object(value, where)
    role = wire.as_text(message.get("role"), f"{where}.role")
    if role not in _ROLES:
        raise ProxyError(f"Expected {where}.role to be one of {', '.join(_ROLES)}, got {role!r}.")
    content = wire.content_text(message.get("content"), f"{where}.content")
    if role == "assistant":
        if not content:
            content = wire.as_text(message.get("refusal"), f"{where}.refusal")
        reasoning = message.get("reasoning_content", message.get("reasoning"))
        return Message(
            "assistant",
            content,
            reasoning=reasoning if isinstance(reasoning, str) and reasoning else None,
            tool_calls=_echoed_calls(message, where),
        )
    if _ROLES[role] == "tool":
        call_id = message.get("tool_call_id", message.get("name"))
        return Message("tool", content, tool_call_id=wire.as_text(call_id, f"{where}.tool_call_id"))
    return Message(_ROLES[role], content)


def _echoed_calls(message: Mapping[str, Json], where: str) -> tuple[ToolCall, ...]:
    calls = []
    for i, item in enumerate(wire.as_list(message.get("tool_calls"), f"{where}.tool_calls")):
        place = f"{where}.tool_calls[{i}]"
        call = wire.as_object(item, place)
        calls.append(_call(call, wire.as_text(call.get("id"), f"{place}.id"), call.get("function"), place))
    if message.get("function_call") is not None:
        function = wire.as_object(message["function_call"], f"{where}.function_call")
        name = wire.as_text(function.get("name"), f"{where}.function_call.name")
        calls.append(_call(message, name, function, f"{where}.function_call"))
    return tuple(calls)


def _call(call: Mapping[str, Json], call_id: str, function: Json, where: str) -> ToolCall:
    if function is None and "custom" in call:  # a free-form tool: its input is plain text
        custom = wire.as_object(call["custom"], f"{where}.custom")
        return ToolCall(call_id, wire.as_text(custom.get("name"), where), wire.arguments_text(custom.get("input")))
    fields = wire.as_object(function, f"{where}.function")
    name = wire.as_text(fields.get("name"), f"{where}.function.name")
    return ToolCall(call_id, name, wire.arguments_text(fields.get("arguments")))


def _tools(fields: Mapping[str, Json]) -> tuple[ToolSpec, ...]:
    tools = []
    for i, item in enumerate(wire.as_list(fields.get("tools"), "tools")):
        tool = wire.as_object(item, f"tools[{i}]")
        tools.append(_tool(tool.get("function", tool.get("custom", tool)), f"tools[{i}]"))
    for i, item in enumerate(wire.as_list(fields.get("functions"), "functions")):
        tools.append(_tool(item, f"functions[{i}]"))
    return tuple(tools)


def _tool(value: Json, where: str) -> ToolSpec:
    function = wire.as_object(value, where)
    name = wire.as_text(function.get("name"), f"{where}.name")
    if not name:
        raise ProxyError(f"Expected a name at {where}.name, got none.")
    return ToolSpec(
        name,
        wire.as_text(function.get("description"), f"{where}.description"),
        wire.as_object(function.get("parameters") or {}, f"{where}.parameters"),
    )


def render_completion(completion: Completion, request: ChatRequest) -> bytes:
    """Return the `chat.completion` body."""
    message: dict[str, Json] = {"role": "assistant", "content": completion.content, "refusal": None}
    if completion.tool_calls:
        message["content"] = completion.content or None
        message["tool_calls"] = [_wire_call(call) for call in completion.tool_calls]
    if completion.reasoning:
        message["reasoning_content"] = completion.reasoning
    return orjson.dumps(
        {
            "id": f"chatcmpl-{completion.id}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": completion.model,
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": _FINISH[completion.finish_reason],
                }
            ],
            "usage": _usage(completion),
        }
    )


def opening_event(completion_id: str, request: ChatRequest, prompt_tokens: int) -> bytes:
    """Return the chunk that names the role."""
    return _chunk(completion_id, request.model, {"role": "assistant", "content": ""}, None)


def keep_alive(completion_id: str, request: ChatRequest) -> bytes:
    """Return a comment line."""
    return b": keep-alive\n\n"


def stream_events(completion: Completion, request: ChatRequest) -> Iterator[bytes]:
    """Yield chunks: reasoning, text, each tool call whole, finish, usage where asked for, `[DONE]`."""
    chunk_id, model = completion.id, completion.model
    if completion.reasoning:
        yield _chunk(chunk_id, model, {"reasoning_content": completion.reasoning}, None)
    if completion.content:
        yield _chunk(chunk_id, model, {"content": completion.content}, None)
    for i, call in enumerate(completion.tool_calls):
        yield _chunk(chunk_id, model, {"tool_calls": [{"index": i, **_wire_call(call)}]}, None)
    end = _chunk(chunk_id, model, {}, _FINISH[completion.finish_reason])
    if request.include_usage:
        usage = {"choices": [], "usage": _usage(completion)}
        end += wire.sse(orjson.dumps({**_head(chunk_id, model), **usage}))
    yield end + wire.sse(b"[DONE]")


def _head(completion_id: str, model: str) -> dict[str, Json]:
    return {
        "id": f"chatcmpl-{completion_id}",
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }


def _chunk(completion_id: str, model: str, delta: dict[str, Json], finish: str | None) -> bytes:
    choice: dict[str, Json] = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return wire.sse(orjson.dumps({**_head(completion_id, model), "choices": [choice]}))


def _wire_call(call: ToolCall) -> dict[str, Json]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(completion: Completion) -> dict[str, Json]:
    return {
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "total_tokens": completion.prompt_tokens + completion.completion_tokens,
    }


def count_body(prompt_tokens: int) -> bytes:
    """Return a count; the API has no such route."""
    return orjson.dumps({"prompt_tokens": prompt_tokens})


def models_body(name: str | None, context_length: int) -> bytes:
    """Return a model card or `/models`."""
    return wire.openai_models(name, context_length)


def error_body(kind: ErrorKind, message: str) -> bytes:
    """Return `{"error": {…}}` as OpenAI words it."""
    return wire.openai_error(kind, message)


def overflow_error(overflow: ContextOverflow) -> bytes:
    """Return `context_length_exceeded` with the sentence harnesses look for."""
    message = (
        f"This model's maximum context length is {overflow.context_length} tokens. However, your messages resulted in "
        f"{overflow.prompt_tokens} tokens. Please reduce the length of the messages."
    )
    return wire.openai_overflow(message, param="messages")
