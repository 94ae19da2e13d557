"""Malformed request bodies: valid ones of each dialect, broken in every place and in every way that we could think of.

A wrong value stands at every path once; the rest is drawn at random from changes of structure and of bytes.
Invariant: the same number is the same case, so a failure names all it takes to see it again.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

SECRET = "SECRET"
"""Stands in every valid body, for a test to put something of its own into."""


@dataclass(frozen=True)
class Case:
    number: int
    path: str
    """Behind the rollout's URL."""
    body: bytes


_SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
_CHAT = {
    "model": "policy",
    "messages": [
        {"role": "system", "content": f"You are {SECRET}."},
        {
            "role": "user",
            "content": [{"type": "text", "text": SECRET}, {"type": "image_url", "image_url": {"url": "x"}}],
        },
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
        {"role": "assistant", "content": "ok", "function_call": {"name": "read", "arguments": "{}"}},
        {"role": "function", "name": "read", "content": "text"},
        {"role": "developer", "content": "go on"},
        {"role": "user", "content": "please"},
    ],
    "tools": [{"type": "function", "function": {"name": "read", "description": "Read.", "parameters": _SCHEMA}}],
    "functions": [{"name": "list", "parameters": {}}],
    "stream": False,
    "stream_options": {"include_usage": True},
    "max_completion_tokens": 64,
    "max_tokens": 64,
    "stop": ["END"],
    "n": 1,
    "temperature": 1,
}
_MESSAGES = {
    "model": "policy",
    "max_tokens": 64,
    "system": [{"type": "text", "text": f"You are {SECRET}.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": SECRET}, {"type": "image", "source": {"data": "x"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "ok"},
                {"type": "tool_use", "id": "c1", "name": "read", "input": {"path": "a"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [{"type": "text", "text": "b"}],
                    "is_error": True,
                },
                {"type": "tool_reference", "tool_name": "list"},
            ],
        },
        {"role": "system", "content": "go on"},
        {"role": "user", "content": "please"},
    ],
    "tools": [
        {"name": "read", "description": "Read.", "input_schema": _SCHEMA},
        {"name": "list", "input_schema": {}, "defer_loading": True},
    ],
    "stream": False,
    "stop_sequences": ["END"],
    "thinking": {"type": "adaptive"},
}
_RESPONSES = {
    "model": "policy",
    "instructions": f"You are {SECRET}.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "rules"}]},
        {"role": "user", "content": SECRET},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "content": None},
        {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "read", "arguments": '{"path": "a"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "text"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "text"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "b"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
    ],
    "tools": [
        {"type": "function", "name": "read", "description": "Read.", "parameters": _SCHEMA, "strict": False},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}},
        {"type": "namespace", "name": "mcp", "description": "More.", "tools": [{"type": "function", "name": "list"}]},
        {"type": "web_search"},
    ],
    "stream": False,
    "store": False,
    "max_output_tokens": 64,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low"},
}
_GEMINI = {
    "systemInstruction": {"role": "user", "parts": [{"text": f"You are {SECRET}."}]},
    "contents": [
        {"role": "user", "parts": [{"text": SECRET}, {"inlineData": {"mimeType": "image/png", "data": "x"}}]},
        {
            "role": "model",
            "parts": [
                {"text": "hm", "thought": True},
                {"text": "ok"},
                {"functionCall": {"name": "read", "args": {"path": "a"}, "id": "c1"}, "thoughtSignature": "x"},
                {"function_call": {"name": "read", "args": {}}},
            ],
        },
        {
            "role": "function",
            "parts": [
                {"functionResponse": {"name": "read", "response": {"output": "text"}, "id": "c1"}},
                {"functionResponse": {"name": "read", "response": {"error": "no"}, "parts": [{"text": "b"}]}},
            ],
        },
        {
            "role": "user",
            "parts": [{"fileData": {"mimeType": "a/b", "fileUri": "x"}}, {"executableCode": {"code": "1"}}],
        },
    ],
    "tools": [
        {
            "functionDeclarations": [
                {"name": "read", "parameters": {"type": "OBJECT", "properties": {"a": {"type": "STRING"}}}}
            ]
        },
        {"function_declarations": [{"name": "list", "parametersJsonSchema": {"type": "object"}}]},
        {"googleSearch": {}},
    ],
    "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
    "generationConfig": {"maxOutputTokens": 64, "stopSequences": ["END"], "temperature": 1, "candidateCount": 1},
    "safetySettings": [{"category": "x", "threshold": "y"}],
}
_METHODS = ("generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent", "countTokens")

VALID: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "chat": (("/v1/chat/completions", _CHAT), ("/v1/chat/completions", {**_CHAT, "stream": True})),
    "messages": (
        ("/v1/messages?beta=true", _MESSAGES),
        ("/v1/messages", {**_MESSAGES, "stream": True}),
        ("/v1/messages/count_tokens", _MESSAGES),
    ),
    "responses": (("/v1/responses", _RESPONSES), ("/v1/responses", {**_RESPONSES, "stream": True})),
    "gemini": tuple((f"/v1beta/models/policy:{method}", _GEMINI) for method in _METHODS),
}
"""By dialect: path and body of requests that are answered with 200."""

_ODD_PATHS = (
    "models/%ff%00:generateContent",
    "models/a/b:c:generateContent?alt=sse&alt=json",
    f"models/{'x' * 9000}:countTokens",
)

_DEEP = 100_000
_RAW: tuple[bytes, ...] = (
    *(
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"-0",
        b"1e-999",
        b"0x10",
        b"01",
        b"tru",
        b"'x'",
        b"/* x */ 1",
        b"undefined",
        b"",
    ),
    *(b"1" + b"0" * digits for digits in (30, 400, 5000)),
    *(b"[" * depth + b"]" * depth for depth in (100, 300, 1100, 5000)),
    *(b'{"properties":' * depth + b"1" + b"}" * depth for depth in (100, 500, 900, 5000)),
    b"[" * _DEEP,
    *(
        b'"\\ud800"',
        b'"\\udc00\\ud800x"',
        b'"\\u0000"',
        b'"\\x41"',
        b'"\x00"',
        b'"\xff\xfe"',
        b'"\xc0\xaf"',
        b'"\xed\xa0\x80"',
    ),
    *(b'{"type":"text","type":1,"text":"a","text":[]}', b'{"a":1,}', b"[1,]", b'{"a"}', b'"open'),
    b'"' + b"x" * 200_000 + b'"',
    b"[" + b"{}," * 20_000 + b"{}]",
)
"""What JSON cannot say, or Python's writer would not."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *(
        "",
        " ",
        "x",
        "null",
        "user",
        "model",
        "tool",
        "text",
        "é𝄞\u2028\x07",
        "<|im_start|>user\n<|im_end|>",
        "A" * 3000,
    ),
    *([], [None], [[]], [1, "a", {}], [[["deep"]]], {}, {"": None}, {"type": "text"}, {"text": None}, {"type": "new"}),
    *({"type": "tool_result"}, {"type": "tool_use"}, {"role": "user"}, {"functionCall": {}}, {"content": {"a": []}}),
)
_MARKED = re.compile(rb'"@raw(\d+)@"')
_HOSTILE: tuple[Any, ...] = (*_VALUES, *(f"@raw{i}@" for i in range(len(_RAW))))

Place = tuple[Any, Any]
"""A container and the key or index in it."""


def cases(dialect: str, count: int) -> Iterator[Case]:
    """Yield the first `count` cases of a dialect, all different."""
    seen: set[tuple[str, bytes]] = set()
    for path, body in itertools.chain(_wrong_everywhere(dialect), _at_random(dialect)):
        if len(seen) == count:
            return
        if (path, body) not in seen:
            yield Case(len(seen), path, body)
            seen.add((path, body))


def _wrong_everywhere(dialect: str) -> Iterator[tuple[str, bytes]]:
    """Put each hostile value at each place of a valid body, over all its paths in turn."""
    valid = itertools.cycle((path, json.dumps(body)) for path, body in VALID[dialect])
    size = sum(1 for _ in _places(VALID[dialect][0][1]))
    for at, value in itertools.product(range(size), _HOSTILE):
        path, text = next(valid)
        body = json.loads(text)
        container, key = next(itertools.islice(_places(body), at, None))
        container[key] = value
        yield path, _written(body)


def _at_random(dialect: str) -> Iterator[tuple[str, bytes]]:
    draw = random.Random(dialect)
    valid = [(path, json.dumps(body)) for path, body in VALID[dialect]]
    while True:
        path, text = draw.choice(valid)
        if dialect == "gemini" and draw.random() < 0.02:
            path = f"/v1beta/{draw.choice(_ODD_PATHS)}"
        root = {"": json.loads(text)}
        for _ in range(draw.randint(1, 4)):
            draw.choice(_CHANGES)(root, draw)
        data = _written(root[""], ascii_only=draw.random() < 0.5)
        if draw.random() < 0.3:
            data = draw.choice(_DAMAGES)(data, draw)
        yield path, data


def _places(root: Any) -> Iterator[Place]:
    keys = list(root) if isinstance(root, dict) else range(len(root)) if isinstance(root, list) else ()
    for key in keys:
        yield root, key
        yield from _places(root[key])


def _pick(root: dict[str, Any], draw: random.Random) -> Place:
    return draw.choice(list(_places(root)))


def _written(value: Any, *, ascii_only: bool = True) -> bytes:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    return _MARKED.sub(lambda mark: _RAW[int(mark[1])], data)


def _replace(root: dict[str, Any], draw: random.Random) -> None:
    container, key = _pick(root, draw)
    container[key] = draw.choice(_HOSTILE)


def _delete(root: dict[str, Any], draw: random.Random) -> None:
    container, key = _pick(root, draw)
    if container is not root:
        del container[key]


def _swap(root: dict[str, Any], draw: random.Random) -> None:
    (one, key), (other, place) = _pick(root, draw), _pick(root, draw)
    one[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(one[key])


def _repeat(root: dict[str, Any], draw: random.Random) -> None:
    lists = [container[key] for container, key in _places(root) if isinstance(container[key], list) and container[key]]
    if lists:
        chosen = draw.choice(lists)
        chosen.extend(copy.deepcopy(draw.choice(chosen)) for _ in range(draw.choice((1, 3, 200))))


def _shuffle(root: dict[str, Any], draw: random.Random) -> None:
    container, key = _pick(root, draw)
    if isinstance(container[key], list):
        draw.shuffle(container[key])


def _rename(root: dict[str, Any], draw: random.Random) -> None:
    container, key = _pick(root, draw)
    if container is not root and isinstance(key, str):
        container[draw.choice((key.upper(), key + " ", "", "type", "role", "content", "parts"))] = container.pop(key)


def _add(root: dict[str, Any], draw: random.Random) -> None:
    container, key = _pick(root, draw)
    if isinstance(container[key], dict):
        container[key][draw.choice(("type", "text", "content", "name", "id", "new", "output"))] = draw.choice(_HOSTILE)


def _wrap(root: dict[str, Any], draw: random.Random) -> None:
    container, key = _pick(root, draw)
    value = container[key]
    container[key] = draw.choice(([value], {"content": value}, json.dumps(value), str(value)))


_CHANGES: Sequence[Callable[[dict[str, Any], random.Random], None]] = (
    *(_replace, _replace, _delete, _swap, _repeat, _shuffle, _rename, _add, _wrap),
)


def _cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data) + 1)]


def _flip(data: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw.randint(1, 8)):
        if damaged:
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
    return bytes(damaged)


def _insert(data: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice((*_RAW[:20], b"\x00", b"\xef\xbb\xbf", b"\\", b'"', b"\r\n\r\n", b"}{")) + data[at:]


def _double_key(data: bytes, draw: random.Random) -> bytes:
    at = draw.choice([i for i, byte in enumerate(data) if byte == ord("{")] or [0])
    key = draw.choice(("role", "type", "text", "content", "messages", "contents", "input", "name", "model")).encode()
    return (
        data[: at + 1] + b'"' + key + b'":' + draw.choice((b"1", b"[]", b'"x"', b"{}", b"null")) + b"," + data[at + 1 :]
    )


def _reencode(data: bytes, draw: random.Random) -> bytes:
    return data.decode("utf-8", "replace").encode(
        draw.choice(("utf-16", "utf-32", "utf-7", "utf-8-sig", "cp037")), "replace"
    )


def _another(data: bytes, draw: random.Random) -> bytes:
    return draw.choice(
        (b"", b" ", b"null", b"[]", b'"x"', b"{}", b"0", data + data, b"[" + data + b"]", b"\xff", b"data: " + data)
    )


_DAMAGES: Sequence[Callable[[bytes, random.Random], bytes]] = (_cut, _flip, _insert, _double_key, _reencode, _another)
