"""Rollouts through a vLLM server against the embedded engine, in one run, and the seconds of a weight update.

    clawgym serve --model tiny & clawgym serve --model smollm2 --port 8001 &
    python benchmarks/vllm.py --tiny http://127.0.0.1:8000 --smollm2 http://127.0.0.1:8001

Both engines answer the same tasks with the same seeds through the mini harness, in turns, so that what else the machine
does meets both. An update of SmolLM2 is taken apart: writing, loading, and all of it with the comparison.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
import tyro

import clawgym_env
from clawgym_env import cache_dir, registry
from clawgym_env.engine.base import Engine
from clawgym_env.engine.vllm.server import VllmServer
from clawgym_env.engine.weight_sync import FileSync
from clawgym_env.policy import load_policy
from learners.scripts import prepare


@dataclasses.dataclass
class Args:
    tiny: str | None = None
    """URL of a server of the tiny policy; without it rollouts are not measured."""
    smollm2: str | None = None
    """URL of a server of SmolLM2; without it updates are not measured."""
    num_rollouts: int = 32
    max_concurrency: int = 16
    repeats: int = 3
    json_file: Path | None = None


def rollouts(engine: Engine, args: Args) -> tuple[float, float]:
    """Play all tasks once; return rollouts a minute and the mean reward."""
    envs = gym.make_vec(
        clawgym_env.env_id("mini"),
        num_envs=args.num_rollouts,
        engine=engine,
        tasks="bundled:level=1-2",
        max_concurrency=args.max_concurrency,
    )
    envs.reset(seed=0)
    started = time.perf_counter()
    _, rewards, *_ = envs.step(np.zeros(args.num_rollouts, dtype=int))
    elapsed = time.perf_counter() - started
    envs.close()
    return 60 * args.num_rollouts / elapsed, float(np.mean(rewards))


def compare_rollouts(url: str, args: Args) -> dict[str, float]:
    engines = {"vllm": registry.engine(f"vllm:{url}"), "embedded": registry.engine("torch:tiny", cache_dir())}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    rewards: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        rollouts(engine, dataclasses.replace(args, num_rollouts=4))  # what is lazy is warm after it
    for _ in range(args.repeats):
        for name, engine in engines.items():
            rate, reward = rollouts(engine, args)
            rates[name].append(rate)
            rewards[name].append(reward)
    for engine in engines.values():
        asyncio.run(engine.close())
    return {
        **{f"{name}_rollouts_per_min": statistics.median(rates[name]) for name in engines},
        **{f"{name}_reward": statistics.mean(rewards[name]) for name in engines},
        "vllm_over_embedded": statistics.median([a / b for a, b in zip(rates["vllm"], rates["embedded"], strict=True)]),
    }


def time_updates(url: str, args: Args) -> dict[str, float]:
    policy = load_policy("smollm2", cache=cache_dir())

    def step() -> None:
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.mul_(1.0001)

    engine = registry.engine(f"vllm:{url}", policy=policy)
    whole = [_seconds(lambda: engine.update_weights(step)) for _ in range(args.repeats)]
    asyncio.run(engine.close())
    sync, server = FileSync(), VllmServer(url)
    writing, writing_cpu, loading = [], [], []
    for _ in range(args.repeats):
        used = _cpu_seconds()
        writing.append(_seconds(lambda: sync.publish(policy)))
        writing_cpu.append(_cpu_seconds() - used)
        server.pause_and_clear()
        loading.append(_seconds(lambda: sync.load([server])))
        server.resume()
    sync.close()
    server.close()
    return {
        "update_s_median": statistics.median(whole),
        "update_s_best": min(whole),
        "write_s_best": min(writing),
        "write_cpu_s_best": min(writing_cpu),
        "load_s_best": min(loading),
    }


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main(args: Args) -> None:
    prepare(0)
    figures: dict[str, float] = {}
    if args.smollm2 is not None:
        figures |= time_updates(args.smollm2, args)
    if args.tiny is not None:
        figures |= compare_rollouts(args.tiny, args)
    for name, value in figures.items():
        print(f"{name:28} {value:8.2f}")
    if args.json_file is not None:
        args.json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
