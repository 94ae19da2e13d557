"""The proxy over a real socket: keys, probes, errors, and the vendors' own SDKs as clients."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import anthropic
import httpx
import openai
import pytest
from proxy_rig import CHAT, MESSAGES, GatedEngine, ask, eventually, run, running

from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.proxy import listener, session
from clawgym_env.proxy.app import MAX_BODY, split_path

TOOL_REPLY = "look\n" + tool_call("bash", command="ls") + tool_call("read", path="a.txt")


@pytest.mark.parametrize("stream", [False, True])
def test_the_openai_sdk_gets_text_and_parallel_calls(stream: bool) -> None:
    async def test() -> None:
        async with running(ScriptedEngine([TOOL_REPLY])) as rig:
            client = openai.AsyncOpenAI(base_url=rig.url("/v1"), api_key="x", max_retries=0)
            async with client:
                if stream:
                    async with client.chat.completions.stream(
                        model="anything", messages=[{"role": "user", "content": "hi"}]
                    ) as events:
                        done = await events.get_final_completion()
                else:
                    done = await client.chat.completions.create(  # type: ignore[assignment]
                        model="anything", messages=[{"role": "user", "content": "hi"}]
                    )
            message = done.choices[0].message
            assert (message.content, done.choices[0].finish_reason, done.model) == ("look", "tool_calls", "anything")
            calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
            assert calls == [("bash", '{"command": "ls"}'), ("read", '{"path": "a.txt"}')]
            ids = [call.id for call in message.tool_calls or ()]
            assert len(set(ids)) == 2
            assert all(name.isalnum() for name in ids)

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_tool_runner_of_the_anthropic_sdk_sends_the_whole_conversation(stream: bool) -> None:
    @anthropic.beta_async_tool
    async def look(path: str) -> str:
        """Look at a file."""
        return f"content of {path}"

    async def test() -> None:
        calls = tool_call("look", path="a") + tool_call("look", path="b")
        async with running(ScriptedEngine([calls, "done"])) as rig:
            client = anthropic.AsyncAnthropic(base_url=rig.url(), api_key="x", max_retries=0)
            async with client:
                runner = client.beta.messages.tool_runner(
                    model="policy",
                    max_tokens=100,
                    tools=[look],
                    messages=[{"role": "user", "content": "go"}],
                    stream=stream,
                )
                async for _ in runner:
                    assert rig.session.num_calls <= 2
            tree = rig.session.snapshot()
            assert [(call.lineage_parent, call.drift_reason) for call in tree] == [(None, None), (0, None)]

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_anthropic_sdk_gets_text_and_parallel_calls(stream: bool) -> None:
    async def test() -> None:
        async with running(ScriptedEngine([TOOL_REPLY])) as rig:
            client = anthropic.AsyncAnthropic(base_url=rig.url(), api_key="x", max_retries=0)
            async with client:
                body = ask()
                if stream:
                    async with client.messages.stream(**body) as events:
                        done = await events.get_final_message()
                else:
                    done = await client.messages.create(**body)
            assert [block.type for block in done.content] == ["text", "tool_use", "tool_use"]
            assert done.content[0].text == "look"  # type: ignore[union-attr]
            assert [block.input for block in done.content[1:]] == [{"command": "ls"}, {"path": "a.txt"}]  # type: ignore[union-attr]
            assert all(block.id.isalnum() for block in done.content[1:])  # type: ignore[union-attr]
            assert done.stop_reason == "tool_use"
            tree = await rig.session.settle()
            assert done.usage.output_tokens == len(tree[0].token_ids)
            assert done.usage.input_tokens == tree[0].prompt_len

    run(test)


def test_an_unknown_key_is_not_found_in_the_dialects_own_form() -> None:
    async def test() -> None:
        async with running() as rig:
            base = f"http://127.0.0.1:{rig.port}/r/nosuchkey"
            chat = await rig.http.post(base + CHAT, json=ask())
            claude = await rig.http.post(base + MESSAGES, json=ask())
            root = await rig.http.post(f"http://127.0.0.1:{rig.port}/v1/chat/completions", json=ask())
            assert [answer.status_code for answer in (chat, claude, root)] == [404, 404, 404]
            assert chat.json()["error"]["type"] == "not_found_error"
            assert claude.json()["type"] == "error"
            assert claude.json()["error"]["type"] == "not_found_error"

    run(test)


def test_a_key_dies_with_its_rollout() -> None:
    async def test() -> None:
        async with running() as rig:
            assert (await rig.post(CHAT, ask())).status_code == 200
            await rig.session.settle(quiet_s=0.0)
            assert (await rig.post(CHAT, ask())).status_code == 404
            assert (await rig.http.get(rig.url("/v1/models"))).status_code == 404

    run(test)


def test_probes_under_a_live_key_are_answered() -> None:
    async def test() -> None:
        async with running() as rig:
            listing = (await rig.http.get(rig.url("/v1/models"))).json()
            assert listing["data"][0]["id"] == "policy"
            assert listing["data"][0]["context_length"] == rig.engine.context_length
            assert (await rig.http.get(rig.url("/v1/models/any-name"))).json()["id"] == "any-name"
            for path in ("", "/api/hello", "/v1/models"):
                answer = await rig.http.head(rig.url(path))
                assert (answer.status_code, answer.content) == (200, b"")
            assert (await rig.http.post(rig.url("/api/show"), json={})).status_code == 404

    run(test)


def test_a_bad_body_is_a_400_that_says_why() -> None:
    async def test() -> None:
        async with running() as rig:
            chat = await rig.http.post(rig.url(CHAT), content=b"{")
            claude = await rig.http.post(rig.url(MESSAGES), json={"messages": 3})
            assert (chat.status_code, claude.status_code) == (400, 400)
            assert "invalid JSON" in chat.json()["error"]["message"]
            assert claude.json()["error"] == {
                "type": "invalid_request_error",
                "message": "Expected an array at messages, got number.",
            }
            assert rig.session.num_calls == 0

    run(test)


def test_tokens_are_counted_without_a_call() -> None:
    async def test() -> None:
        async with running() as rig:
            counted = (await rig.post(MESSAGES + "/count_tokens?beta=true", ask())).json()["input_tokens"]
            assert rig.session.num_calls == 0
            assert (await rig.post(MESSAGES + "?beta=true", ask())).json()["usage"]["input_tokens"] == counted

    run(test)


def test_a_prompt_that_does_not_fit_is_refused_before_the_headers() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["hello"], context_length=64)) as rig:
            long = ask("x" * 100, stream=True)
            chat, claude = await rig.post(CHAT, long), await rig.post(MESSAGES, long)
            assert (chat.status_code, claude.status_code) == (400, 400)
            assert chat.json()["error"]["code"] == "context_length_exceeded"
            assert "This model's maximum context length is 64 tokens" in chat.json()["error"]["message"]
            assert claude.json()["error"]["message"].startswith("prompt is too long: ")
            assert claude.json()["error"]["message"].endswith(" tokens > 64 maximum")
            assert rig.session.overflowed
            assert (await rig.post(CHAT, ask("x"))).status_code == 200
            assert not rig.session.overflowed

    run(test)


def test_two_sessions_share_nothing() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(lambda prompt, turn: "one" if "FIRST" in prompt else "two")) as rig:
            other = rig.server.open_session(rig.engine)
            first = await rig.post(CHAT, ask("FIRST"))
            second = await rig.post(CHAT, ask("SECOND"), session=other)
            said = [answer.json()["choices"][0]["message"]["content"] for answer in (first, second)]
            assert said == ["one", "two"]
            assert (rig.session.num_calls, other.num_calls) == (1, 1)
            await rig.session.settle(quiet_s=0.0)
            assert (await rig.post(CHAT, ask("again"), session=other)).status_code == 200

    run(test)


def test_a_listener_inside_a_sandbox_serves_its_own_rollout_only() -> None:
    async def test() -> None:
        async with running() as rig:
            other = rig.server.open_session(rig.engine)
            listener = await rig.server.serve(socket.create_server(("127.0.0.1", 0)), other)
            base = f"http://127.0.0.1:{listener.port}/r/"
            assert (await rig.http.post(base + other.key + CHAT, json=ask())).status_code == 200
            assert (await rig.http.post(base + rig.session.key + CHAT, json=ask())).status_code == 404
            await listener.close()
            assert (await rig.post(CHAT, ask(), session=other)).status_code == 404
            with pytest.raises(httpx.TransportError):
                await rig.http.post(base + other.key + CHAT, json=ask())

    run(test)


def test_hundreds_of_listeners_open_and_close() -> None:
    async def test() -> None:
        async with running() as rig:
            sessions = [rig.server.open_session(rig.engine) for _ in range(200)]
            listeners = [await rig.server.serve(socket.create_server(("127.0.0.1", 0)), each) for each in sessions]
            url = f"http://127.0.0.1:{listeners[-1].port}/r/{sessions[-1].key}{CHAT}"
            assert (await rig.http.post(url, json=ask())).status_code == 200
            for listener in listeners:
                await listener.close()
            assert all(session.closed.done() for session in sessions)

    run(test)


def test_an_unknown_key_is_refused_before_its_body_is_read() -> None:
    async def test() -> None:
        async with running() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            rig.writers.append(writer)
            writer.write(f"POST /r/nosuchkey{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n".encode())
            assert b" 404 " in await reader.readline()

    run(test)


def test_a_body_over_the_cap_is_refused_before_it_is_read() -> None:
    async def test() -> None:
        async with running() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            rig.writers.append(writer)
            head = f"POST /r/{rig.session.key}{CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {MAX_BODY + 1}\r\n\r\n"
            writer.write(head.encode())
            assert b" 413 " in await reader.readline()

    run(test)


def test_bodies_beyond_the_bound_wait_until_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_BODY_BYTES", 300)

    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            first = asyncio.create_task(rig.post(CHAT, ask("a" * 200)))
            await eventually(lambda: engine.started == 1)
            second = asyncio.create_task(rig.post(CHAT, ask("b" * 200)))
            await eventually(lambda: bool(rig.session._waiting_bodies))
            assert len(rig.session.requests) == 1
            engine.gate.set()
            assert [(await task).status_code for task in (first, second)] == [200, 200]
            assert rig.session._body_bytes == 0

    run(test)


def test_a_chunked_body_keeps_only_the_room_that_it_turned_out_to_need() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:

            async def post(text: str) -> int:
                async def chunks() -> AsyncIterator[bytes]:
                    yield json.dumps(ask(text)).encode()

                return (await rig.http.post(rig.url(CHAT), content=chunks())).status_code

            tasks = [asyncio.create_task(post(f"chunked {i}")) for i in range(4)]
            await eventually(lambda: engine.started == 4)
            engine.gate.set()
            assert await asyncio.gather(*tasks) == [200] * 4
            assert rig.session._body_bytes == 0

    run(test)


def test_a_waiting_body_is_let_go_when_its_rollout_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MAX_BODY_BYTES", 300)

    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            first = asyncio.create_task(rig.post(CHAT, ask("a" * 200)))
            await eventually(lambda: engine.started == 1)
            second = asyncio.create_task(rig.post(CHAT, ask("b" * 200)))
            await eventually(lambda: bool(rig.session._waiting_bodies))
            await rig.session.close()
            assert (await second).status_code == 404
            with pytest.raises(httpx.TransportError):
                await first

    run(test)


def test_a_sandbox_has_a_bounded_number_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS", 3)

    async def test() -> None:
        async with running() as rig:
            inside = await rig.server.serve(socket.create_server(("127.0.0.1", 0)), rig.session)
            for _ in range(3):
                _, writer = await asyncio.open_connection("127.0.0.1", inside.port)
                rig.writers.append(writer)
            await eventually(lambda: len(inside._state.connections) == 3)
            reader, writer = await asyncio.open_connection("127.0.0.1", inside.port)
            with pytest.raises(ConnectionError):
                await reader.readexactly(1)
            rig.writers.pop().close()
            await eventually(lambda: len(inside._state.connections) == 2)
            url = f"http://127.0.0.1:{inside.port}/r/{rig.session.key}{CHAT}"
            assert (await rig.http.post(url, json=ask())).status_code == 200

    run(test)


def test_a_head_without_an_end_is_cut() -> None:
    async def test() -> None:
        async with running() as rig:
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.port)
            rig.writers.append(writer)
            writer.write(b"POST / HTTP/1.1\r\nx: " + b"a" * (2 << 20))
            with pytest.raises(ConnectionError):
                await reader.readexactly(1)

    run(test)


@pytest.mark.parametrize(
    ("path", "parts"),
    [
        ("/r/k/v1/messages", ("k", "messages")),
        ("/r/k/chat/completions", ("k", "chat/completions")),
        ("/r/k/v1/v1/messages", ("k", "messages")),
        ("/r/k", ("k", "")),
        ("/v1/messages", ("", "")),
        ("/", ("", "")),
    ],
)
def test_paths_are_split_into_key_and_rest(path: str, parts: tuple[str, str]) -> None:
    assert split_path(path) == parts
