"""Throughput of the embedded engine, against `transformers.generate` on the same module in the same run.

`python benchmarks/engine.py [--policy tiny|smollm2|FOLDER]` prints a table and a JSON. Both engines decode greedily
sampled-length batches of equal prompts in turn (interleaved, best of `repeats`), since a shared machine drifts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro

from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.policy import Policy, load_policy


@dataclass
class Config:
    """What to measure."""

    policy: str = "tiny"
    cache: Path | None = None
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_tokens: int = 256
    new_tokens: int = 64
    long_prompt_tokens: int = 2048
    repeats: int = 3
    threads: int = 1


async def decode(engine: TorchEngine, prompts: torch.Tensor, new_tokens: int) -> int:
    """Sample from every prompt at once; return the number of new tokens."""
    params = SamplingParams(max_tokens=new_tokens)
    done = await asyncio.gather(*(engine.generate(prompt.tolist(), params) for prompt in prompts))
    return sum(len(generation.token_ids) for generation in done)


def hf_decode(policy: Policy, prompts: torch.Tensor, new_tokens: int) -> int:
    """The same with `generate`, which runs every row to the end."""
    with torch.inference_mode():
        out = policy.module.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            top_k=0,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
        )
    return int(out.shape[1] - prompts.shape[1]) * len(prompts)


def rate(work: Callable[[], int]) -> float:
    """Tokens per CPU second of this process."""
    start = time.process_time()
    tokens = work()
    return tokens / (time.process_time() - start)


def main(config: Config) -> None:
    torch.set_num_threads(config.threads)
    policy = load_policy(config.policy, cache=config.cache or cache_dir())
    high = policy.module.get_input_embeddings().num_embeddings
    torch.manual_seed(0)
    results: dict[str, dict[str, float]] = {}
    with asyncio.Runner() as runner:
        engine = TorchEngine(policy)
        # Random prompts end early at random; the stop rule is part of neither measurement.
        engine._stop_ids = frozenset()
        for size in config.batch_sizes:
            ours = theirs = 0.0
            for _ in range(config.repeats):
                prompts = torch.randint(0, high, (size, config.prompt_tokens))
                ours = max(ours, rate(lambda p=prompts: runner.run(decode(engine, p, config.new_tokens))))
                theirs = max(theirs, rate(lambda p=prompts: hf_decode(policy, p, config.new_tokens)))
            results[f"decode, batch {size}"] = {
                "tok_per_cpu_s": ours,
                "hf_tok_per_cpu_s": theirs,
                "ratio": ours / theirs,
            }
        prompt = torch.randint(0, high, (1, config.long_prompt_tokens))
        read = [rate(lambda: runner.run(decode(engine, prompt, 1)) * config.long_prompt_tokens) for _ in range(2)]
        results[f"prompt of {config.long_prompt_tokens}"] = {"tok_per_cpu_s": read[0], "cached": read[1]}
        runner.run(engine.close())
    for name, row in results.items():
        print(f"{name:20}" + "".join(f"  {key} {value:10.1f}" for key, value in row.items()))
    print(json.dumps({"policy": policy.name, "threads": config.threads, "results": results}))


if __name__ == "__main__":
    main(tyro.cli(Config))
