"""Calls that the proxy relays to an API model: what harness, API and tree see of each other."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_api import STALL, Answers, FakeApi, Reply, called, refusal, said, serving
from proxy_rig import CHAT, MESSAGES, Rig, ask, eventually, run, running

from clawgym_env.engine.base import ApiUsage, SamplingParams
from clawgym_env.engine.relay import RelayEngine, RelaySettings
from clawgym_env.proxy import session as session_module
from clawgym_env.rollout import StopReason
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.prefix_tree import BUCKETS, PrefixTree, Selection
from clawgym_env.trace.store import RolloutStore

EVERYTHING = Selection(compaction="train", subagent="train", auxiliary="train", dead="train")
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
CALLED = said(None, tool_calls=[called("write", "functions.write:0", path="a")], usage=(50, 9))


@asynccontextmanager
async def relaying(answers: Answers, **options: Any) -> AsyncIterator[tuple[Rig, FakeApi]]:
    """Start a proxy in front of a fake API."""
    with serving(FakeApi(answers)) as fake:
        engine = RelayEngine.connect(fake.url, "some-model", settings=RelaySettings(max_retries=0))
        async with running(engine, **options) as rig:
            yield rig, fake


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def chat(reply: Any = None) -> tuple[str, Any]:
    """Return path and body of a first request, or of the one that answers the call in `reply`."""
    tools = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
    messages = [{"role": "user", "content": "hi"}]
    if reply is not None:
        message = reply["choices"][0]["message"]
        (call,) = message["tool_calls"]
        messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "written"}]
    return CHAT, {"model": "policy", "messages": messages, "tools": tools}


def messages(reply: Any = None) -> tuple[str, Any]:
    tools = [{"name": "write", "input_schema": SCHEMA}]
    said: list[Any] = [{"role": "user", "content": "hi"}]
    if reply is not None:
        (use,) = reply["content"]
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "written"}
        said += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return MESSAGES, {"model": "policy", "max_tokens": 512, "messages": said, "tools": tools}


def responses(reply: Any = None) -> tuple[str, Any]:
    tools = [{"type": "function", "name": "write", "parameters": SCHEMA}]
    items: list[Any] = [{"role": "user", "content": "hi"}]
    if reply is not None:
        (call,) = [item for item in reply["output"] if item["type"] == "function_call"]
        items += [*reply["output"], {"type": "function_call_output", "call_id": call["call_id"], "output": "written"}]
    return "/v1/responses", {"model": "policy", "input": items, "tools": tools}


def gemini(reply: Any = None) -> tuple[str, Any]:
    tools = [{"functionDeclarations": [{"name": "write", "parametersJsonSchema": SCHEMA}]}]
    contents: list[Any] = [{"role": "user", "parts": [{"text": "hi"}]}]
    if reply is not None:
        content = reply["candidates"][0]["content"]
        (call,) = [part["functionCall"] for part in content["parts"] if "functionCall" in part]
        response = {"name": "write", "id": call["id"], "response": {"output": "written"}}
        contents += [content, {"role": "user", "parts": [{"functionResponse": response}]}]
    return "/v1beta/models/policy:generateContent", {"contents": contents, "tools": tools}


@pytest.mark.parametrize("request_of", [chat, messages, responses, gemini], ids=lambda one: one.__name__)
def test_a_harness_of_any_dialect_talks_to_an_api_that_speaks_chat(request_of: Any) -> None:
    async def test() -> None:
        async with relaying([CALLED, said("All done.", usage=(80, 3))]) as (rig, fake):
            first = await rig.post(*request_of())
            second = await rig.post(*request_of(first.json()))
            assert "All done." in second.text
            (offered,) = fake.asked[0]["tools"]
            assert (offered["type"], offered["function"]["name"]) == ("function", "write")
            assert offered["function"]["parameters"]["properties"] == SCHEMA["properties"]
            user, assistant, result = fake.asked[1]["messages"]
            assert (user, fake.asked[0]["messages"]) == ({"role": "user", "content": "hi"}, [user])
            (call,) = assistant["tool_calls"]
            assert (call["id"], json.loads(call["function"]["arguments"])) == ("functions.write:0", {"path": "a"})
            assert (result["role"], result["tool_call_id"]) == ("tool", "functions.write:0")
            assert "written" in result["content"]
            tree = await rig.session.settle()
            assert [(call.lineage_parent, call.drift_reason) for call in tree] == [(None, None), (0, None)]
            assert tree[1].prefix_len == tree[0].history_len

    run(test)


def test_a_stream_is_the_apis_whole_reply_with_its_counts() -> None:
    async def test() -> None:
        async with relaying([CALLED]) as (rig, _):
            path, body = messages()
            streamed = events(await rig.post(path, body | {"stream": True}))
            (use,) = [event["content_block"] for event in streamed if event["type"] == "content_block_start"]
            assert (use["type"], use["name"]) == ("tool_use", "write")
            assert streamed[0]["message"]["usage"]["input_tokens"] == 50
            assert streamed[-2]["usage"]["output_tokens"] == 9

    run(test)


def test_nothing_of_a_relayed_tree_is_ever_trained_and_the_api_counts(tmp_path: Path) -> None:
    async def test() -> None:
        with RolloutStore(tmp_path) as store:

            async def keep(call: Any) -> None:
                await store.add_call("r", call)

            async with relaying([said("a", usage=(30, 4)), said("b", usage=(41, 5))], on_call=keep) as (rig, _):
                await rig.post(CHAT, ask("one"))
                await rig.post(CHAT, ask("two"))
                tree = await rig.session.settle()
            assert [call.api_usage for call in store.calls("r")] == [call.api_usage for call in tree]
        assert tree.relayed
        assert tree.usage == ApiUsage(prompt_tokens=71, completion_tokens=9)
        for selection in (Selection(), EVERYTHING):
            counts = tree.buckets(selection)
            assert counts == dict.fromkeys(BUCKETS, 0) | {"relayed": tree.num_completion_tokens}
            assert tree.rows(selection) == ()
        assert not any(call.sampling.trainable for call in tree)
        tree.validate()
        assert PrefixTree.from_json(tree.to_json()) == tree
        assert "30+4 relayed" in tree.outline()
        unmarked = PrefixTree([dataclasses.replace(call, api_usage=None) for call in tree])
        assert unmarked != tree
        assert unmarked.usage.completion_tokens == unmarked.num_completion_tokens
        mixed = PrefixTree([tree[0], unmarked[1]])
        assert mixed.relayed
        assert mixed.usage.completion_tokens == 4 + len(tree[1].token_ids)
        assert mixed.usage.prompt_tokens == 30 + len(tree[1].delta_token_ids)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_of_the_api_is_the_dialects_own_400_even_of_a_stream(stream: bool) -> None:
    async def test() -> None:
        async with relaying([refusal("too long", code="context_length_exceeded")]) as (rig, _):
            chat = await rig.post(CHAT, ask(stream=stream))
            assert (chat.status_code, chat.json()["error"]["code"]) == (400, "context_length_exceeded")
            messages = await rig.post(MESSAGES, ask(stream=stream))
            assert messages.status_code == 400
            assert messages.json()["error"]["message"].startswith("prompt is too long")
            assert rig.session.overflowed

    run(test)


def test_a_stream_begins_before_a_slow_reply_and_is_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "VERDICT_S", 0.0)

    async def test() -> None:
        async with relaying([STALL]) as (rig, _):
            reader, _ = await rig.send(CHAT, ask(stream=True))
            assert b"200" in await reader.readline()

    run(test)


def test_an_api_that_does_not_answer_is_an_engine_error_at_once() -> None:
    async def test() -> None:
        async with relaying([Reply("full", 503)]) as (rig, fake):
            answer = await rig.post(CHAT, ask())
            assert answer.status_code == 503
            assert "status 503: full" in answer.json()["error"]["message"]
            assert await rig.session.exhausted is StopReason.ENGINE_ERROR
            assert len(fake.asked) == 1

    run(test)


def test_the_end_of_a_rollout_closes_the_connection_to_the_api() -> None:
    async def test() -> None:
        async with relaying([STALL]) as (rig, fake):
            _, writer = await rig.send(CHAT, ask())
            await eventually(fake.begun.is_set)
            writer.close()
            await rig.session.settle(quiet_s=0.01)
            assert await asyncio.to_thread(fake.hung_up.wait, 20)

    run(test)


def test_a_budget_of_tokens_is_spent_in_the_apis_own() -> None:
    async def test() -> None:
        limits = Limits(max_total_tokens=200)
        async with relaying([said("a", usage=(1000, 200))], limits=limits) as (rig, _):
            await rig.post(CHAT, ask())
            assert rig.session.num_sampled_tokens == 200
            await rig.send(CHAT, ask("again"))
            assert await rig.session.exhausted is StopReason.TOKEN_BUDGET

    run(test)


@pytest.mark.parametrize(("sampled", "cut"), [(64, False), (20, True)], ids=["our budget", "its window"])
def test_a_reply_that_ends_before_its_budget_was_cut_by_the_window(sampled: int, cut: bool) -> None:
    async def test() -> None:
        sampling = SamplingParams(max_tokens=64)
        reply = said("a", finish_reason="length", usage=(1000, sampled))
        async with relaying([reply], sampling=sampling) as (rig, fake):
            answer = await rig.post(CHAT, ask())
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert fake.asked[0]["max_tokens"] == 64
            assert rig.session.window_cut is cut

    run(test)


def test_a_count_before_the_call_is_an_estimate_in_tokens_not_in_bytes() -> None:
    async def test() -> None:
        async with relaying([said()]) as (rig, fake):
            body = {"model": "policy", "messages": [{"role": "user", "content": "word " * 800}]}
            counted = await rig.post(f"{MESSAGES}/count_tokens", body)
            assert 900 < counted.json()["input_tokens"] < 1100
            assert not fake.asked

    run(test)


def test_a_stop_sequence_of_the_client_cuts_what_the_api_said() -> None:
    async def test() -> None:
        async with relaying([said("one STOP two")]) as (rig, _):
            answer = await rig.post(CHAT, ask(stop=["STOP"]))
            assert answer.json()["choices"][0]["message"]["content"] == "one "

    run(test)
