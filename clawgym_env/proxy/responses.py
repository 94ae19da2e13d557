"""The OpenAI Responses dialect: bodies in, bodies and event streams out. Pure; no tokens, no sessions.

Stateless: every request brings its whole history as items (`responses_items` reads them), and what would need a memory
of ours is refused. Invariant: the items of a reply, ids included, are the same whether it streams or not, and come
back as the one turn that was sampled.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Dialect, Json, ToolCall, ToolSpec
from clawgym_env.proxy import wire
from clawgym_env.proxy.bodies import BodyReader
from clawgym_env.proxy.responses_items import RAW_CALL, item_id, qualified, read_input
from clawgym_env.proxy.wire import ErrorKind, Operation

NAME: Dialect = "responses"
ROUTES: tuple[str, ...] = ("responses", "responses/input_tokens")

_OPAQUE = "Y2xhd2d5bQ=="
"""`encrypted_content` of reasoning items: clients that keep no state drop a thought without it, and never look in."""
_SAMPLING = (
    "temperature",
    "top_p",
    "top_logprobs",
    "tool_choice",
    "parallel_tool_calls",
    "max_tool_calls",
    "reasoning",
    "text",
    "truncation",
)
_REMEMBERED = ("previous_response_id", "conversation", "prompt", "background")
_KNOWN = frozenset((*_SAMPLING, *_REMEMBERED)) | {
    "model",
    "input",
    "instructions",
    "tools",
    "stream",
    "stream_options",
    "max_output_tokens",
    "store",
    "include",
    "metadata",
    "client_metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
}
_CALLABLE = ("function", "custom")
_INPUT_SCHEMA: Mapping[str, Json] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Of a custom tool, whose input is free text: a policy that knows functions only puts it into one string."""


def operation(path: str) -> Operation | None:
    """Return what responses and responses/input_tokens ask for; the routes of kept responses are not here."""
    routes: dict[str, Operation] = {"responses": "generate", "responses/input_tokens": "count"}
    return routes.get(path)


def parse_request(body: bytes, path: str = "", reader: BodyReader | None = None) -> ChatRequest:
    """Translate a body of POST /v1/responses or /v1/responses/input_tokens."""
    reader = reader or BodyReader()
    fields = reader.read_object(body, "input", NAME)
    for name in _REMEMBERED:
        if fields.get(name):
            raise ProxyError(
                f"Expected the whole conversation in input, got {name}. No response is kept here: send every item "
                "again, with store=false."
            )
    messages = read_input(fields.get("input"), wire.content_text(fields.get("instructions"), "instructions"))
    if not messages:
        raise ProxyError("Expected a text or at least one item in input, got none.")
    return ChatRequest(
        dialect=NAME,
        model=wire.as_text(fields.get("model"), "model"),
        messages=messages,
        tools=_tools(fields),
        stream=bool(fields.get("stream")),
        max_tokens=wire.as_budget(fields.get("max_output_tokens"), "max_output_tokens"),
        client_sampling=wire.pick(fields, _SAMPLING),
        unknown_fields=(*(name for name in fields if name not in _KNOWN), *_ignored_tools(fields)),
    )


def _tools(fields: Mapping[str, Json]) -> tuple[ToolSpec, ...]:
    """Return the tools the model is offered: by the API's rules a deferred one only once an input item brought it."""
    tools: dict[str, ToolSpec] = {}
    for i, item in enumerate(wire.as_list(fields.get("tools"), "tools")):
        tools |= {spec.name: spec for spec in _specs(item, f"tools[{i}]", loaded=False)}
    items = fields.get("input")
    for i, item in enumerate(items if isinstance(items, list) else ()):
        if isinstance(item, dict) and item.get("type") in ("additional_tools", "tool_search_output"):
            for j, tool in enumerate(wire.as_list(item.get("tools"), f"input[{i}].tools")):
                tools |= {spec.name: spec for spec in _specs(tool, f"input[{i}].tools[{j}]", loaded=True)}
    return tuple(tools.values())


def _specs(value: Json, where: str, *, loaded: bool) -> Iterator[ToolSpec]:
    """Yield one function or custom tool, or those of a namespace; what a namespace says of itself goes with its first.

    A tool of another type is one that only the vendor's server could run.
    """
    tool = wire.as_object(value, where)
    kind = wire.as_text(tool.get("type"), f"{where}.type") or "function"
    if kind in _CALLABLE and (loaded or not tool.get("defer_loading")):
        yield _tool(tool, where)
    elif kind == "namespace":
        namespace = wire.as_text(tool.get("name"), f"{where}.name")
        about = wire.as_text(tool.get("description"), f"{where}.description")
        for i, item in enumerate(wire.as_list(tool.get("tools"), f"{where}.tools")):
            for spec in _specs(item, f"{where}.tools[{i}]", loaded=loaded):
                description = "\n".join(filter(None, (about, spec.description)))
                name = qualified(spec.name, namespace)
                yield replace(spec, name=name, description=description, namespace=namespace or None)
                about = ""


def _ignored_tools(fields: Mapping[str, Json]) -> list[str]:
    """Name the types of tools that are not offered, once each."""
    tools = wire.as_list(fields.get("tools"), "tools")
    kinds = (tool.get("type") or "function" for tool in tools if isinstance(tool, dict))
    return list(dict.fromkeys(f"tools[{kind}]" for kind in kinds if kind not in (*_CALLABLE, "namespace")))


def _tool(tool: Mapping[str, Json], where: str) -> ToolSpec:
    name = wire.as_text(tool.get("name"), f"{where}.name")
    if not name:
        raise ProxyError(f"Expected a name at {where}.name, got none.")
    description = wire.as_text(tool.get("description"), f"{where}.description")
    parameters = wire.as_object(tool.get("parameters") or {}, f"{where}.parameters")
    custom = tool.get("type") == "custom"
    if custom:
        form = wire.as_object(tool.get("format") or {}, f"{where}.format")
        grammar = wire.as_text(form.get("definition"), f"{where}.format.definition")
        description = "\n".join(filter(None, (description, grammar)))
    kind: Literal["function", "custom"] = "custom" if custom else "function"
    return ToolSpec(name, description, _INPUT_SCHEMA if custom else parameters, kind=kind)


def render_completion(completion: Completion, request: ChatRequest) -> bytes:
    """Return the `response` body."""
    return wire.write_json(_finished(completion, _output(completion, request.tools)))


def opening_event(completion_id: str, request: ChatRequest, prompt_tokens: int) -> bytes:
    """Return `response.created` and `response.in_progress`."""
    started = _envelope(completion_id, request.model, "in_progress")
    return _event("response.created", 0, response=started) + keep_alive(completion_id, request)


def keep_alive(completion_id: str, request: ChatRequest) -> bytes:
    """Return `response.in_progress` once more, under its one number: Codex does not count comment lines as life."""
    return _event("response.in_progress", 1, response=_envelope(completion_id, request.model, "in_progress"))


def stream_events(completion: Completion, request: ChatRequest) -> Iterator[bytes]:
    """Yield the events of each output item, then `response.completed` or `response.incomplete`."""
    number = 2
    output = _output(completion, request.tools)
    for index, item in enumerate(output):
        events: list[bytes] = []
        for kind, fields in _item_events(item):
            events.append(_event(kind, number, output_index=index, **fields))
            number += 1
        yield b"".join(events)
    response = _finished(completion, output)
    yield _event(f"response.{response['status']}", number, response=response)


def _output(completion: Completion, tools: Sequence[ToolSpec]) -> list[dict[str, Json]]:
    """Return the items of a reply, in the order in which it was sampled. A reply of nothing is an empty message."""
    specs = {tool.name: tool for tool in tools}
    items: list[dict[str, Json]] = []

    def add(prefix: str, kind: str, fields: Mapping[str, Json]) -> None:
        name = item_id(prefix, completion.id, len(items))
        items.append({"id": name, "type": kind, "status": "completed", **fields})

    if completion.reasoning:
        summary: list[Json] = [{"type": "summary_text", "text": completion.reasoning}]
        add("rs", "reasoning", {"summary": summary, "encrypted_content": _OPAQUE})
    if completion.content or not (completion.reasoning or completion.tool_calls):
        add("msg", "message", {"role": "assistant", "content": [_text_part(completion.content)]})
    for call in completion.tool_calls:
        spec = specs.get(call.name)
        # OpenClaw puts hashes for ids of another form than the API's; a match looks at letters and digits only.
        named: dict[str, Json] = {"call_id": f"call_{call.id.removeprefix('call')}", "name": call.name}
        if spec is not None and spec.namespace is not None:
            named["name"] = call.name.removeprefix(qualified("", spec.namespace))
            named["namespace"] = spec.namespace
        if spec is not None and spec.kind == "custom":
            text = _custom_input(call)
            prefix = RAW_CALL if text is None else "ctc"
            add(prefix, "custom_tool_call", {**named, "input": call.arguments if text is None else text})
        else:
            add("fc", "function_call", {**named, "arguments": call.arguments})
    if completion.finish_reason == "length":
        items[-1]["status"] = "incomplete"
    return items


def _custom_input(call: ToolCall) -> str | None:
    """Return the text in `{"input": text}`; None when the policy wrote anything else."""
    match call.parsed_arguments():
        case {"input": str(text), **others} if not others:
            return text
    return None


def _text_part(text: str) -> dict[str, Json]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _item_events(item: Mapping[str, Json]) -> Iterator[tuple[str, dict[str, Json]]]:
    """Yield (type, fields) of the events that build one item up: each delta carries all of its text."""
    place: dict[str, Json] = {"item_id": item["id"]}
    started: dict[str, Json] = {**item, "status": "in_progress"}
    steps: Sequence[tuple[str, dict[str, Json]]]
    match item:
        case {"type": "message", "content": [{"text": str(text)}]}:
            started["content"] = []
            place["content_index"] = 0
            steps = (
                ("response.content_part.added", {"part": _text_part("")}),
                ("response.output_text.delta", {"delta": text, "logprobs": []}),
                ("response.output_text.done", {"text": text, "logprobs": []}),
                ("response.content_part.done", {"part": _text_part(text)}),
            )
        case {"type": "reasoning", "summary": [{"text": str(text)}]}:
            started["summary"] = []
            place["summary_index"] = 0
            steps = (
                ("response.reasoning_summary_part.added", {"part": {"type": "summary_text", "text": ""}}),
                ("response.reasoning_summary_text.delta", {"delta": text}),
                ("response.reasoning_summary_text.done", {"text": text}),
                ("response.reasoning_summary_part.done", {"part": {"type": "summary_text", "text": text}}),
            )
        case {"type": "custom_tool_call", "input": str(text)}:
            started["input"] = ""
            steps = (
                ("response.custom_tool_call_input.delta", {"delta": text}),
                ("response.custom_tool_call_input.done", {"input": text}),
            )
        case _:
            text = str(item["arguments"])
            started["arguments"] = ""
            steps = (
                ("response.function_call_arguments.delta", {"delta": text}),
                ("response.function_call_arguments.done", {"arguments": text, "name": item["name"]}),
            )
    yield "response.output_item.added", {"item": started}
    for kind, fields in steps:
        if fields.get("delta") != "":
            yield kind, {**place, **fields}
    yield "response.output_item.done", {"item": dict(item)}


def _event(kind: str, number: int, **fields: Json) -> bytes:
    return wire.sse(wire.write_json({"type": kind, "sequence_number": number, **fields}), kind)


def _envelope(completion_id: str, model: str, status: str) -> dict[str, Json]:
    """Return a response without output. What the client asked for is not echoed: sampling is the policy's."""
    return {
        "id": f"resp_{completion_id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }


def _finished(completion: Completion, output: Sequence[Json]) -> dict[str, Json]:
    cut = completion.finish_reason == "length"
    return {
        **_envelope(completion.id, completion.model, "incomplete" if cut else "completed"),
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": list(output),
        "usage": {
            "input_tokens": completion.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": completion.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": completion.prompt_tokens + completion.completion_tokens,
        },
    }


def count_body(prompt_tokens: int) -> bytes:
    """Return the answer of POST /v1/responses/input_tokens."""
    return wire.write_json({"object": "response.input_tokens", "input_tokens": prompt_tokens})


def models_body(name: str | None, context_length: int) -> bytes:
    """Return a model card or `/models`."""
    return wire.openai_models(name, context_length)


def error_body(kind: ErrorKind, message: str) -> bytes:
    """Return `{"error": {…}}` as OpenAI words it."""
    return wire.openai_error(kind, message)


def overflow_error(overflow: ContextOverflow) -> bytes:
    """Return `context_length_exceeded` with the sentence harnesses look for."""
    message = (
        f"Your input exceeds the context window of this model: {overflow.prompt_tokens} tokens, and its maximum "
        f"context length is {overflow.context_length} tokens. Please adjust your input and try again."
    )
    return wire.openai_overflow(message, param="input")
