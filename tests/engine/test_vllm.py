"""The engine over a vLLM server: what it asks, what it refuses, and that it gives back what the server sampled."""

from __future__ import annotations

import asyncio
import base64
import io
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fake_vllm import Body, FakeVllm, reply, serving
from model_families import FAMILIES, write_folder

from clawgym_env import registry
from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.engine.vllm import VllmEngine, VllmSettings
from clawgym_env.engine.vllm.errors import UpdateNotSupported
from clawgym_env.errors import ContextOverflow, EngineError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("served") / "policy", FAMILIES["qwen3"])


@pytest.fixture
def server(folder: Path) -> Iterator[FakeVllm]:
    with serving(FakeVllm(str(folder), lambda body: 500)) as fake:
        yield fake


def connected(server: FakeVllm) -> VllmEngine:
    return VllmEngine.connect(server.url, cache=Path("nowhere"), settings=VllmSettings(reconnect_s=0.2))


def ask(engine: VllmEngine, prompt: list[int] | None = None, **sampling: float) -> Generation:
    async def run() -> Generation:
        try:
            return await engine.generate(prompt or [1, 2, 3], SamplingParams(**sampling))  # type: ignore[arg-type]
        finally:
            await engine.close()

    return asyncio.run(run())


def test_the_server_names_the_folder_and_the_window(server: FakeVllm) -> None:
    engine = connected(server)
    assert isinstance(engine, Engine)
    assert getattr(engine.renderer, "family", None) == "qwen3"
    assert (engine.context_length, engine.policy_version) == (640, 0)


def test_ids_go_in_and_ids_with_log_probabilities_come_out(server: FakeVllm) -> None:
    engine = connected(server)
    stop = engine.renderer.get_stop_token_ids()[0]
    server.answer = lambda body: reply([7, 8, stop], [-0.25, -1.5, -0.125])
    generation = ask(engine, [4, 5, 6], temperature=0.7, top_p=0.9, top_k=20, max_tokens=33, seed=11)
    assert generation.token_ids.tolist() == [7, 8, stop]
    assert generation.token_ids.dtype == np.int32
    assert generation.logprobs.tolist() == [-0.25, -1.5, -0.125]
    assert generation.logprobs.dtype == np.float32
    assert generation.finish_reason == "stop"
    assert [(span.version, span.start, span.end) for span in generation.policy_versions] == [(0, 0, 3)]
    (body,) = server.asked
    assert (body["model"], body["token_ids"]) == ("policy", [4, 5, 6])
    assert body["sampling_params"] == {
        "max_tokens": 33,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 11,
        "stop_token_ids": sorted(engine.renderer.get_stop_token_ids()),
        "ignore_eos": True,
        "logprobs": 0,
        "routed_experts_prompt_start": 2,
    }
    assert "cache_salt" not in body


@pytest.mark.parametrize(("finish", "expected"), [("length", "length"), ("abort", "abort"), ("error", "abort")])
def test_other_ends_are_told_apart(server: FakeVllm, finish: str, expected: str) -> None:
    server.answer = lambda body: reply([7, 8], finish=finish)
    assert ask(connected(server)).finish_reason == expected


def test_a_reply_has_the_room_that_the_prompt_leaves(server: FakeVllm) -> None:
    server.answer = lambda body: reply([7], finish="length")
    ask(connected(server), [1] * 630, max_tokens=100)
    assert server.asked[0]["sampling_params"]["max_tokens"] == 10
    with pytest.raises(ContextOverflow):
        ask(connected(server), [1] * 640)
    assert len(server.asked) == 1


def test_a_server_without_the_route_is_refused_with_the_flag(server: FakeVllm) -> None:
    server.scale_out = False
    with pytest.raises(EngineError, match="--enable-scale-out"):
        connected(server)


def test_a_server_that_tells_raw_log_probabilities_is_refused_with_the_flag(server: FakeVllm) -> None:
    server.processed = False
    with pytest.raises(EngineError, match="--logprobs-mode processed_logprobs"):
        connected(server)


def test_no_server_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(EngineError, match="clawgym serve"):
        VllmEngine.connect("http://127.0.0.1:9", cache=Path("nowhere"))


def test_a_folder_that_is_not_here_must_be_named(server: FakeVllm, folder: Path) -> None:
    server.root = "some/model"
    with pytest.raises(EngineError, match="#FOLDER"):
        connected(server)
    engine = registry.engine(f"vllm:{server.url}#{folder}")
    assert isinstance(engine, VllmEngine)


def test_a_server_that_does_not_tell_its_window_is_refused(server: FakeVllm) -> None:
    server.window = None
    with pytest.raises(EngineError, match="window"):
        connected(server)


def experts(array: np.ndarray) -> str:
    """Encode an array as vLLM does."""
    data = io.BytesIO()
    np.save(data, array.astype(np.uint8))
    return base64.b64encode(data.getvalue()).decode()


def test_the_experts_of_every_sampled_token_are_kept(server: FakeVllm) -> None:
    chosen = np.arange(24).reshape(3, 4, 2)
    body = reply([7, 8, 9], finish="length")
    body["choices"][0]["routed_experts"] = experts(chosen)
    server.answer = lambda asked: body
    generation = ask(connected(server))
    assert generation.routed_experts is not None
    assert generation.routed_experts.dtype == np.int16
    assert (generation.routed_experts == chosen).all()


def _spoilt(change: Callable[[Body], None]) -> Callable[[int], Body]:
    def make(stop: int) -> Body:
        body = reply([7, stop])
        change(body["choices"][0])
        return body

    return make


BAD: dict[str, Callable[[int], Body | int]] = {
    "goes on after its stop id": lambda stop: reply([7, stop, 8], finish="length"),
    "stops without a stop id": lambda stop: reply([7, 8], finish="stop"),
    "ends by length at a stop id": lambda stop: reply([7, stop], finish="length"),
    "no log-probabilities": _spoilt(lambda choice: choice.update(logprobs=None)),
    "one log-probability missing": _spoilt(lambda choice: choice["logprobs"]["content"].pop()),
    "log-probability of another id": _spoilt(lambda choice: choice["logprobs"]["content"][0].update(token_id=9)),
    "not a number": _spoilt(lambda choice: choice["logprobs"]["content"][0].update(logprob=math.nan)),
    "weights changed in the middle": _spoilt(
        lambda choice: choice.update(weight_versions=[{"version": v, "start": 0, "end": 1} for v in "ab"])
    ),
    "experts of fewer tokens": _spoilt(lambda choice: choice.update(routed_experts=experts(np.zeros((1, 2, 2))))),
    "experts that are no array": _spoilt(lambda choice: choice.update(routed_experts="AAAA")),
    "no ids": _spoilt(lambda choice: choice.pop("token_ids")),
    "no choice": lambda stop: {"choices": []},
    "no body of this kind": lambda stop: {"object": "error"},
    "server error": lambda stop: 500,
    "refused": lambda stop: 400,
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_breaks_the_contract_is_an_engine_error(server: FakeVllm, name: str) -> None:
    engine = connected(server)
    server.answer = lambda body: BAD[name](engine.renderer.get_stop_token_ids()[0])
    with pytest.raises(EngineError, match="Expected"):
        ask(engine)


def test_a_lost_server_is_an_engine_error(folder: Path) -> None:
    with serving(FakeVllm(str(folder), lambda body: 500)) as server:
        engine = connected(server)
    with pytest.raises(EngineError, match="back"):
        ask(engine)


def test_cancelling_hangs_up_so_that_the_server_aborts(server: FakeVllm) -> None:
    server.stalls = True

    async def run() -> None:
        engine = connected(server)
        task = asyncio.create_task(engine.generate([1], SamplingParams()))
        await asyncio.to_thread(server.begun.wait, 30)
        assert not server.hung_up.is_set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.hung_up.wait, 30)
        await engine.close()

    asyncio.run(run())


def test_many_calls_are_in_flight_at_once(server: FakeVllm) -> None:
    engine = connected(server)
    server.answer = lambda body: reply([body["token_ids"][0] + 10], finish="length")

    async def run() -> list[int]:
        calls = [engine.generate([i], SamplingParams()) for i in range(40)]
        ids = [generation.token_ids.tolist()[0] for generation in await asyncio.gather(*calls)]
        await engine.close()
        return ids

    assert asyncio.run(run()) == list(range(10, 50))


def test_weights_are_not_updated_through_it(server: FakeVllm) -> None:
    with pytest.raises(UpdateNotSupported, match="policy=policy"):
        connected(server).update_weights(lambda: None)


def test_pause_and_resume_need_the_servers_development_routes(server: FakeVllm) -> None:
    async def run() -> None:
        engine = connected(server)
        try:
            await engine.pause()
            await engine.resume()
        finally:
            await engine.close()

    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE"):
        asyncio.run(run())
    server.dev_mode = True
    server.controls.clear()
    asyncio.run(run())
    assert server.controls == ["/pause?mode=keep&clear_cache=false", "/resume"]


def test_a_closed_engine_answers_no_more(server: FakeVllm) -> None:
    async def run() -> None:
        engine = connected(server)
        await engine.close()
        await engine.close()
        await engine.generate([1], SamplingParams())

    with pytest.raises(EngineError, match="closed"):
        asyncio.run(run())
