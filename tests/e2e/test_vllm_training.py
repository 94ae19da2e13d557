"""Training through a real vLLM server, end to end: `examples/train_grpo.py --engine vllm:URL`. See `make test-vllm`."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from vllm_servers import NEEDS_VLLM, vllm_server

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.vllm import VllmEngine
from clawgym_env.policy import Policy, load_policy
from learners.metrics_log import read_metrics

SCRIPT = Path(__file__).parents[2] / "examples" / "train_grpo.py"
PROMPT = np.random.default_rng(5).integers(5, 1000, size=600).tolist()
"""Of several blocks of the server's cache of prefixes."""
WITHIN = 1e-3
"""Nats, float32 on both sides."""

pytestmark = [pytest.mark.slow, pytest.mark.policy, NEEDS_VLLM]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_grpo", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_grpo"] = module
    spec.loader.exec_module(module)
    return module


def show(*lines: str) -> None:
    """Write what `make test-vllm` is run to see."""
    sys.stdout.write("\n" + "\n".join(lines) + "\n")


def gap(policy: Policy, ids: Sequence[int], logprobs: np.ndarray) -> float:
    """Return the largest difference between a server's log-probabilities and a policy's own, in nats."""
    with torch.inference_mode():
        whole = torch.tensor([[*PROMPT, *ids]])
        logits = policy.module(input_ids=whole).logits[0, len(PROMPT) - 1 : -1]
    own = torch.log_softmax(logits, -1).gather(-1, whole[0, len(PROMPT) :, None])[:, 0].numpy()
    return float(np.abs(own - logprobs).max())


def sampled(url: str) -> tuple[list[int], np.ndarray]:
    """Ask a server as a stranger would: no salt, and whatever prefix it remembers."""

    async def run() -> tuple[list[int], np.ndarray]:
        engine = registry.engine(f"vllm:{url}")
        generation = await engine.generate(PROMPT, SamplingParams(max_tokens=16, seed=1))
        await engine.close()
        return generation.token_ids.tolist(), generation.logprobs

    return asyncio.run(run())


def test_three_updates_through_a_server(tmp_path: Path) -> None:
    train = example()
    with vllm_server("tiny", tmp_path / "log") as url:
        before = sampled(url)
        size = {"num_updates": 3, "num_tasks": 4, "group_size": 4, "eval_every": 0, "eval_tasks": 2}
        train.main(train.Args(engine=f"vllm:{url}", learning_rate=1e-3, output_dir=tmp_path / "run", **size))
        after = sampled(url)
    first = load_policy("tiny", cache=cache_dir())
    last = load_policy(tmp_path / "run" / "checkpoint", cache=cache_dir())
    records = read_metrics(tmp_path / "run")
    show(
        "update  version  reward  tokens  sample s  update s  max |logprob difference| of rollouts, nats",
        *(
            f"{record['update']:6.0f}  {record['policy/version']:7.0f}  {record['reward/mean']:6.3f}  "
            f"{record['tokens/trained']:6.0f}  {record['time/sample_s']:8.1f}  {record['time/update_s']:8.2f}  "
            f"{record['logprob/max_abs_diff']:.1e}"
            for record in records
        ),
        f"server before the run against the first weights: {gap(first, *before):.1e} nats",
        f"server after the run against the last weights:   {gap(last, *after):.1e} nats",
        f"server after the run against the first weights:  {gap(first, *after):.1e} nats",
    )
    assert [record["policy/version"] for record in records] == [1, 2, 3]
    assert all(record["logprob/max_abs_diff"] < WITHIN for record in records), "every sampled token of every rollout"
    assert gap(first, *before) < WITHIN
    assert gap(last, *after) < WITHIN, "the server has the last weights, and no prefix of older ones"
    assert gap(first, *after) > 5 * WITHIN, "which are others than the first"


def test_weights_of_smollm2_arrive_whole(tmp_path: Path) -> None:
    """Its output layer is tied to the embedding, which vLLM on a CPU does not update by itself."""
    policy = load_policy("smollm2", cache=cache_dir())
    torch.manual_seed(0)

    def step() -> None:
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=3e-3)

    with vllm_server("smollm2", tmp_path / "log") as url:
        engine = registry.engine(f"vllm:{url}", policy=policy)
        assert isinstance(engine, VllmEngine)
        seconds = []
        for _ in range(3):
            started = time.perf_counter()
            engine.update_weights(step)
            seconds.append(time.perf_counter() - started)
            assert gap(policy, *sampled(url)) < WITHIN
        asyncio.run(engine.close())
    show(f"updates of SmolLM2-135M in float32, with the comparison: {', '.join(f'{s:.2f}' for s in seconds)} s")
