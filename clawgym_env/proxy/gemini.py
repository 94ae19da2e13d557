"""The Gemini dialect: bodies in, bodies and event streams out. Pure; no tokens, no sessions.

Model and kind of answer stand in the path (`models/NAME:streamGenerateContent?alt=sse`), every field may be spelled
`camelCase` or `snake_case`. Invariants: a user content's function responses become messages of role "tool" in the
order of its parts, each tied to the call it answers even where the client sends no ids; a reply is one chunk in every
form, so that a client's history holds it as one content; a malformed function call is an empty one beside the raw
text.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import parse_qs

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Dialect, FinishReason, Json, Message, ToolCall, ToolSpec
from clawgym_env.proxy import wire
from clawgym_env.proxy.bodies import BodyReader
from clawgym_env.proxy.wire import STATUS, ErrorKind, Operation

NAME: Dialect = "gemini"
_METHODS: Mapping[str, Operation] = {
    "generateContent": "generate",
    "streamGenerateContent": "generate",
    "countTokens": "count",
}
ROUTES: tuple[str, ...] = tuple(f"models/NAME:{method}" for method in _METHODS)

_KNOWN = frozenset(
    {
        "contents",
        "system_instruction",
        "tools",
        "tool_config",
        "generation_config",
        "safety_settings",
        "generate_content_request",
        "model",
        "labels",
    }
)
_TYPES = frozenset({"STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"})
"""As OpenAPI in Google's spelling names them; JSON schema has them in lower case."""
_FINISH: Mapping[FinishReason, str] = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "abort": "OTHER"}
_ERROR_STATUS: Mapping[ErrorKind, str] = {
    "invalid_request": "INVALID_ARGUMENT",
    "memory_needed": "INVALID_ARGUMENT",
    "not_found": "NOT_FOUND",
    "too_large": "INVALID_ARGUMENT",  # RESOURCE_EXHAUSTED is a spent quota to clients
    "unavailable": "UNAVAILABLE",
}


def operation(path: str) -> Operation | None:
    """Return what a method behind a model's name asks for."""
    name, _, method = path.rpartition(":")
    return _METHODS.get(method) if name.startswith(("models/", "tunedModels/")) else None


def parse_request(body: bytes, path: str = "", reader: BodyReader | None = None) -> ChatRequest:
    """Translate a body of one of `ROUTES`."""
    address, _, query = path.partition("?")
    name, _, method = address.rpartition(":")
    reader = reader or BodyReader()
    fields = reader.read_object(body, "contents", NAME)
    nested = _get(fields, "generateContentRequest")  # countTokens takes a whole request, too
    if nested is not None:
        fields = wire.as_object(nested, "generateContentRequest")
    if _get(fields, "cachedContent"):
        raise ProxyError("Expected no cachedContent: nothing is cached here. Send the contents themselves.")
    config = wire.as_object(_get(fields, "generationConfig") or {}, "generationConfig")
    if _get(config, "candidateCount") not in (None, 1):
        raise ProxyError("Expected generationConfig.candidateCount to be 1, got another. Send one request per sample.")
    stream = method == "streamGenerateContent"
    tools, ignored = _tools(_get(fields, "tools"))
    return ChatRequest(
        dialect=NAME,
        model=name.removeprefix("models/"),
        messages=tuple(_conversation(fields)),
        tools=tools,
        stream=stream,
        stream_as_array=stream and parse_qs(query).get("alt") != ["sse"],
        max_tokens=wire.as_budget(_get(config, "maxOutputTokens"), "generationConfig.maxOutputTokens"),
        stop=wire.as_stops(_get(config, "stopSequences"), "generationConfig.stopSequences"),
        client_sampling={**config, **wire.pick(fields, ("toolConfig", "tool_config"))},
        unknown_fields=(*(name for name in fields if _snake(name) not in _KNOWN), *ignored),
    )


@dataclass(slots=True)
class _Calls:
    """The function calls of a conversation that wait for their response, oldest first under each name."""

    count: int = 0
    waiting: dict[str, OrderedDict[str, None]] = field(default_factory=dict)

    def called(self, name: str, call_id: str) -> str:
        """Note a call; return its id, one by position where the client sent none."""
        self.count += 1
        call_id = call_id or f"call{self.count}"
        self.waiting.setdefault(name, OrderedDict())[call_id] = None
        return call_id

    def answered(self, name: str, call_id: str) -> str:
        """Return the id of the call that a response answers: the one it names, else the oldest of its name."""
        ids = self.waiting.get(name)
        if not ids:
            return call_id or name
        if call_id not in ids:
            return ids.popitem(last=False)[0]
        del ids[call_id]
        return call_id


def _conversation(fields: Mapping[str, Json]) -> Iterator[Message]:
    system = _instruction(_get(fields, "systemInstruction"), "systemInstruction")
    if system:
        yield Message("system", system)
    contents = _listed(fields.get("contents"), "contents")
    if not contents:
        raise ProxyError("Expected at least one content in contents, got none.")
    calls = _Calls()
    for i, item in enumerate(contents):
        place = f"contents[{i}]"
        content = wire.as_object({"parts": item} if isinstance(item, str) else item, place)
        role = wire.as_text(content.get("role"), f"{place}.role") or "user"
        if role == "model":
            yield _model(content, place, calls)
        elif role in ("user", "function", "tool"):
            yield from _user(content, place, calls)
        elif role == "system":
            yield Message("system", _instruction(content, place))
        else:
            raise ProxyError(f"Expected {place}.role to be user, model or function, got {role!r}.")


def _user(content: Mapping[str, Json], where: str, calls: _Calls) -> Iterator[Message]:
    """Split a user content at its function responses, keeping the order."""
    texts: list[str] = []
    answers = 0
    for part, place in _parts(content, where):
        response = _get(part, "functionResponse")
        if response is None:
            texts.extend(_texts(part, place))
            continue
        if texts:
            yield Message("user", wire.TEXT_SEPARATOR.join(texts))
            texts = []
        answers += 1
        yield _response(wire.as_object(response, f"{place}.functionResponse"), f"{place}.functionResponse", calls)
    if texts or not answers:
        yield Message("user", wire.TEXT_SEPARATOR.join(texts))


def _response(response: Mapping[str, Json], where: str, calls: _Calls) -> Message:
    name = wire.as_text(response.get("name"), f"{where}.name")
    call_id = wire.as_text(response.get("id"), f"{where}.id")
    result = response.get("response")
    if isinstance(result, dict) and result.keys() == {"output"}:  # by the API's rules the key for what a tool returns
        result = result["output"]
    texts = [wire.arguments_text(result)] if result is not None else []
    for part, place in _parts(response, where):
        texts.extend(_texts(part, place))
    return Message("tool", wire.TEXT_SEPARATOR.join(texts), tool_call_id=calls.answered(name, call_id))


def _model(content: Mapping[str, Json], where: str, calls: _Calls) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    made: list[ToolCall] = []
    for part, place in _parts(content, where):
        call = _get(part, "functionCall")
        if call is not None:
            made.append(_call(wire.as_object(call, f"{place}.functionCall"), f"{place}.functionCall", calls))
        elif part.get("thought") is True:
            thoughts.append(wire.as_text(part.get("text"), f"{place}.text"))
        else:
            texts.extend(_texts(part, place))
    # Clients keep the chunks of a stream as parts, so parts are pieces of one text.
    return Message("assistant", "".join(texts), "".join(thoughts) or None, tuple(made))


def _call(call: Mapping[str, Json], where: str, calls: _Calls) -> ToolCall:
    name = wire.as_text(call.get("name"), f"{where}.name")
    if not name:
        raise ProxyError(f"Expected a name at {where}.name, got none.")
    call_id = calls.called(name, wire.as_text(call.get("id"), f"{where}.id"))
    arguments = wire.as_object(call.get("args") or {}, f"{where}.args")
    return ToolCall(call_id, name, wire.arguments_text(arguments))


def _texts(part: Mapping[str, Json], where: str) -> Iterator[str]:
    """Yield the text of one part, or a short placeholder such as "[image]"; nothing for a part of metadata alone."""
    if part.get("text") is not None:
        yield wire.as_text(part["text"], f"{where}.text")
    for name in ("inlineData", "fileData"):
        data = _get(part, name)
        if data is not None:
            mime = wire.as_text(_get(wire.as_object(data, f"{where}.{name}"), "mimeType"), f"{where}.{name}.mimeType")
            kind = mime.partition("/")[0]
            yield f"[{kind}]" if kind in ("image", "audio", "video") else "[file]"
    for name, key in (("executableCode", "code"), ("codeExecutionResult", "output")):
        data = _get(part, name)
        if data is not None:
            yield wire.as_text(wire.as_object(data, f"{where}.{name}").get(key), f"{where}.{name}.{key}")


def _instruction(value: Json, where: str) -> str:
    """Return the text of an instruction: a content, or as some clients send it a part or a string."""
    if value is None or isinstance(value, str):
        return value or ""
    content = wire.as_object(value, where)
    if "parts" not in content:
        content = {"parts": [content]}
    texts = (text for part, place in _parts(content, where) for text in _texts(part, place))
    return wire.TEXT_SEPARATOR.join(texts)


def _parts(content: Mapping[str, Json], where: str) -> Iterator[tuple[dict[str, Json], str]]:
    for i, item in enumerate(_listed(content.get("parts"), f"{where}.parts")):
        place = f"{where}.parts[{i}]"
        yield wire.as_object({"text": item} if isinstance(item, str) else item, place), place


def _tools(value: Json) -> tuple[tuple[ToolSpec, ...], tuple[str, ...]]:
    """Return the declared functions, and the names of tools that only the vendor's server could run."""
    tools: list[ToolSpec] = []
    ignored: dict[str, None] = {}
    for i, item in enumerate(_listed(value, "tools")):
        tool = wire.as_object(item, f"tools[{i}]")
        for j, entry in enumerate(_listed(_get(tool, "functionDeclarations"), f"tools[{i}].functionDeclarations")):
            tools.append(_tool(entry, f"tools[{i}].functionDeclarations[{j}]"))
        ignored |= {f"tools[{name}]": None for name in tool if _snake(name) != "function_declarations"}
    return tuple(tools), tuple(ignored)


def _tool(value: Json, where: str) -> ToolSpec:
    declaration = wire.as_object(value, where)
    name = wire.as_text(declaration.get("name"), f"{where}.name")
    if not name:
        raise ProxyError(f"Expected a name at {where}.name, got none.")
    schema = _get(declaration, "parametersJsonSchema")
    if schema is None:
        schema = declaration.get("parameters") or {}
        _lower_types(schema)
    parameters = wire.as_object(schema, f"{where}.parameters")
    return ToolSpec(name, wire.as_text(declaration.get("description"), f"{where}.description"), parameters)


def _lower_types(schema: Json) -> None:
    """Give the types of an OpenAPI schema JSON schema's names, in place. Only schemas are touched, never examples."""
    open_schemas = [schema]
    while open_schemas:
        node = open_schemas.pop()
        if not isinstance(node, dict):
            continue
        kind = node.get("type")
        if isinstance(kind, str) and kind in _TYPES:
            node["type"] = kind.lower()
        properties, options = node.get("properties"), _get(node, "anyOf")
        open_schemas.extend(properties.values() if isinstance(properties, dict) else ())
        open_schemas.extend(options if isinstance(options, list) else ())
        open_schemas.extend((node.get("items"), _get(node, "additionalProperties")))


def _get(fields: Mapping[str, Json], name: str) -> Json:
    """Return a field by its camelCase name, in whichever spelling it was sent."""
    return fields[name] if name in fields else fields.get(_snake(name))


@lru_cache(maxsize=256)
def _snake(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)


def _listed(value: Json, where: str) -> list[Json]:
    """Return an array; one object or string stands for an array of it, as Google's own examples have it."""
    return [value] if isinstance(value, dict | str) else wire.as_list(value, where)


def render_completion(completion: Completion, request: ChatRequest) -> bytes:
    """Return the `GenerateContentResponse`."""
    parts: list[Json] = []
    if completion.reasoning:
        parts.append({"text": completion.reasoning, "thought": True})
    if completion.content:
        parts.append({"text": completion.content})
    for call in completion.tool_calls:
        arguments = call.parsed_arguments()
        if arguments is None:
            parts.append({"text": call.arguments})
        parts.append({"functionCall": {"id": call.id, "name": call.name, "args": arguments or {}}})
    candidate: dict[str, Json] = {
        "index": 0,
        "content": {"role": "model", "parts": parts or [{"text": ""}]},
        "finishReason": _FINISH[completion.finish_reason],
    }
    usage: dict[str, Json] = {
        "promptTokenCount": completion.prompt_tokens,
        "candidatesTokenCount": completion.completion_tokens,
        "totalTokenCount": completion.prompt_tokens + completion.completion_tokens,
    }
    return wire.write_json(
        {
            "candidates": [candidate],
            "usageMetadata": usage,
            "modelVersion": completion.model,
            "responseId": completion.id,
        }
    )


def opening_event(completion_id: str, request: ChatRequest, prompt_tokens: int) -> bytes:
    """Return the bracket of a stream that is an array; events begin with the reply."""
    return b"[" if request.stream_as_array else b""


def keep_alive(completion_id: str, request: ChatRequest) -> bytes:
    """Return an empty line: google-genai takes a comment line for a broken answer."""
    return b"\n"


def stream_events(completion: Completion, request: ChatRequest) -> Iterator[bytes]:
    """Yield the reply as one chunk."""
    data = render_completion(completion, request)
    if request.stream_as_array:
        yield data + b"]"
        return
    yield wire.sse(data)


def count_body(prompt_tokens: int) -> bytes:
    """Return the answer of countTokens."""
    return wire.write_json({"totalTokens": prompt_tokens})


def models_body(name: str | None, context_length: int) -> bytes:
    """Return a model card or `/models`."""
    card: dict[str, Json] = {
        "name": f"models/{name or 'policy'}",
        "version": "1",
        "displayName": name or "policy",
        "inputTokenLimit": context_length,
        "outputTokenLimit": context_length,
        "supportedGenerationMethods": ["generateContent", "countTokens"],
    }
    return wire.write_json({"models": [card]} if name is None else card)


def error_body(kind: ErrorKind, message: str) -> bytes:
    """Return `{"error": {…}}` as Google words it."""
    return wire.write_json({"error": {"code": STATUS[kind], "message": message, "status": _ERROR_STATUS[kind]}})


def overflow_error(overflow: ContextOverflow) -> bytes:
    """Return the 400 in the service's own sentence."""
    message = (
        f"The input token count ({overflow.prompt_tokens}) exceeds the maximum number of tokens allowed "
        f"({overflow.context_length})."
    )
    return error_body("invalid_request", message)
