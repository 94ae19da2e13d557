"""The Chat Completions dialect: golden bodies in and out."""

from __future__ import annotations

import json
from typing import Any

import pytest
from proxy_rig import completion

from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Message, ToolCall, ToolSpec
from clawgym_env.proxy import chat

CALLS = (ToolCall("call1", "bash", '{"command": "ls"}'), ToolCall("call2", "read", '{"path": "a.txt"}'))


def parse(**fields: Any) -> ChatRequest:
    return chat.parse_request(json.dumps({"model": "m", **fields}).encode())


def user(text: str = "hi") -> dict[str, str]:
    return {"role": "user", "content": text}


def whole(done: Completion) -> bytes:
    return chat.render_completion(done, ChatRequest(chat.NAME, "policy", (Message("user", "hi"),)))


def streamed(done: Completion, *, include_usage: bool = False) -> list[Any]:
    """Return the data of every event, `[DONE]` checked and taken off."""
    request = ChatRequest("chat", "policy", (Message("user", "hi"),), stream=True, include_usage=include_usage)
    stream = b"".join([chat.opening_event(done.id, request, 7), *chat.stream_events(done, request)])
    lines = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


def test_a_request_of_pi_is_read_whole() -> None:
    request = parse(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":"ls"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        ],
        tools=[
            {"type": "function", "function": {"name": "bash", "description": "Run.", "parameters": {"type": "object"}}}
        ],
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=4096,
        store=False,
        temperature=0.3,
        tool_choice="auto",
    )
    assert request == ChatRequest(
        dialect="chat",
        model="m",
        messages=(
            Message("system", "Be brief."),
            Message("user", "one\ntwo"),
            Message("assistant", "", "hm", (ToolCall("c1", "bash", '{"command":"ls"}'),)),
            Message("tool", "a.txt", tool_call_id="c1"),
        ),
        tools=(ToolSpec("bash", "Run.", {"type": "object"}),),
        stream=True,
        include_usage=True,
        max_tokens=4096,
        client_sampling={"temperature": 0.3, "tool_choice": "auto"},
    )


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": ""}]])
def test_empty_content_is_the_same_in_every_spelling(content: object) -> None:
    assert parse(messages=[{"role": "assistant", "content": content}]).messages == (Message("assistant", ""),)


def test_an_image_becomes_a_placeholder() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    assert parse(messages=[{"role": "user", "content": parts}]).messages[0].content == "see\n[image]"


def test_unknown_fields_are_named_and_do_no_harm() -> None:
    assert parse(messages=[user()], verbosity="low", x_trace=1).unknown_fields == ("verbosity", "x_trace")


def test_the_newer_name_of_the_token_budget_wins_and_stops_may_be_one_string() -> None:
    request = parse(messages=[user()], max_tokens=5, max_completion_tokens=9, stop="END")
    assert (request.max_tokens, request.stop) == (9, ("END",))


def test_legacy_functions_are_tools() -> None:
    request = parse(
        messages=[
            user(),
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "done"},
        ],
        functions=[{"name": "f", "parameters": {}}],
    )
    assert request.messages[1].tool_calls == (ToolCall("f", "f", "{}"),)
    assert request.messages[2] == Message("tool", "done", tool_call_id="f")
    assert request.tools == (ToolSpec("f", "", {}),)


def test_a_character_cut_in_half_by_javascript_is_read() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"cut \\ud83d here"}]}'
    assert chat.parse_request(body).messages[0].content == "cut \ufffd here"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "invalid JSON"),
        (b"[]", "Expected a JSON object as body, got array"),
        (b'{"messages": 3}', "Expected an array at messages, got number"),
        (b'{"messages": []}', "at least one message"),
        (b'{"messages": [3]}', r"Expected an object at messages\[0\], got number"),
        (b'{"messages": [{"role": "robot"}]}', r"messages\[0\].role to be one of .* got 'robot'"),
        (b'{"messages": [{"role": "user", "content": [{"text": 1}]}]}', r"messages\[0\].content\[0\].text"),
        (b'{"messages": [{"role": "user"}], "max_tokens": 0}', "positive whole number at max_tokens, got 0"),
        (b'{"messages": [{"role": "user"}], "max_tokens": true}', "at max_tokens, got true"),
        (b'{"messages": [{"role": "user"}], "n": 2}', "Expected n to be 1, got 2"),
        (b'{"messages": [{"role": "user"}], "tools": [{"function": {}}]}', r"a name at tools\[0\].name"),
        (b"[" * 100_000, "invalid JSON"),
    ],
)
def test_a_bad_body_is_refused_with_the_field_named(body: bytes, words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        chat.parse_request(body)


def test_a_whole_answer_has_text_calls_and_true_counts() -> None:
    body = json.loads(whole(completion(tool_calls=CALLS, finish_reason="tool_calls", reasoning="hm")))
    assert body.pop("created") > 0
    assert body == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "model": "policy",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": "hello",
                    "refusal": None,
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "call1",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                        },
                        {
                            "id": "call2",
                            "type": "function",
                            "function": {"name": "read", "arguments": '{"path": "a.txt"}'},
                        },
                    ],
                },
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


@pytest.mark.parametrize(("calls", "content"), [((), ""), (CALLS, None)])
def test_content_is_null_only_beside_tool_calls(calls: tuple[ToolCall, ...], content: str | None) -> None:
    body = json.loads(whole(completion(content="", tool_calls=calls)))
    assert body["choices"][0]["message"]["content"] == content


def test_a_stream_says_what_the_whole_answer_says() -> None:
    done = completion(tool_calls=CALLS, finish_reason="tool_calls", reasoning="hm")
    chunks = streamed(done)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert {chunk["id"] for chunk in chunks} == {"chatcmpl-abc"}
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "hello"},
        {
            "tool_calls": [
                {
                    "index": 0,
                    "id": "call1",
                    "type": "function",
                    "function": {"name": "bash", "arguments": '{"command": "ls"}'},
                }
            ]
        },
        {
            "tool_calls": [
                {
                    "index": 1,
                    "id": "call2",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path": "a.txt"}'},
                }
            ]
        },
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["tool_calls"]


def test_the_usage_chunk_comes_last_and_only_when_asked_for() -> None:
    assert all("usage" not in chunk for chunk in streamed(completion()))
    last = streamed(completion(), include_usage=True)[-1]
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


def test_malformed_arguments_travel_as_they_were_sampled() -> None:
    broken = completion(tool_calls=(ToolCall("c", "bash", '{"command": "l'),))
    body = json.loads(whole(broken))
    assert body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == '{"command": "l'
    assert streamed(broken)[2]["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] == '{"command": "l'


def test_an_overflow_is_worded_as_harnesses_expect() -> None:
    error = json.loads(chat.overflow_error(ContextOverflow(40_000, 32_768)))["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 32768 tokens. However, your messages")
    assert "40000 tokens" in error["message"]
