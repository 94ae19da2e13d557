"""The Gemini dialect: golden bodies in and out, and google-genai as a client of the running proxy."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from google.genai.client import AsyncClient
from proxy_rig import GatedEngine, Rig, completion, eventually, run, running

from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.errors import ContextOverflow, ProxyError
from clawgym_env.messages import ChatRequest, Completion, Message, ToolCall, ToolSpec
from clawgym_env.proxy import gemini
from clawgym_env.proxy.session import SessionSettings

CALLS = (ToolCall("call1", "bash", '{"command": "ls"}'), ToolCall("call2", "read", '{"path": "a.txt"}'))
WHOLE = "models/policy:generateContent"
STREAM = "models/policy:streamGenerateContent?alt=sse"
ARRAY = "models/policy:streamGenerateContent"
TOOL_REPLY = "look\n" + tool_call("bash", command="ls") + tool_call("read", path="a.txt")
HI = [{"role": "user", "parts": [{"text": "hi"}]}]


def parse(contents: Any = HI, *, path: str = WHOLE, **fields: Any) -> ChatRequest:
    return gemini.parse_request(json.dumps({"contents": contents, **fields}).encode(), path)


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": list(parts)}


def called(name: str, args: Any, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args, **fields}}


def answered(name: str, output: str, **fields: Any) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"output": output}, **fields}}


def streamed(done: Completion, *, path: str = STREAM) -> bytes:
    request = parse(path=path)
    start = gemini.opening_event(done.id, request, 7) + gemini.keep_alive(done.id, request)
    return start + b"".join(gemini.stream_events(done, request))


def test_a_request_of_gemini_cli_is_read_whole() -> None:
    request = parse(
        [
            said("user", {"text": "<session_context>"}, {"text": "do it"}),
            said(
                "model",
                {"text": "hm", "thought": True},
                {"text": "ok"},
                {**called("bash", {"command": "ls"}, id="c1"), "thoughtSignature": "skip_thought_signature_validator"},
                called("read", {}, id="c2"),
            ),
            said("user", answered("bash", "a.txt", id="c1"), answered("read", "no", id="c2"), {"text": "go on"}),
        ],
        path="models/gemini-3-pro:streamGenerateContent?alt=sse",
        systemInstruction={"role": "user", "parts": [{"text": "You are."}]},
        tools=[
            {
                "functionDeclarations": [
                    {"name": "bash", "description": "Run.", "parametersJsonSchema": {"type": "object"}}
                ]
            }
        ],
        toolConfig={"functionCallingConfig": {"mode": "AUTO"}},
        generationConfig={"temperature": 1, "maxOutputTokens": 99, "stopSequences": ["END"], "topK": 64},
        safetySettings=[],
        labels={},
        someday=1,
    )
    assert request == ChatRequest(
        dialect="gemini",
        model="gemini-3-pro",
        messages=(
            Message("system", "You are."),
            Message("user", "<session_context>\ndo it"),
            Message(
                "assistant", "ok", "hm", (ToolCall("c1", "bash", '{"command":"ls"}'), ToolCall("c2", "read", "{}"))
            ),
            Message("tool", "a.txt", tool_call_id="c1"),
            Message("tool", "no", tool_call_id="c2"),
            Message("user", "go on"),
        ),
        tools=(ToolSpec("bash", "Run.", {"type": "object"}),),
        stream=True,
        max_tokens=99,
        stop=("END",),
        client_sampling={
            "temperature": 1,
            "maxOutputTokens": 99,
            "stopSequences": ["END"],
            "topK": 64,
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        },
        unknown_fields=("someday",),
    )


def test_snake_case_is_camel_case() -> None:
    snake = parse(
        [{"parts": [{"function_call": {"name": "f", "args": {}}}], "role": "model"}],
        system_instruction={"parts": [{"text": "You are."}]},
        tools=[{"function_declarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
        generation_config={"max_output_tokens": 5, "stop_sequences": ["x"]},
        tool_config={},
    )
    camel = parse(
        [said("model", called("f", {}))],
        systemInstruction={"parts": [{"text": "You are."}]},
        tools=[{"functionDeclarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
        generationConfig={"maxOutputTokens": 5, "stopSequences": ["x"]},
        toolConfig={},
    )
    assert (snake.messages, snake.tools, snake.max_tokens, snake.stop, snake.unknown_fields) == (
        camel.messages,
        camel.tools,
        camel.max_tokens,
        camel.stop,
        (),
    )


def test_results_without_ids_answer_the_calls_of_their_name_in_order() -> None:
    calls = said("model", called("a", {"n": 1}), called("b", {}), called("a", {"n": 2}))
    answers = said("function", answered("a", "1"), answered("a", "2"), answered("b", "3"))
    request = parse([*HI, calls, answers])
    ids = [call.id for call in request.messages[1].tool_calls]
    assert len(set(ids)) == 3
    assert [(m.content, m.tool_call_id) for m in request.messages[2:]] == [("1", ids[0]), ("2", ids[2]), ("3", ids[1])]


def test_ids_stay_the_same_when_the_history_grows() -> None:
    turn = [said("model", called("a", {})), said("user", answered("a", "1"))]
    short, grown = parse([*HI, *turn]), parse([*HI, *turn, *turn])
    assert grown.messages[: len(short.messages)] == short.messages


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "two\nlines"}, "two\nlines"),
        ({"output": {"a": 1}}, '{"a":1}'),
        ({"error": "no such file"}, '{"error":"no such file"}'),
        ({"output": "x", "exit": 1}, '{"output":"x","exit":1}'),
        ({}, "{}"),
        (None, ""),
    ],
)
def test_a_result_is_its_output_or_else_the_whole_of_it(response: Any, text: str) -> None:
    part = {"functionResponse": {"name": "a", "response": response}}
    assert parse([said("user", part)]).messages[0].content == text


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"inlineData": {"mimeType": "image/png", "data": "aGk="}}, "[image]"),
        ({"inline_data": {"mime_type": "audio/wav", "data": "aGk="}}, "[audio]"),
        ({"fileData": {"mimeType": "application/pdf", "fileUri": "gs://x"}}, "[file]"),
        ({"executableCode": {"language": "PYTHON", "code": "1+1"}}, "1+1"),
        ({"codeExecutionResult": {"outcome": "OUTCOME_OK", "output": "2"}}, "2"),
        ({"thoughtSignature": "xyz"}, ""),
        ({"text": ""}, ""),
    ],
)
def test_parts_that_are_no_text_become_a_short_one(part: Any, text: str) -> None:
    assert parse([said("user", part)]).messages == (Message("user", text),)


def test_the_pieces_of_a_model_content_are_one_text() -> None:
    assert parse([*HI, said("model", {"text": "he"}, {"text": "llo"})]).messages[1] == Message("assistant", "hello")


@pytest.mark.parametrize("value", ["Be brief.", {"text": "Be brief."}, {"parts": {"text": "Be brief."}}])
def test_an_instruction_may_be_a_text_a_part_or_a_content(value: Any) -> None:
    assert parse(systemInstruction=value).messages[0] == Message("system", "Be brief.")


def test_openapi_types_get_their_json_schema_names_but_examples_stay() -> None:
    schema = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "default": {"type": "STRING"}, "enum": ["STRING"]},
            "rows": {"type": "ARRAY", "items": {"anyOf": [{"type": "INTEGER"}, {"type": "NULL"}]}},
        },
    }
    (tool,) = parse(tools=[{"functionDeclarations": [{"name": "f", "parameters": schema}]}]).tools
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "type": {"type": "string", "default": {"type": "STRING"}, "enum": ["STRING"]},
            "rows": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
        },
    }


def test_tools_that_the_vendor_would_run_are_left_out_and_noted() -> None:
    request = parse(tools=[{"googleSearch": {}}, {"function_declarations": [{"name": "f"}], "codeExecution": {}}])
    assert [tool.name for tool in request.tools] == ["f"]
    assert request.unknown_fields == ("tools[googleSearch]", "tools[codeExecution]")


def test_counting_takes_contents_or_a_whole_request() -> None:
    inner = {"model": "models/policy", "contents": HI, "systemInstruction": {"parts": [{"text": "You are."}]}}
    body = json.dumps({"generateContentRequest": inner}).encode()
    path = "models/policy:countTokens"
    assert gemini.operation(path) == "count"
    assert gemini.parse_request(body, path).messages == (Message("system", "You are."), Message("user", "hi"))


@pytest.mark.parametrize(
    ("path", "operation"),
    [
        ("models/policy:generateContent", "generate"),
        ("models/org/name:8b:streamGenerateContent", "generate"),
        ("tunedModels/x:countTokens", "count"),
        ("models/policy:embedContent", None),
        ("models/policy", None),
        (":generateContent", None),
        ("chat/completions", None),
    ],
)
def test_the_method_behind_the_model_decides(path: str, operation: str | None) -> None:
    assert gemini.operation(path) == operation


def test_the_model_may_hold_slashes_and_colons() -> None:
    assert parse(path="models/org/name:8b:generateContent").model == "org/name:8b"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"contents": []}, "contents"),
        ({"contents": [1]}, r"contents\[0\]"),
        ({"contents": [said("robot")]}, "robot"),
        ({"contents": [said("user", {"text": 1})]}, r"contents\[0\]\.parts\[0\]\.text"),
        ({"contents": [said("model", {"functionCall": {"args": {}}})]}, r"functionCall\.name"),
        ({"contents": [said("model", called("f", "x"))]}, r"functionCall\.args"),
        ({"contents": HI, "generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"contents": HI, "generationConfig": {"maxOutputTokens": "many"}}, "maxOutputTokens"),
        ({"contents": HI, "cachedContent": "cachedContents/1"}, "cachedContent"),
        ({"contents": HI, "tools": [{"functionDeclarations": [{"description": "?"}]}]}, r"functionDeclarations\[0\]"),
    ],
)
def test_what_is_no_request_is_refused_by_the_name_of_the_field(fields: Any, words: str) -> None:
    with pytest.raises(ProxyError, match=words):
        gemini.parse_request(json.dumps(fields).encode(), WHOLE)


def test_a_whole_answer_has_thoughts_text_calls_and_true_counts() -> None:
    done = completion(tool_calls=CALLS, finish_reason="tool_calls", reasoning="hm")
    assert json.loads(gemini.render_completion(done, parse())) == {
        "candidates": [
            {
                "index": 0,
                "content": {
                    "role": "model",
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "hello"},
                        called("bash", {"command": "ls"}, id="call1"),
                        called("read", {"path": "a.txt"}, id="call2"),
                    ],
                },
                "finishReason": "STOP",
            }
        ],
        "usageMetadata": {"promptTokenCount": 7, "candidatesTokenCount": 3, "totalTokenCount": 10},
        "modelVersion": "policy",
        "responseId": "abc",
    }


def test_a_stream_says_what_the_whole_answer_says() -> None:
    done = completion(tool_calls=CALLS, finish_reason="length", reasoning="hm")
    whole = json.loads(gemini.render_completion(done, parse()))
    assert whole["candidates"][0]["finishReason"] == "MAX_TOKENS"
    assert json.loads(streamed(done).removeprefix(b"\ndata: ")) == whole
    assert json.loads(streamed(done, path=ARRAY)) == [whole]


def test_no_character_of_a_reply_ends_a_line_of_the_stream() -> None:
    text = "a\u2028b\u2029c\u0085d\ne"
    stream = streamed(completion(content=text)).decode()
    assert stream.splitlines() == stream.strip().join(["\n", "\n\n"]).split("\n")[:-1]
    assert json.loads(stream.removeprefix("\ndata: "))["candidates"][0]["content"]["parts"] == [{"text": text}]


def test_an_empty_reply_is_an_empty_text() -> None:
    body = json.loads(gemini.render_completion(completion(content=""), parse()))
    assert body["candidates"][0]["content"]["parts"] == [{"text": ""}]


def test_malformed_arguments_travel_beside_an_empty_call() -> None:
    broken = completion(content="", tool_calls=(ToolCall("c", "bash", '{"command": "l'),))
    body = json.loads(gemini.render_completion(broken, parse()))
    assert body["candidates"][0]["content"]["parts"] == [{"text": '{"command": "l'}, called("bash", {}, id="c")]


def test_numbers_that_json_does_not_have_are_null() -> None:
    odd = completion(tool_calls=(ToolCall("c", "f", '{"a": NaN, "b": 1e999, "c": [' + "9" * 30 + "]}"),))
    body = gemini.render_completion(odd, parse())
    parts = json.loads(body, parse_constant=pytest.fail)["candidates"][0]["content"]["parts"]
    assert parts[1] == called("f", {"a": None, "b": None, "c": [int("9" * 30)]}, id="c")


def test_errors_have_googles_form() -> None:
    assert json.loads(gemini.error_body("not_found", "no")) == {
        "error": {"code": 404, "message": "no", "status": "NOT_FOUND"}
    }
    overflow = json.loads(gemini.overflow_error(ContextOverflow(40_000, 32_768)))["error"]
    assert (overflow["code"], overflow["status"]) == (400, "INVALID_ARGUMENT")
    assert overflow["message"] == (
        "The input token count (40000) exceeds the maximum number of tokens allowed (32768)."
    )


def sdk(rig: Rig) -> AsyncClient:
    return genai.Client(api_key="dummy", http_options=types.HttpOptions(base_url=rig.url())).aio


async def ask(
    client: AsyncClient, contents: Any, *, stream: bool, config: types.GenerateContentConfig | None = None
) -> types.GenerateContentResponse:
    if not stream:
        return await client.models.generate_content(model="anything", contents=contents, config=config)
    chunks = await client.models.generate_content_stream(model="anything", contents=contents, config=config)
    (chunk,) = [chunk async for chunk in chunks]
    return chunk


DECLARED = types.Tool(
    function_declarations=[
        types.FunctionDeclaration(name=name, parameters=types.Schema(type=types.Type.OBJECT))
        for name in ("bash", "read")
    ]
)
MANUAL = types.GenerateContentConfig(
    tools=[DECLARED], automatic_function_calling=types.AutomaticFunctionCallingConfig(disable=True)
)


@pytest.mark.parametrize("stream", [False, True])
def test_the_google_sdk_gets_text_and_parallel_calls(stream: bool) -> None:
    async def test() -> None:
        async with running(ScriptedEngine([TOOL_REPLY])) as rig, sdk(rig) as client:
            done = await ask(client, "hi", stream=stream, config=MANUAL)
            assert done.candidates is not None
            assert done.candidates[0].finish_reason is types.FinishReason.STOP
            assert done.candidates[0].content is not None
            parts = done.candidates[0].content.parts or []
            assert [part.text for part in parts] == ["look", None, None]
            calls = done.function_calls or []
            assert [(call.name, call.args) for call in calls] == [
                ("bash", {"command": "ls"}),
                ("read", {"path": "a.txt"}),
            ]
            assert len({call.id for call in calls}) == 2
            usage = done.usage_metadata
            assert usage is not None
            assert usage.total_token_count == (usage.prompt_token_count or 0) + (usage.candidates_token_count or 0)

    run(test)


@pytest.mark.parametrize("echoes_ids", [True, False])
def test_turns_of_the_google_sdk_are_one_trajectory(echoes_ids: bool) -> None:
    """The proxy goes on from the sampled ids even where the client drops the ids of calls and their spelling."""

    async def test() -> None:
        async with running(ScriptedEngine([TOOL_REPLY, "done"])) as rig, sdk(rig) as client:
            first = await ask(client, "hi", stream=True, config=MANUAL)
            assert first.candidates is not None
            assert first.candidates[0].content is not None
            results = [
                types.FunctionResponse(id=call.id if echoes_ids else None, name=call.name, response={"output": "ok"})
                for call in first.function_calls or ()
            ]
            for part in first.candidates[0].content.parts or ():
                if part.function_call is not None and not echoes_ids:
                    part.function_call.id = None
            history = [
                types.UserContent("hi"),
                first.candidates[0].content,
                types.UserContent([types.Part(function_response=result) for result in results]),
            ]
            assert (await ask(client, history, stream=True, config=MANUAL)).text == "done"
            tree = await rig.session.settle()
            assert [(call.lineage_parent, call.prefix_parent, call.drift_reason) for call in tree.calls] == [
                (None, None, None),
                (0, 0, None),
            ]

    run(test)


async def answer_late(engine: GatedEngine) -> None:
    """Let the engine answer after some twenty keep-alives."""
    await eventually(lambda: engine.started == 1)
    await asyncio.sleep(0.2)
    engine.gate.set()


@pytest.mark.parametrize("path", [STREAM, ARRAY])
def test_both_streams_live_through_a_long_wait(path: str) -> None:
    async def test() -> None:
        engine = GatedEngine(["hello"])
        async with running(engine, settings=SessionSettings(keep_alive_s=0.01)) as rig:
            answer, _ = await asyncio.gather(rig.post(f"/v1beta/{path}", {"contents": HI}), answer_late(engine))
            kind = answer.headers["content-type"].partition(";")[0]
            assert kind == ("text/event-stream" if path == STREAM else "application/json")
            assert answer.text.count("\n") > 3
            text = answer.text.strip().removeprefix("data: ")
            (body,) = [json.loads(text)] if path == STREAM else json.loads(text)
            assert body["candidates"][0]["content"]["parts"] == [{"text": "hello"}]

    run(test)


def test_the_google_sdk_lives_through_a_long_wait() -> None:
    async def test() -> None:
        engine = GatedEngine(["hello"])
        async with running(engine, settings=SessionSettings(keep_alive_s=0.01)) as rig, sdk(rig) as client:
            done, _ = await asyncio.gather(ask(client, "hi", stream=True), answer_late(engine))
            assert done.text == "hello"

    run(test)


def test_the_google_sdk_counts_tokens_and_lists_models() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["hello"])) as rig, sdk(rig) as client:
            counted = await client.models.count_tokens(model="policy", contents="hi")
            asked = await ask(client, "hi", stream=False)
            assert asked.usage_metadata is not None
            assert counted.total_tokens == asked.usage_metadata.prompt_token_count
            (listed,) = [model async for model in await client.models.list()]
            card = await client.models.get(model="other")
            assert (listed.name, card.name) == ("models/policy", "models/other")
            assert listed.input_token_limit == card.input_token_limit == rig.session.context_length

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_google_sdk_reads_an_overflow(stream: bool) -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["hello"], context_length=64)) as rig, sdk(rig) as client:
            with pytest.raises(
                errors.ClientError, match=r"exceeds the maximum number of tokens allowed \(64\)"
            ) as told:
                await ask(client, "long " * 100, stream=stream)
            assert (told.value.code, told.value.status) == (400, "INVALID_ARGUMENT")

    run(test)


def test_a_dead_key_and_an_unknown_method_are_404_in_googles_form() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["hello"])) as rig, sdk(rig) as client:
            with pytest.raises(errors.ClientError, match="EmbedContents") as told:
                await client.models.embed_content(model="policy", contents="hi")
            assert (told.value.code, told.value.status) == (404, "NOT_FOUND")
            await rig.session.close()
            with pytest.raises(errors.ClientError, match="unknown key") as told:
                await ask(client, "hi", stream=False)
            assert (told.value.code, told.value.status) == (404, "NOT_FOUND")

    run(test)
