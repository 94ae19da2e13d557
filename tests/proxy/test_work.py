"""Short steps share the event loop fairly; long ones leave it alone."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from proxy_rig import MESSAGES, run, running

from clawgym_env.proxy import chat, session
from clawgym_env.proxy.work import Work
from clawgym_env.tokenizer import TextTokenizer


def test_one_short_step_is_done_in_each_turn_of_the_loop_first_come_first_served() -> None:
    async def test() -> list[tuple[int, int]]:
        work, turn, done = Work(), 0, list[tuple[int, int]]()
        asking = [asyncio.create_task(work.short(lambda i=i: done.append((turn, i)))) for i in range(5)]
        while not all(task.done() for task in asking):
            await asyncio.sleep(0)
            turn += 1
        work.close()
        return done

    turns, order = zip(*run(test), strict=True)
    assert order == (0, 1, 2, 3, 4)
    assert len(set(turns)) == 5


def test_a_step_that_is_given_up_or_fails_holds_up_nobody() -> None:
    async def test() -> None:
        work, done = Work(), list[int]()
        first, given_up, last = (asyncio.create_task(work.short(lambda i=i: done.append(i))) for i in range(3))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait({first, given_up, last})
        assert done == [0, 2]
        with pytest.raises(ZeroDivisionError):
            await work.short(lambda: 1 // 0)
        assert await work.short(lambda: "next") == "next"
        work.close()

    run(test)


def test_a_long_step_runs_beside_the_loop_and_is_waited_for_when_given_up() -> None:
    async def test() -> None:
        work, begun, go_on, ended = Work(), threading.Event(), threading.Event(), list[str]()

        def step() -> None:
            begun.set()
            assert go_on.wait(10)
            ended.append(threading.current_thread().name)

        running = asyncio.create_task(work.long(step))
        assert await asyncio.to_thread(begun.wait, 10)
        running.cancel()
        await asyncio.sleep(0.01)
        assert not running.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert ended[0].startswith("clawgym-proxy")
        work.close()

    run(test)


@pytest.mark.parametrize(
    ("new_text", "history", "bridges", "on_the_loop"),
    [
        (100, 100, True, True),
        (session.SHORT_TEXT + 1, 100, True, False),
        (100, session.SHORT_BODY + 1, True, True),
        (100, session.SHORT_BODY + 1, False, False),
    ],
)
def test_what_must_be_rendered_decides_where(
    monkeypatch: pytest.MonkeyPatch, new_text: int, history: int, bridges: bool, on_the_loop: bool
) -> None:
    async def test() -> None:
        async with running() as rig:
            where: list[bool] = []
            renderer = rig.session._engine.renderer
            real = TextTokenizer.encode_literal

            def noted(self: TextTokenizer, text: str) -> list[int]:
                if "nnn" in text:  # the engine writes too
                    where.append(threading.current_thread() is threading.main_thread())
                return real(self, text)

            messages = [{"role": "user", "content": "h" * history}]
            reply = (await rig.post(MESSAGES, {"model": "m", "max_tokens": 9, "messages": messages})).json()
            monkeypatch.setattr(TextTokenizer, "encode_literal", noted)
            if not bridges:
                monkeypatch.setattr(renderer, "bridge_to_next_turn", lambda *args, **options: None)
            messages.append({"role": "assistant", "content": reply["content"][0]["text"]})
            messages.append({"role": "user", "content": "n" * new_text})
            answer = await rig.post(MESSAGES, {"model": "m", "max_tokens": 9, "messages": messages})
            assert answer.status_code == 200
            assert where == [on_the_loop]

    run(test)


@pytest.mark.parametrize(
    ("body", "on_the_loop"),
    [
        (b'{"messages":[%s]}' % b",".join([b'{"role":"user"}'] * 10), True),
        (b'{"messages":[%s]}' % b",".join([b'{"role":"user"}'] * (session.SHORT_OBJECTS + 1)), False),
        (b'{"messages":[{"role":"user","content":"%s"}]}' % (b"x" * session.SHORT_BODY), False),
    ],
)
def test_objects_and_bytes_decide_where_a_body_is_read(
    monkeypatch: pytest.MonkeyPatch, body: bytes, on_the_loop: bool
) -> None:
    async def test() -> None:
        async with running() as rig:
            where: list[threading.Thread] = []
            real = rig.session.read_request

            def noted(*args: Any) -> Any:
                where.append(threading.current_thread())
                return real(*args)

            monkeypatch.setattr(rig.session, "read_request", noted)
            await rig.session.read(chat, body)
            assert (where == [threading.main_thread()]) is on_the_loop

    run(test)
