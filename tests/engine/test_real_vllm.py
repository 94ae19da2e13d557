"""The engine against a real vLLM server, where `CLAWGYM_VLLM_PYTHON` names a Python that has one.

A server takes a minute to start and gigabytes to install, so this is no part of an ordinary run: `make test-vllm`.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from vllm_servers import NEEDS_VLLM, PYTHON, vllm_server

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.engine.vllm import VllmEngine
from clawgym_env.engine.vllm.errors import WeightSyncError
from clawgym_env.engine.vllm.server import VllmServer
from clawgym_env.engine.weight_sync import FileSync
from clawgym_env.errors import EngineError
from clawgym_env.messages import Message
from clawgym_env.policy import Policy, load_policy
from clawgym_env.rendering import message_dicts

POLICY = "tiny"

pytestmark = [pytest.mark.slow, pytest.mark.policy, NEEDS_VLLM]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(POLICY, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


def prompt_of(engine: Engine, *texts: str) -> list[int]:
    turns = [Message(("user", "assistant")[i % 2], text) for i, text in enumerate(texts)]  # type: ignore[arg-type]
    return engine.renderer.render_ids(message_dicts(turns), add_generation_prompt=True)


def ask(engine: Engine, prompt: list[int], sampling: SamplingParams, times: int = 1) -> list[Generation]:
    async def run() -> list[Generation]:
        try:
            return await asyncio.gather(*(engine.generate(prompt, sampling) for _ in range(times)))
        finally:
            await engine.close()

    return asyncio.run(run())


def test_log_probabilities_are_those_of_the_policy_at_the_sampled_temperature(server: str) -> None:
    engine = registry.engine(f"vllm:{server}")
    assert engine.context_length == 2048
    prompt = prompt_of(engine, "Write the word hello to a.txt.")
    (generation,) = ask(engine, prompt, SamplingParams(temperature=0.7, max_tokens=48, seed=3))
    policy = load_policy(POLICY, cache=cache_dir())
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
        logits = policy.module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
    assert np.abs(generation.logprobs - expected).max() < 1e-3


def test_long_prompts_of_seeded_calls_are_read_side_by_side(server: str) -> None:
    engine = registry.engine(f"vllm:{server}")
    prompt = prompt_of(engine, "Read this. " * 150)
    replies = ask(engine, prompt, SamplingParams(max_tokens=8, seed=1), times=8)
    assert all(len(reply.token_ids) > 0 for reply in replies)


def test_a_turn_ends_with_its_stop_id_and_a_seed_fixes_it(server: str) -> None:
    engine = registry.engine(f"vllm:{server}")
    prompt = prompt_of(engine, "Write the word hello to a.txt.")
    replies = ask(engine, prompt, SamplingParams(max_tokens=256, seed=5), times=4)
    assert {reply.finish_reason for reply in replies} == {"stop"}
    assert replies[0].token_ids[-1] in engine.renderer.get_stop_token_ids()
    assert len({tuple(reply.token_ids.tolist()) for reply in replies}) == 1


def test_a_cancelled_call_is_aborted_by_the_server(server: str) -> None:
    async def run() -> list[asyncio.Task[Generation]]:
        engine = registry.engine(f"vllm:{server}")
        prompt = [engine.renderer.get_stop_token_ids()[0]] * 8
        sampling = [SamplingParams(max_tokens=2000, temperature=2.0, seed=i) for i in range(16)]
        tasks = [asyncio.create_task(engine.generate(prompt, each)) for each in sampling]
        async with httpx.AsyncClient(base_url=server, trust_env=False) as client, asyncio.timeout(50):
            await _until(client, lambda running: running > 0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await _until(client, lambda running: running == 0)
        await engine.close()
        return tasks

    assert any(task.cancelled() for task in asyncio.run(run()))


async def _until(client: httpx.AsyncClient, wanted: Callable[[float], bool]) -> None:
    """Wait until the number of sequences that the server decodes or holds in its queue is as wanted."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    while True:
        lines = (await client.get("/metrics")).text.splitlines()
        if wanted(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))):
            return
        await asyncio.sleep(0.05)


def test_a_paused_server_answers_after_resume(server: str) -> None:
    async def run() -> Generation:
        engine = registry.engine(f"vllm:{server}")
        prompt = prompt_of(engine, "Write the word hello to a.txt.")
        await engine.pause()
        task = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=4)))
        await asyncio.sleep(0.5)
        assert not task.done()
        await engine.resume()
        generation = await task
        await engine.close()
        return generation

    assert len(asyncio.run(run()).token_ids) > 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--logprobs-mode", "raw_logprobs"], "--logprobs-mode processed_logprobs"),
        (["--no-enable-scale-out"], "--enable-scale-out"),
    ],
    ids=["raw log-probabilities", "no scale-out"],
)
def test_a_server_without_a_flag_is_refused_by_its_name(flags: list[str], named: str, tmp_path: Path) -> None:
    with vllm_server(POLICY, tmp_path / "log", *flags) as url, pytest.raises(EngineError, match=named):
        registry.engine(f"vllm:{url}")


# Under training. The four traps of in-place updates, at the server that has them.


@pytest.fixture
def policy() -> Policy:
    return load_policy(POLICY, cache=cache_dir())


def moved(policy: Policy, by: float = 0.03) -> None:
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)


def logprobs_of(policy: Policy, prompt: list[int], sampled: list[int]) -> np.ndarray:
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *sampled]])
        logits = policy.module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()


def gap(generation: Generation, policy: Policy, prompt: list[int]) -> float:
    return float(np.abs(generation.logprobs - logprobs_of(policy, prompt, generation.token_ids.tolist())).max())


def bound(server: str, policy: Policy) -> VllmEngine:
    engine = registry.engine(f"vllm:{server}", policy=policy)
    assert isinstance(engine, VllmEngine)
    return engine


LONG = np.random.default_rng(3).integers(5, 1000, size=700).tolist()
"""A prompt of several blocks of the server's cache."""


async def sampled(engine: Engine, max_tokens: int = 12) -> Generation:
    return await engine.generate(LONG, SamplingParams(max_tokens=max_tokens, seed=1))


def test_updates_are_sampled_from_and_no_stale_prefix_is_used(server: str, policy: Policy) -> None:
    async def run() -> None:
        engine = bound(server, policy)
        for version in range(3):
            generation = await sampled(engine)
            assert gap(generation, policy, LONG) < 1e-3
            assert [span.version for span in generation.policy_versions] == [version]
            before = [*generation.token_ids.tolist()]
            old = logprobs_of(policy, LONG, before)
            await asyncio.to_thread(engine.update_weights, lambda: moved(policy))
            assert np.abs(logprobs_of(policy, LONG, before) - old).max() > 1e-2, "the weights really changed"
        await engine.close()

    asyncio.run(run())


def test_the_trap_of_the_stale_prefix_is_still_there(server: str, policy: Policy) -> None:
    """Without either guard the server answers from keys and values of the weights before: what both are there for."""
    control, sync = VllmServer(server), FileSync()

    def look() -> float:
        choice = control.sample("policy", LONG, SamplingParams(seed=1), 4)
        there = np.array([token.logprob for token in choice.tokens])
        return float(np.abs(there - logprobs_of(policy, LONG, choice.token_ids)).max())

    def push() -> None:
        sync.publish(policy)
        sync.load([control])
        control.resume()

    control.pause_and_clear()
    push()
    assert look() < 1e-3
    moved(policy)
    control.pause()
    push()
    assert look() > 1e-3
    control.pause_and_clear()
    control.resume()
    assert look() < 1e-3
    sync.close()
    control.close()


def test_a_reply_across_an_update_is_dated_token_by_token(server: str, policy: Policy) -> None:
    async def run() -> Generation:
        engine = bound(server, policy)
        sampling = SamplingParams(max_tokens=1200, temperature=1.5, seed=2)
        engine._stops = frozenset()  # so that it is long
        task = asyncio.create_task(engine.generate(LONG, sampling))
        await asyncio.sleep(2.0)
        await asyncio.to_thread(engine.update_weights, lambda: moved(policy))
        generation = await task
        await engine.close()
        return generation

    generation = asyncio.run(run())
    spans = generation.policy_versions
    assert [span.version for span in spans] == [0, 1]
    new = spans[1]
    ids = torch.tensor([[*LONG, *generation.token_ids.tolist()]])
    with torch.inference_mode():
        logits = policy.module(input_ids=ids).logits[0, len(LONG) - 1 : -1] / 1.5
    expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(LONG) :, None])[:, 0].numpy()
    gaps = np.abs(generation.logprobs - expected)
    assert gaps[new.start :].max() < 1e-3, "read again under the new weights"
    assert gaps[: new.start].max() > 1e-2


def test_a_load_that_fails_stops_the_run_and_a_reload_goes_on(server: str, policy: Policy) -> None:
    class Torn(FileSync):
        def publish(self, policy: Policy) -> None:
            super().publish(policy)
            assert self._published is not None
            file = self._published / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1000])

    async def run() -> None:
        sync = FileSync()
        engine = VllmEngine.connect(server, cache=cache_dir(), policy=policy, sync=sync)
        sync.__class__ = Torn
        with pytest.raises(WeightSyncError, match="incomplete metadata"):
            await asyncio.to_thread(engine.update_weights, lambda: moved(policy))
        with pytest.raises(EngineError, match="trainer's weights"):
            await sampled(engine)
        sync.__class__ = FileSync
        engine._published = False
        await asyncio.to_thread(engine.reload)
        assert gap(await sampled(engine), policy, LONG) < 1e-3
        await engine.close()

    asyncio.run(run())


def test_a_server_sleeps_and_wakes_around_an_update(server: str, policy: Policy) -> None:
    async def run() -> None:
        engine = registry.engine(f"vllm:{server}?sleep", policy=policy)
        await asyncio.to_thread(engine.update_weights, lambda: moved(policy))
        assert gap(await sampled(engine), policy, LONG) < 1e-3
        await engine.close()

    asyncio.run(run())


def test_serve_prints_the_engine_and_ends_its_server(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "clawgym_env.cli", "serve", "--model", POLICY, "--python", str(PYTHON)]
    command += ["--port", "0", "--context-length", "512", "--log", str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            words = process.stdout.readline().split()
            assert words[0] == "engine"
            engine = registry.engine(words[1])
            asyncio.run(engine.close())
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    with pytest.raises(EngineError, match="clawgym serve"):
        registry.engine(words[1])
