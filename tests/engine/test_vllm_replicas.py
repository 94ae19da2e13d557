"""Several servers of one policy: who answers what, and what happens when one goes and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import Body, FakeVllm, reply, serving
from fake_weights import fake_server, make_policy, moved
from model_families import FAMILIES, write_folder

from clawgym_env import registry
from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.vllm import VllmEngine, VllmSettings
from clawgym_env.engine.vllm.replicas import BLOCK, prefix_blocks
from clawgym_env.errors import ClawGymError, EngineError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("served") / "policy", FAMILIES["qwen3"])


@pytest.fixture
def servers(folder: Path) -> Iterator[list[FakeVllm]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(FakeVllm(str(folder), answered))) for _ in range(2)]


def answered(body: Body) -> Body:
    return reply([7], finish="length")


def connected(servers: Sequence[FakeVllm], **settings: float) -> VllmEngine:
    urls = [server.url for server in servers]
    chosen = VllmSettings(**{"reconnect_s": 5.0, **settings})  # type: ignore[arg-type]
    return VllmEngine.connect(urls, cache=Path("nowhere"), settings=chosen)


def counts(servers: Sequence[FakeVllm]) -> list[int]:
    return [len(server.asked) for server in servers]


def prompts(seed: int, turns: int) -> list[list[int]]:
    """Return the growing prompts of one rollout."""
    ids = np.random.default_rng(seed).integers(400, size=60 * turns + 128).tolist()
    return [ids[: 128 + 60 * turn] for turn in range(turns)]


def test_the_calls_of_a_rollout_go_to_the_server_that_has_read_its_prompt(servers: list[FakeVllm]) -> None:
    async def run() -> None:
        engine = connected(servers)
        rollouts = [prompts(seed, 6) for seed in range(6)]
        for turn in zip(*rollouts, strict=True):  # their first calls at once, so that they spread
            await asyncio.gather(*(engine.generate(prompt, SamplingParams()) for prompt in turn))
        await engine.close()

    asyncio.run(run())
    seen = [{tuple(body["token_ids"][:64]) for body in server.asked} for server in servers]
    assert not seen[0] & seen[1], "no rollout was at both"
    assert counts(servers) == [18, 18]


def test_calls_that_share_nothing_go_where_least_is_waiting(servers: list[FakeVllm]) -> None:
    async def run() -> None:
        engine = connected(servers)
        await asyncio.gather(*(engine.generate([i], SamplingParams()) for i in range(10)))
        await engine.close()

    asyncio.run(run())
    assert counts(servers) == [5, 5]


def test_a_block_stands_for_all_that_is_before_it() -> None:
    first, second = np.arange(3 * BLOCK + 5), np.arange(3 * BLOCK + 5)
    second[BLOCK] += 1
    a, b = prefix_blocks(first.astype(np.int32)), prefix_blocks(second.astype(np.int32))
    assert len(a) == len(b) == 3
    assert [x == y for x, y in zip(a, b, strict=True)] == [True, False, False]


def test_no_more_calls_are_at_a_server_than_allowed_and_the_others_wait(servers: list[FakeVllm]) -> None:
    import threading

    guard, at_once, most = threading.Lock(), 0, 0
    together = threading.Event()

    def watched(body: Body) -> Body:
        nonlocal at_once, most
        with guard:
            at_once += 1
            most = max(most, at_once)
            if at_once == 3:
                together.set()
        together.wait(30)
        with guard:
            at_once -= 1
        return answered(body)

    servers[0].answer = watched

    async def run() -> int:
        engine = connected(servers[:1], max_concurrency=3)
        done = await asyncio.gather(*(engine.generate([i], SamplingParams()) for i in range(12)))
        await engine.close()
        return len(done)

    assert asyncio.run(run()) == 12
    assert most == 3


def test_a_call_whose_server_dies_is_asked_of_another(folder: Path) -> None:
    with serving(FakeVllm(str(folder), answered)) as living, ExitStack() as stack:
        dying = stack.enter_context(serving(FakeVllm(str(folder), answered)))
        engine = connected([dying, living], reconnect_s=0.1)
        stack.close()

        async def run() -> None:
            for _ in range(3):
                assert (await engine.generate([1, 2], SamplingParams())).token_ids.tolist() == [7]
            await engine.close()

        asyncio.run(run())
        assert counts([living]) == [3]


def test_a_server_that_answers_503_has_its_call_asked_of_another(servers: list[FakeVllm]) -> None:
    servers[0].answer = lambda body: 503

    async def run() -> None:
        engine = connected(servers)
        await asyncio.gather(*(engine.generate([i], SamplingParams()) for i in range(4)))
        servers[0].answer = answered
        await engine.close()

    asyncio.run(run())
    assert len(servers[1].asked) >= 2


def test_a_restarted_server_is_found_again(folder: Path) -> None:
    async def run() -> None:
        with serving(FakeVllm(str(folder), answered)) as first:
            engine = connected([first])
            port = int(first.url.rpartition(":")[2])
        waiting = asyncio.create_task(engine.generate([1], SamplingParams()))
        await asyncio.sleep(0.1)
        with serving(FakeVllm(str(folder), answered), port):
            await waiting
            await engine.close()

    asyncio.run(run())


def test_servers_that_do_not_come_back_are_an_engine_error_in_time(folder: Path) -> None:
    with serving(FakeVllm(str(folder), answered)) as server:
        engine = connected([server], reconnect_s=0.1)

    async def run() -> None:
        with pytest.raises(EngineError, match=r"none for 0\.1 s"):
            await engine.generate([1], SamplingParams())
        await engine.close()

    asyncio.run(run())


def test_all_servers_are_updated_together_and_a_restarted_one_before_it_is_used(folder: Path) -> None:
    policy = make_policy(folder)
    (first, _), (second, _) = fake_server(policy, folder), fake_server(policy, folder)
    with serving(first), ExitStack() as stack:
        stack.enter_context(serving(second))
        port = int(second.url.rpartition(":")[2])
        engine = VllmEngine.connect(
            [first.url, second.url], cache=Path("nowhere"), policy=policy, settings=VllmSettings(reconnect_s=5)
        )
        engine.update_weights(lambda: moved(policy))
        assert first.weights == second.weights != "default"
        stack.close()
        second.weights = "default"
        engine.update_weights(lambda: moved(policy))
        assert second.weights == "default"

        async def run() -> None:
            await engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
            with serving(second, port):
                while engine._replicas[1].lost:
                    await asyncio.sleep(0.02)
                    await engine.generate([1, 2, 3], SamplingParams(max_tokens=2))
            await engine.close()

        asyncio.run(run())
        assert second.weights == first.weights


def test_servers_of_different_models_are_refused(servers: list[FakeVllm]) -> None:
    servers[1].window = 320
    with pytest.raises(EngineError, match="one model and window"):
        connected(servers)


def test_options_follow_a_question_mark(servers: list[FakeVllm]) -> None:
    urls = ",".join(server.url for server in servers)
    engine = registry.engine(f"vllm:{urls}?max_concurrency=2&reconnect_s=1")
    assert isinstance(engine, VllmEngine)
    asyncio.run(engine.close())
    with pytest.raises(ClawGymError, match="max_concurrency"):
        registry.engine(f"vllm:{urls}?concurrency=2")
