"""The background loop: results, errors, and a clean-up that is waited for."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from clawgym_env._loop import BackgroundLoop


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    made = BackgroundLoop()
    yield made
    made.close()


def test_a_result_comes_back(loop: BackgroundLoop) -> None:
    async def answer() -> int:
        return 42

    assert loop.run(answer()) == 42


def test_an_error_comes_back(loop: BackgroundLoop) -> None:
    async def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(fail())


def test_it_works_while_another_loop_runs_in_the_calling_thread(loop: BackgroundLoop) -> None:
    async def answer() -> int:
        return 7

    async def notebook() -> int:
        return loop.run(answer())

    assert asyncio.run(notebook()) == 7


def test_ctrl_c_waits_for_the_clean_up(loop: BackgroundLoop) -> None:
    cleaned = threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            cleaned.set()

    def interrupt() -> None:
        time.sleep(0.2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert cleaned.is_set()


def test_close_lets_running_coroutines_clean_up() -> None:
    loop = BackgroundLoop()
    cleaned = threading.Event()
    started = threading.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        finally:
            cleaned.set()

    def call() -> None:
        with pytest.raises(asyncio.CancelledError):
            loop.run(work())

    caller = threading.Thread(target=call)
    caller.start()
    assert started.wait(5)
    loop.close()
    caller.join(5)
    assert cleaned.is_set()
    loop.close()


def test_a_call_from_inside_is_refused(loop: BackgroundLoop) -> None:
    async def inner() -> None:
        return None

    async def outer() -> None:
        with pytest.raises(RuntimeError, match="Await"):
            loop.run(inner())

    loop.run(outer())
