"""The OpenAI Responses dialect: golden bodies, replies that come back as the turn that was sampled, and the SDK."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from proxy_rig import GatedEngine, completion, eventually, run, running

from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Message, ToolCall, ToolSpec
from clawgym_env.proxy import responses
from clawgym_env.proxy.session import SessionSettings
from clawgym_env.trace.digests import message_digest

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "bash", "description": "Run.", "strict": False, "parameters": {"type": "object"}},
    {
        "type": "namespace",
        "name": "agents",
        "description": "Sub-agents.",
        "tools": [
            {"type": "function", "name": "spawn", "description": "Start one.", "parameters": {}},
            {"type": "function", "name": "wait", "description": "Wait.", "parameters": {}},
        ],
    },
    {
        "type": "custom",
        "name": "patch",
        "description": "Patch files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
    },
    {"type": "web_search", "external_web_access": True},
]
CALLS = (
    ToolCall("call1", "bash", '{"command": "ls"}'),
    ToolCall("call2", "agents__spawn", '{"task": "x"}'),
    ToolCall("call3", "patch", '{"input": "*** Begin\\nü"}'),
)


def parse(**fields: Any) -> ChatRequest:
    return responses.parse_request(json.dumps({"model": "m", **fields}).encode())


def read(*items: Any) -> tuple[Message, ...]:
    return parse(input=list(items)).messages


REQUEST = parse(input="hi", tools=TOOLS)


def whole(done: Completion) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(responses.render_completion(done, REQUEST))
    return body


def stream_bytes(done: Completion) -> bytes:
    opening = responses.opening_event(done.id, REQUEST, 7) + responses.keep_alive(done.id, REQUEST)
    return b"".join([opening, *responses.stream_events(done, REQUEST)])


def streamed(done: Completion) -> list[dict[str, Any]]:
    events = []
    for event in stream_bytes(done).split(b"\n\n")[:-1]:
        name, data = event.split(b"\n")
        events.append(json.loads(data.removeprefix(b"data: ")))
        assert name.removeprefix(b"event: ").decode() == events[-1]["type"]
    return events


def echo(items: Sequence[dict[str, Any]], *, ids: bool = True) -> list[dict[str, Any]]:
    """Return output items as a client sends them back, with a result behind the calls."""
    kept = [{k: v for k, v in item.items() if ids or k not in ("id", "status")} for item in items]
    kinds = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
    results = [
        {"type": kinds[item["type"]], "call_id": item["call_id"], "output": "ok"}
        for item in items
        if item["type"] in kinds
    ]
    return kept + results


def test_a_request_of_codex_is_read_whole() -> None:
    request = parse(
        input=[
            {
                "type": "message",
                "id": "msg_1",
                "role": "developer",
                "content": [{"type": "input_text", "text": "You."}],
            },
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Skills."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "do it"}]},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "hm"}],
                "content": None,
                "encrypted_content": "zzz",
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "id": "fc", "call_id": "c1", "name": "bash", "arguments": '{"command": "l'},
            {"type": "function_call", "call_id": "c2", "name": "spawn", "namespace": "agents", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "a\nü"},
            {"type": "function_call_output", "call_id": "c1", "output": "no"},
            {
                "type": "function_call_output",
                "call_id": "c2",
                "output": [{"type": "input_text", "text": "yes"}, {"type": "input_image", "image_url": "data:"}],
            },
            {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
            {"role": "user", "content": "more"},
        ],
        tools=TOOLS,
        stream=True,
        store=False,
        include=["reasoning.encrypted_content"],
        reasoning={"summary": "auto"},
        parallel_tool_calls=True,
        prompt_cache_key="k",
        client_metadata={},
        max_output_tokens=99,
        novelty=1,
    )
    assert request == ChatRequest(
        dialect="responses",
        model="m",
        messages=(
            Message("system", "You.\nSkills."),
            Message("user", "do it"),
            Message(
                "assistant",
                "ok",
                "hm",
                (
                    ToolCall("c1", "bash", '{"command": "l'),
                    ToolCall("c2", "agents__spawn", "{}"),
                    ToolCall("c3", "patch", '{"input": "a\\nü"}'),
                ),
            ),
            Message("tool", "no", tool_call_id="c1"),
            Message("tool", "yes\n[image]", tool_call_id="c2"),
            Message("tool", "done", tool_call_id="c3"),
            Message("user", "more"),
        ),
        tools=(
            ToolSpec("bash", "Run.", {"type": "object"}),
            ToolSpec("agents__spawn", "Sub-agents.\nStart one.", {}, namespace="agents"),
            ToolSpec("agents__wait", "Wait.", {}, namespace="agents"),
            ToolSpec(
                "patch",
                "Patch files.\nstart: /.+/",
                {
                    "type": "object",
                    "properties": {"input": {"type": "string"}},
                    "required": ["input"],
                    "additionalProperties": False,
                },
                kind="custom",
            ),
        ),
        stream=True,
        max_tokens=99,
        client_sampling={"reasoning": {"summary": "auto"}, "parallel_tool_calls": True},
        unknown_fields=("novelty", "tools[web_search]"),
    )


def test_a_deferred_tool_is_offered_once_an_item_has_brought_it() -> None:
    later = {"type": "function", "name": "web", "parameters": {}, "defer_loading": True}
    tools = [later, {"type": "namespace", "name": "n", "description": "N.", "tools": [later, {"name": "now"}]}]
    hi = {"role": "user", "content": "hi"}
    assert [tool.name for tool in parse(input=[hi], tools=tools).tools] == ["n__now"]
    brought = {"type": "additional_tools", "role": "developer", "tools": [later, {"name": "more"}]}
    request = parse(input=[hi, brought], tools=tools)
    assert [tool.name for tool in request.tools] == ["n__now", "web", "more"]
    assert request.messages == (Message("user", "hi"),)


def test_a_text_is_a_user_message_and_instructions_are_the_system_message() -> None:
    request = parse(input="hi", instructions="Be brief.")
    assert request.messages == (Message("system", "Be brief."), Message("user", "hi"))


def test_instructions_and_leading_developer_messages_are_one_system_message_later_ones_stay() -> None:
    developer = {"role": "developer", "content": "d"}
    request = parse(instructions="i", input=[developer, {"role": "user", "content": "u"}, developer])
    assert request.messages == (Message("system", "i\nd"), Message("user", "u"), Message("system", "d"))


def call_item(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "bash", "arguments": "{}", **fields}


def result(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": name}


def calls_of(messages: Sequence[Message]) -> list[tuple[str, ...]]:
    return [tuple(call.id for call in message.tool_calls) for message in messages if message.role == "assistant"]


def test_items_without_ids_are_one_turn_until_something_else_comes() -> None:
    messages = read(call_item("a"), call_item("b"), result("a"), result("b"), call_item("c"), result("c"))
    assert calls_of(messages) == [("a", "b"), ("c",)]


def test_results_put_between_the_calls_of_one_completion_do_not_split_its_turn() -> None:
    first, second = call_item("a", id="fc_0a1_0"), call_item("b", id="fc_0a1_1")
    messages = read(first, result("a"), second, result("b"), call_item("c", id="fc_0a2_0"))
    assert calls_of(messages) == [("a", "b"), ("c",)]
    assert [message.tool_call_id for message in messages if message.role == "tool"] == ["a", "b"]


def test_two_completions_that_touch_stay_two_turns() -> None:
    said = {"type": "message", "role": "assistant", "content": "x"}
    messages = read({**said, "id": "msg_0a1_0"}, {**said, "id": "msg_0a2_0"}, call_item("a", id="fc_0a2_1"))
    assert calls_of(messages) == [(), ("a",)]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "web_search_call", "id": "ws_1"}, Message("assistant", "[web_search_call]")),
        (
            {"type": "local_shell_call", "call_id": "c", "status": "completed", "action": {"command": ["ls"]}},
            Message("assistant", tool_calls=(ToolCall("c", "local_shell", '{"action":{"command":["ls"]}}'),)),
        ),
        ({"type": "shell_call_output", "call_id": "c", "output": "a"}, Message("tool", "a", tool_call_id="c")),
        (
            {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
            Message("tool", "[computer_screenshot]", tool_call_id="c"),
        ),
        ({"type": "agent_message", "author": "a", "content": [{"text": "news"}]}, Message("user", "news")),
        ({"type": "compaction", "encrypted_content": "x"}, Message("user", "[compaction]")),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, Message("assistant", "no")),
        ({"type": "reasoning", "content": [{"text": "all"}], "summary": []}, Message("assistant", "", "all")),
    ],
)
def test_items_of_every_type_are_read(item: dict[str, Any], message: Message) -> None:
    assert read(item) == (message,)


def test_a_type_of_null_is_one_left_out() -> None:
    tool: dict[str, Any] = {"type": None, "name": "f", "parameters": {}}
    request = responses.parse_request(
        json.dumps({"input": [{"type": None, "role": "user", "content": "go"}], "tools": [tool]}).encode()
    )
    assert request.messages == (Message("user", "go"),)
    assert [spec.name for spec in request.tools] == ["f"]
    assert request.unknown_fields == ()


def test_items_that_are_for_the_server_leave_no_trace() -> None:
    hi = {"role": "user", "content": "hi"}
    assert read({"type": "compaction_trigger"}, hi, {"type": "additional_tools", "tools": []}) == read(hi)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1", "input": "x"}, "got previous_response_id. No response is kept here"),
        ({"conversation": {"id": "c"}, "input": "x"}, "got conversation"),
        ({"background": True, "input": "x"}, "got background"),
        ({"input": [{"type": "item_reference", "id": "rs_1"}]}, r"the item itself at input\[0\], got a reference"),
        ({"input": [{"id": "rs_1"}]}, r"the item itself at input\[0\], got a reference"),
        ({"input": []}, "at least one item in input"),
        ({}, "at least one item in input"),
        ({"input": 3}, "Expected an array at input, got number"),
        ({"input": [3]}, r"Expected an object at input\[0\], got number"),
        ({"input": [{"type": 3}]}, r"at input\[0\].type"),
        ({"input": [{"role": "critic", "content": "x"}]}, r"input\[0\].role to be one of"),
        ({"input": [call_item("a", namespace=3)]}, r"input\[0\].namespace"),
        ({"input": [{"type": "custom_tool_call", "name": "p", "input": {}}]}, r"input\[0\].input"),
        ({"input": "x", "tools": [{"type": "function"}]}, r"a name at tools\[0\].name"),
        (
            {"input": "x", "tools": [{"type": "namespace", "name": "n", "tools": [{}]}]},
            r"at tools\[0\].tools\[0\].name",
        ),
        ({"input": "x", "max_output_tokens": 0}, "at max_output_tokens"),
    ],
)
def test_a_bad_body_is_refused_with_the_field_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        parse(**fields)


def test_a_whole_answer_has_reasoning_text_calls_and_true_counts() -> None:
    body = whole(completion(tool_calls=CALLS, finish_reason="tool_calls", reasoning="hm"))
    assert isinstance(body.pop("created_at"), int)
    assert body.pop("output") == [
        {
            "id": "rs_abc_0",
            "type": "reasoning",
            "status": "completed",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "Y2xhd2d5bQ==",
        },
        {
            "id": "msg_abc_1",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hello", "annotations": [], "logprobs": []}],
        },
        {
            "id": "fc_abc_2",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_1",
            "name": "bash",
            "arguments": '{"command": "ls"}',
        },
        {
            "id": "fc_abc_3",
            "type": "function_call",
            "status": "completed",
            "call_id": "call_2",
            "name": "spawn",
            "namespace": "agents",
            "arguments": '{"task": "x"}',
        },
        {
            "id": "ctc_abc_4",
            "type": "custom_tool_call",
            "status": "completed",
            "call_id": "call_3",
            "name": "patch",
            "input": "*** Begin\nü",
        },
    ]
    assert body == {
        "id": "resp_abc",
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": "policy",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 7,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 10,
        },
    }


REPLIES = [
    completion(),
    completion(content=""),
    completion(content="", reasoning="hm"),
    completion(tool_calls=CALLS, finish_reason="tool_calls", reasoning="hm"),
    completion(finish_reason="length"),
    completion(content="", tool_calls=(ToolCall("c", "patch", '{"input": "a'),), finish_reason="length"),
]


@pytest.mark.parametrize("done", REPLIES)
def test_a_stream_builds_the_same_items_under_the_same_ids(done: Completion) -> None:
    events = streamed(done)
    assert [event["type"] for event in events[:3]] == ["response.created", *["response.in_progress"] * 2]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == [0, 1, *range(1, len(events) - 1)]
    last, body = events[-1], whole(done)
    assert last["response"] == {**body, "created_at": last["response"]["created_at"]}
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert finished == body["output"]
    started = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["id"] for item in started] == [item["id"] for item in finished]
    assert all(item["status"] == "in_progress" for item in started)
    inner = [event for event in events if "item_id" in event]
    assert all(body["output"][event["output_index"]]["id"] == event["item_id"] for event in inner)


def test_the_events_of_each_item_are_the_apis_own() -> None:
    events = streamed(completion(tool_calls=(CALLS[0], CALLS[2]), finish_reason="tool_calls", reasoning="hm"))
    kinds = [event["type"].removeprefix("response.") for event in events[3:]]
    assert kinds == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
        "completed",
    ]


def test_a_cut_reply_is_incomplete_and_says_why() -> None:
    done = completion(finish_reason="length")
    body = whole(done)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"
    assert streamed(done)[-1]["type"] == "response.incomplete"


RAW = REPLIES[-1]
"""A custom call that did not parse: only the item's id tells that its input is not the tool's."""


@pytest.mark.parametrize(
    ("done", "ids"), [(done, ids) for done in REPLIES for ids in (True, False) if ids or done != RAW]
)
def test_a_reply_comes_back_as_what_was_sent(done: Completion, ids: bool) -> None:
    (message,) = [item for item in read(*echo(whole(done)["output"], ids=ids)) if item.role == "assistant"]
    assert message_digest(message) == message_digest(done.as_message())
    assert (message.reasoning or None) == done.reasoning


@given(st.one_of(st.text(), st.builds(json.dumps, st.dictionaries(st.sampled_from(["input", "x"]), st.text()))))
def test_a_custom_call_comes_back_as_sampled_whatever_the_policy_wrote(arguments: str) -> None:
    done = completion(content="", tool_calls=(ToolCall("c", "patch", arguments),))
    (message, _) = read(*echo(whole(done)["output"]))
    assert message_digest(message) == message_digest(done.as_message())


def test_a_name_no_tool_has_goes_out_as_it_was_sampled() -> None:
    (item,) = whole(completion(content="", tool_calls=(ToolCall("c", "agents__fly", "{}"),)))["output"]
    assert (item["type"], item["name"], item.get("namespace")) == ("function_call", "agents__fly", None)


def test_an_overflow_is_the_apis_own_error() -> None:
    error = json.loads(responses.overflow_error(ContextOverflow(40_000, 32_768)))["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "context_length_exceeded",
        "input",
    )
    assert "maximum context length is 32768 tokens" in error["message"]


@pytest.mark.parametrize("kind", ["invalid_request", "not_found", "too_large", "unavailable"])
def test_errors_have_openais_form(kind: Any) -> None:
    error = json.loads(responses.error_body(kind, "words"))["error"]
    assert (error["message"], error["param"], error["code"]) == ("words", None, None)
    assert error["type"].endswith("_error")


def sdk(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0)


@asynccontextmanager
async def serving(stream: bytes) -> AsyncIterator[str]:
    """Answer every request with one event stream."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0]))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n" + stream)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"


@pytest.mark.parametrize("done", REPLIES)
def test_the_sdk_reads_every_reply_from_the_stream(done: Completion) -> None:
    async def test() -> None:
        types, items, final = [], [], None
        async with serving(stream_bytes(done)) as url, sdk(url) as client:
            async for event in await client.responses.create(model="m", input="hi", stream=True):
                types.append(event.type)
                if event.type == "response.output_item.done":
                    items.append(event.item)
                if event.type in ("response.completed", "response.incomplete"):
                    final = event.response
        assert types[0] == "response.created"
        assert final is not None
        assert final.output == items
        assert final.output_text == done.content

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_sdk_gets_parallel_calls_and_its_history_is_recognised(stream: bool) -> None:
    replies = [
        "look\n"
        + tool_call("bash", command="ls")
        + tool_call("agents__spawn", task="x")
        + tool_call("patch", input="*** Begin"),
        "more\n" + tool_call("bash", command="cat"),
        "done",
    ]

    async def test() -> None:
        async with running(ScriptedEngine(replies)) as rig, sdk(rig.url("/v1")) as client:
            history: list[Any] = [{"role": "developer", "content": "d"}, {"role": "user", "content": "hi"}]
            for turn in range(3):
                if stream:
                    async with client.responses.stream(model="any", input=history, tools=TOOLS) as events:
                        done: Any = await events.get_final_response()
                else:
                    done = await client.responses.create(model="any", input=history, tools=TOOLS)
                output = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in done.output]
                kinds = [(item["type"], item.get("name"), item.get("namespace")) for item in output]
                if turn == 0:
                    assert kinds == [
                        ("message", None, None),
                        ("function_call", "bash", None),
                        ("function_call", "spawn", "agents"),
                        ("custom_tool_call", "patch", None),
                    ]
                    assert output[3]["input"] == "*** Begin"
                assert (done.model, done.status) == ("any", "completed")
                history += echo(output)
            assert done.output_text == "done"
            tree = await rig.session.settle()
            assert [call.lineage_parent for call in tree.calls] == [None, 0, 1]
            assert [call.drift_reason for call in tree.calls] == [None, None, None]
            assert tree.buckets()["trained"] == tree.num_completion_tokens
            assert (done.usage.input_tokens, done.usage.output_tokens) == (tree[2].prompt_len, len(tree[2].token_ids))

    run(test)


def test_dropped_ids_and_arguments_written_anew_make_no_fork() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["look\n" + tool_call("bash", b=1, a=2), "done"])) as rig:
            hi = {"role": "user", "content": "hi"}
            first = (await rig.post(RESPONSES, {"model": "m", "input": [hi], "tools": TOOLS})).json()
            items = echo(first["output"], ids=False)
            assert re.fullmatch(r"call_[A-Za-z0-9_-]{1,59}", items[1]["call_id"])  # OpenClaw keeps no other
            items[1]["arguments"] = '{"a":2,"b":1.0}'
            await rig.post(RESPONSES, {"model": "m", "input": [hi, *items], "tools": TOOLS})
            tree = await rig.session.settle()
            assert [(call.lineage_parent, call.drift_reason) for call in tree.calls] == [(None, None), (0, None)]

    run(test)


def test_the_prompt_can_be_counted_by_the_sdk() -> None:
    async def test() -> None:
        async with running() as rig, sdk(rig.url("/v1")) as client:
            counted = await client.responses.input_tokens.count(model="m", input="hi", tools=TOOLS)
            done = await client.responses.create(model="m", input="hi", tools=TOOLS)
            assert done.usage is not None
            assert counted.input_tokens == done.usage.input_tokens
            assert rig.session.num_calls == 1

    run(test)


def test_routes_of_kept_responses_are_not_found() -> None:
    async def test() -> None:
        async with running() as rig:
            for path in ("/compact", "/resp_1/cancel"):
                answer = await rig.post(RESPONSES + path, {"model": "m", "input": "hi"})
                assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            for method in ("GET", "DELETE"):
                answer = await rig.http.request(method, rig.url(RESPONSES + "/resp_1"))
                assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            assert (await rig.http.get(rig.url(RESPONSES))).status_code == 200
            assert rig.session.num_calls == 0

    run(test)


def test_an_overflow_reaches_the_sdk_as_a_400_with_its_code() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["x"], context_length=64)) as rig, sdk(rig.url("/v1")) as client:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model="m", input="long " * 100, stream=True)
            assert caught.value.code == "context_length_exceeded"

    run(test)


def test_a_waiting_stream_repeats_in_progress() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine, settings=SessionSettings(keep_alive_s=0.01)) as rig:
            reader, _ = await rig.send(RESPONSES, {"model": "m", "input": "hi", "stream": True})
            beats = 0
            while beats < 3:
                beats += (await reader.readline()).startswith(b"event: response.in_progress")
            await eventually(lambda: engine.started == 1)
            engine.gate.set()
            rest = await reader.readuntil(b"response.completed")
            assert b"response.output_text.done" in rest

    run(test)
