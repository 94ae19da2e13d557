"""The Anthropic Messages dialect: golden bodies in and out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from proxy_rig import completion

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Message, ToolCall, ToolSpec
from clawgym_env.proxy import messages

CALLS = (ToolCall("call1", "Bash", '{"command": "ls"}'), ToolCall("call2", "Read", '{"path": "a.txt"}'))


def parse(**fields: Any) -> ChatRequest:
    return messages.parse_request(json.dumps({"model": "m", "max_tokens": 99, **fields}).encode())


def whole(done: Completion) -> bytes:
    return messages.render_completion(done, ChatRequest(messages.NAME, "policy", (Message("user", "hi"),)))


def streamed(done: Completion) -> list[tuple[str, Any]]:
    """Return (event name, data) of a whole stream."""
    request = ChatRequest("messages", "policy", (Message("user", "hi"),), stream=True)
    stream = b"".join([messages.opening_event(done.id, request, 7), *messages.stream_events(done, request)])
    events = []
    for event in stream.split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        events.append((name.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))))
    assert all(name == data["type"] for name, data in events)
    return events


def test_a_request_of_claude_code_is_read_whole() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    request = parse(
        system=[{"type": "text", "text": "You are.", **mark}, {"type": "text", "text": "Be brief."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "do it", **mark}]},
            {"role": "system", "content": "Date: today"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "xyz"},
                    {"type": "text", "text": "ok"},
                    {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "t2", "name": "Read", "input": {}, **mark},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": "a.txt", "is_error": False},
                    {
                        "type": "tool_result",
                        "tool_use_id": "t2",
                        "content": [{"type": "text", "text": "no"}],
                        "is_error": True,
                    },
                    {"type": "text", "text": "<system-reminder>", **mark},
                ],
            },
        ],
        tools=[{"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}, **mark}],
        stream=True,
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        context_management={"edits": []},
        output_config={"effort": "high"},
        stop_sequences=["END"],
    )
    assert request == ChatRequest(
        dialect="messages",
        model="m",
        messages=(
            Message("system", "You are.\nBe brief."),
            Message("user", "do it"),
            Message("system", "Date: today"),
            Message(
                "assistant",
                "ok",
                "hm",
                (ToolCall("t1", "Bash", '{"command":"ls"}'), ToolCall("t2", "Read", "{}")),
            ),
            Message("tool", "a.txt", tool_call_id="t1"),
            Message("tool", "no", tool_call_id="t2"),
            Message("user", "<system-reminder>"),
        ),
        tools=(ToolSpec("Bash", "Run.", {"type": "object"}),),
        stream=True,
        max_tokens=99,
        stop=("END",),
        client_sampling={"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}},
    )


def test_a_moved_cache_mark_and_a_string_for_a_block_change_nothing() -> None:
    blocks = parse(messages=[{"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}]}])
    assert blocks == parse(messages=[{"role": "user", "content": "x"}])


def test_text_before_a_tool_result_keeps_its_place() -> None:
    content = [{"type": "text", "text": "first"}, {"type": "tool_result", "tool_use_id": "t", "content": "r"}]
    parsed = parse(messages=[{"role": "user", "content": content}]).messages
    assert parsed == (Message("user", "first"), Message("tool", "r", tool_call_id="t"))


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "[image]"),
        ({"type": "document", "source": {}}, "[document]"),
        ({"type": "tool_result", "tool_use_id": "t", "content": None, "is_error": True}, "[error]"),
        ({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": {}}]}, "[image]"),
    ],
)
def test_what_has_no_text_becomes_a_placeholder(block: dict[str, Any], text: str) -> None:
    assert parse(messages=[{"role": "user", "content": [block]}]).messages[0].content == text


def test_a_deferred_tool_is_offered_once_a_search_has_loaded_it() -> None:
    tools = [{"name": "Web", "description": "", "input_schema": {}, "defer_loading": True}]
    found = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "tool_reference", "tool_name": "Web"}]}
    assert parse(messages=[{"role": "user", "content": "x"}], tools=tools).tools == ()
    assert [tool.name for tool in parse(messages=[{"role": "user", "content": [found]}], tools=tools).tools] == ["Web"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "tool", "content": ""}]}, r"messages\[0\].role to be user, assistant or system"),
        ({"messages": [{"role": "user", "content": 3}]}, r"Expected an array at messages\[0\].content, got number"),
        ({"messages": "x"}, "Expected an array at messages, got string"),
        ({"system": 3, "messages": []}, "at system"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, r"a name at tools\[0\].name"),
    ],
)
def test_a_bad_body_is_refused_with_the_field_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        parse(**fields)


def test_a_whole_answer_has_thinking_text_calls_and_true_counts() -> None:
    body = json.loads(whole(completion(tool_calls=CALLS, finish_reason="tool_calls", reasoning="hm")))
    thinking = body["content"].pop(0)
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert isinstance(thinking["signature"], str)
    assert body == {
        "id": "msg_abc",
        "type": "message",
        "role": "assistant",
        "model": "policy",
        "content": [
            {"type": "text", "text": "hello"},
            {"type": "tool_use", "id": "call1", "name": "Bash", "input": {"command": "ls"}},
            {"type": "tool_use", "id": "call2", "name": "Read", "input": {"path": "a.txt"}},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 7,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 3,
        },
    }


@pytest.mark.parametrize(
    ("finish", "stop_sequence", "reason"),
    [
        ("stop", None, "end_turn"),
        ("tool_calls", None, "tool_use"),
        ("length", None, "max_tokens"),
        ("stop", "END", "stop_sequence"),
    ],
)
def test_stop_reasons_are_the_dialects_own(finish: str, stop_sequence: str | None, reason: str) -> None:
    done = completion(finish_reason=finish, stop_sequence=stop_sequence)
    body = json.loads(whole(done))
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop_sequence)
    assert streamed(done)[-2][1]["delta"] == {"stop_reason": reason, "stop_sequence": stop_sequence}


def test_a_stream_is_a_well_formed_sequence_of_blocks() -> None:
    events = streamed(completion(tool_calls=CALLS[:1], finish_reason="tool_calls", reasoning="hm"))
    assert [name for name, _ in events] == [
        "message_start",
        "ping",
        *["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"],
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert events[0][1]["message"]["usage"]["input_tokens"] == 7
    assert events[0][1]["message"]["content"] == []
    deltas = [data["delta"] for name, data in events if name == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "hm"}
    assert deltas[1]["type"] == "signature_delta"
    assert deltas[2] == {"type": "text_delta", "text": "hello"}
    assert deltas[3] == {"type": "input_json_delta", "partial_json": '{"command": "ls"}'}
    assert [data["index"] for name, data in events if name == "content_block_start"] == [0, 1, 2]
    assert events[-2][1]["usage"] == {"input_tokens": 7, "output_tokens": 3}


def test_malformed_arguments_lose_nothing() -> None:
    broken = completion(content="", tool_calls=(ToolCall("c", "Bash", '{"command": "l'),))
    deltas = [data["delta"] for name, data in streamed(broken) if name == "content_block_delta"]
    assert deltas == [{"type": "input_json_delta", "partial_json": '{"command": "l'}]
    assert json.loads(whole(broken))["content"] == [
        {"type": "text", "text": '{"command": "l'},
        {"type": "tool_use", "id": "c", "name": "Bash", "input": {}},
    ]


def test_an_overflow_is_worded_as_claude_code_expects() -> None:
    error = json.loads(messages.overflow_error(ContextOverflow(40_000, 32_768)))
    assert error == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 40000 tokens > 32768 maximum"},
    }
