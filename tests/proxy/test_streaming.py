"""Pseudo-streaming over a real socket: keep-alives, replay, and what a failure looks like from outside."""

from __future__ import annotations

import asyncio
import json

import pytest
from proxy_rig import CHAT, MESSAGES, GatedEngine, ask, eventually, run, running

from clawgym_env.engine.scripted import ScriptedEngine, ScriptedReply
from clawgym_env.proxy.session import SessionSettings

OFTEN = SessionSettings(keep_alive_s=0.02)


@pytest.mark.parametrize(
    ("path", "opening", "keep_alive", "last"),
    [
        (CHAT, b'"role":"assistant"', b": keep-alive\n\n", b"data: [DONE]\n\n"),
        (MESSAGES, b"event: message_start", b'event: ping\ndata: {"type":"ping"}\n\n', b"event: message_stop"),
    ],
)
def test_a_slow_turn_opens_at_once_and_is_kept_alive(path: str, opening: bytes, keep_alive: bytes, last: bytes) -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine, settings=OFTEN) as rig:
            reader, _ = await rig.send(path, ask(stream=True))
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"HTTP/1.1 200" in head
            assert b"text/event-stream" in head
            await reader.readuntil(opening)
            for _ in range(3):
                await reader.readuntil(keep_alive)
            assert rig.session.num_calls == 0
            engine.gate.set()
            rest = await reader.readuntil(last)
            assert b"hello" in rest

    run(test)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_failure_after_the_headers_cuts_the_connection_without_content(path: str) -> None:
    async def test() -> None:
        engine = GatedEngine([ScriptedReply("hello", error="out of memory")])
        async with running(engine, settings=OFTEN) as rig:
            reader, _ = await rig.send(path, ask(stream=True))
            seen = await reader.readuntil(b"\r\n\r\n")
            engine.gate.set()
            with pytest.raises(ConnectionResetError):
                seen += await reader.read(-1)
            assert b"error" not in seen
            assert b"content_block" not in seen
            assert b"0\r\n\r\n" not in seen
            assert engine.started == 2
            assert str(rig.session.engine_error) == "out of memory"

    run(test)


def test_a_stream_and_a_whole_answer_can_wait_for_the_same_call() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            reader, _ = await rig.send(CHAT, ask(stream=True))
            await reader.readuntil(b"\r\n\r\n")
            whole = asyncio.create_task(rig.post(CHAT, ask()))
            await eventually(lambda: len(rig.session.requests) == 2)
            engine.gate.set()
            await reader.readuntil(b"[DONE]")
            assert (await whole).json()["choices"][0]["message"]["content"] == "hello"
            assert engine.started == 1

    run(test)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/v1/responses"])
def test_no_character_of_a_reply_ends_a_line_for_httpx(path: str) -> None:
    async def test() -> None:
        text = "a\u2028b\u2029c\u0085d\re"
        async with running(ScriptedEngine([text])) as rig:
            body = ask(stream=True) | {"input": "hi"}
            async with rig.http.stream("POST", rig.url(path), json=body) as response:
                lines = [line async for line in response.aiter_lines() if line]
        assert all(line.startswith(("data: ", "event: ")) for line in lines)
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
        assert any(text in json.dumps(json.loads(line), ensure_ascii=False).replace("\\r", "\r") for line in data)

    run(test)
