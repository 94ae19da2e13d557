"""Strict readers of what the proxy answers: a harness would accept anything looser, so a test must not.

Each turns a whole body or an event stream into the `Reply` it stands for, and fails on a missing, doubled or misplaced
event. Streams are put together into the whole body first, so that both forms are held to the same shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from recordings import READERS, Reply

from clawgym_env.messages import Dialect

Event = tuple[str | None, str]
CHAT_FINISHES = {"stop", "tool_calls", "length"}
STOP_REASONS = {"end_turn", "tool_use", "max_tokens", "stop_sequence"}


def read_reply(dialect: Dialect, content_type: str, data: bytes, *, stream: bool) -> Reply:
    """Return the turn an answer of status 200 holds."""
    if not stream:
        assert content_type.startswith("application/json"), content_type
        return _read(dialect, json.loads(data))
    assert content_type.startswith("text/event-stream"), content_type
    return _read(dialect, ASSEMBLERS[dialect](events(data)))


def read_error(dialect: Dialect, status: int, data: bytes) -> str:
    """Return the message of an error in the dialect's own form."""
    body = json.loads(data)
    if dialect == "messages":
        assert body["type"] == "error"
        assert isinstance(body["error"]["type"], str)
    elif dialect == "gemini":
        assert body["error"]["code"] == status
        assert isinstance(body["error"]["status"], str)
    else:
        assert body["error"].keys() >= {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    return message


def events(data: bytes) -> list[Event]:
    """Split an event stream into (event name, data); comments are dropped, anything else that is no event fails."""
    text = data.decode("utf-8")
    assert text.endswith("\n\n"), "an event is cut short"
    found: list[Event] = []
    for frame in text[:-2].split("\n\n"):
        name, payload = None, []
        for line in frame.split("\n"):
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                name = value
            elif field == "data":
                payload.append(value)
            else:
                assert field == "", f"no such field: {line!r}"
        if payload:
            found.append((name, "\n".join(payload)))
    return found


def _read(dialect: Dialect, body: Mapping[str, Any]) -> Reply:
    if dialect == "chat":
        assert body["object"] == "chat.completion"
        assert len(body["choices"]) == 1
        choice = body["choices"][0]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in CHAT_FINISHES
        assert (choice["finish_reason"] == "tool_calls") <= bool(choice["message"].get("tool_calls"))
        _check_usage(body["usage"], "prompt_tokens", "completion_tokens")
    elif dialect == "messages":
        assert (body["type"], body["role"]) == ("message", "assistant")
        assert body["stop_reason"] in STOP_REASONS
        _check_usage(body["usage"], "input_tokens", "output_tokens")
    elif dialect == "responses":
        assert body["object"] == "response"
        assert body["status"] in ("completed", "incomplete")
        assert (body["status"] == "incomplete") == bool(body.get("incomplete_details"))
        _check_usage(body["usage"], "input_tokens", "output_tokens")
    else:
        assert len(body["candidates"]) == 1
        _check_usage(body["usageMetadata"], "promptTokenCount", "candidatesTokenCount")
    return READERS[dialect](body)


def _check_usage(usage: Mapping[str, Any], prompt: str, reply: str) -> None:
    assert usage[prompt] > 0
    assert usage[reply] >= 0


def assemble_chat(stream: Sequence[Event]) -> dict[str, Any]:
    """Put `chat.completion.chunk`s together."""
    assert all(name is None for name, _ in stream)
    assert stream[-1][1] == "[DONE]"
    chunks = [json.loads(data) for _, data in stream[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    usage = next((chunk["usage"] for chunk in chunks if chunk.get("usage")), None)
    assert usage is None or (chunks[-1]["choices"] == [] and chunks[-1]["usage"] == usage)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert choices[0]["delta"].get("role") == "assistant"
    assert [choice["finish_reason"] is not None for choice in choices] == [False] * (len(choices) - 1) + [True]
    text, reasoning, calls = "", "", {}
    for choice in choices:
        delta = choice["delta"]
        text += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or ():
            whole = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
            whole["id"] = call.get("id") or whole["id"]
            whole["function"]["name"] += call["function"].get("name") or ""
            whole["function"]["arguments"] += call["function"].get("arguments") or ""
    assert list(calls) == list(range(len(calls)))
    message = {"role": "assistant", "content": text, "reasoning_content": reasoning, "tool_calls": list(calls.values())}
    return {
        "object": "chat.completion",
        "choices": [{"message": message, "finish_reason": choices[-1]["finish_reason"]}],
        # Asked for with `stream_options` only.
        "usage": usage or {"prompt_tokens": 1, "completion_tokens": 0},
    }


def assemble_messages(stream: Sequence[Event]) -> dict[str, Any]:
    """Put the events of a message together."""
    parts = [(name, json.loads(data)) for name, data in stream]
    assert all(name == part["type"] for name, part in parts)
    kinds = [part["type"] for _, part in parts if part["type"] != "ping"]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == kinds.count("message_stop") == 1
    message: dict[str, Any] = {}
    block: dict[str, Any] | None = None
    text = ""
    for _, part in parts:
        match part["type"]:
            case "message_start":
                message = dict(part["message"])
                assert message["content"] == []
                assert message["stop_reason"] is None
            case "content_block_start":
                assert block is None
                assert part["index"] == len(message["content"])
                block, text = dict(part["content_block"]), ""
            case "content_block_delta":
                assert block is not None
                assert part["index"] == len(message["content"])
                delta = part["delta"]
                field = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                if delta["type"] == "input_json_delta":
                    text += delta["partial_json"]
                else:
                    block[field[delta["type"]]] += delta[field[delta["type"]]]
            case "content_block_stop":
                assert block is not None
                assert part["index"] == len(message["content"])
                if block["type"] == "tool_use":
                    block["input"] = _input(text)
                message["content"].append(block)
                block = None
            case "message_delta":
                assert block is None
                message |= part["delta"]
                message["usage"] = {**message["usage"], **part["usage"]}
    return message


def _input(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"_malformed_raw": text}


def assemble_responses(stream: Sequence[Event]) -> dict[str, Any]:
    """Put the events of a response together, and hold the last one to what the others said."""
    parts = [(name, json.loads(data)) for name, data in stream if data != "[DONE]"]
    assert all(name == part["type"] for name, part in parts)
    numbers = [part["sequence_number"] for _, part in parts]
    assert numbers == sorted(set(numbers)), "sequence numbers do not rise"
    kinds = [part["type"] for _, part in parts]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    items: dict[int, dict[str, Any]] = {}
    opened: set[int] = set()
    written: dict[int, str] = {}
    for _, part in parts:
        match part["type"]:
            case "response.output_item.added":
                assert part["output_index"] == len(opened)
                opened.add(part["output_index"])
            case "response.output_item.done":
                assert part["output_index"] in opened
                assert part["output_index"] not in items
                items[part["output_index"]] = part["item"]
            case "response.output_text.delta" | "response.function_call_arguments.delta":
                index = part["output_index"]
                assert index in opened
                assert index not in items
                written[index] = written.get(index, "") + part["delta"]
    body: dict[str, Any] = parts[-1][1]["response"]
    assert [items[index] for index in sorted(items)] == body["output"]
    for index, text in written.items():
        item = items[index]
        whole = item.get("arguments") or "".join(part["text"] for part in item.get("content") or ())
        assert text == whole
    return body


def assemble_gemini(stream: Sequence[Event]) -> dict[str, Any]:
    """Put the partial responses together."""
    assert all(name is None for name, _ in stream)
    chunks = [json.loads(data) for _, data in stream]
    parts = [part for chunk in chunks for part in chunk["candidates"][0].get("content", {}).get("parts", ())]
    finishes = [chunk["candidates"][0].get("finishReason") for chunk in chunks]
    assert all(finish is None for finish in finishes[:-1])
    assert finishes[-1] is not None
    candidate = {"content": {"role": "model", "parts": parts}, "finishReason": finishes[-1]}
    return {"candidates": [candidate], "usageMetadata": chunks[-1]["usageMetadata"]}


ASSEMBLERS = {
    "chat": assemble_chat,
    "messages": assemble_messages,
    "responses": assemble_responses,
    "gemini": assemble_gemini,
}
