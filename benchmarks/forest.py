"""A training step on forests, against the same step on flat rows and on one row per call, in the same run.

`python benchmarks/forest.py [--policy smollm2|tiny|FOLDER] [--part shapes|break-even|memory]` prints a table and JSON.
Time is the process's CPU time of forward and backward, interleaved, best of `repeats`, since a shared machine drifts;
memory is the peak of a process of its own, less what it held before the step, with activation checkpointing on.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import tyro

from clawgym_env.cache import cache_dir
from clawgym_env.policy import Policy, load_policy
from clawgym_env.trace.prefix_tree import TokenRow
from learners.forest import Flops, plant, sharing
from learners.forward import token_logprobs
from learners.rows import MicroBatch, TrainingRow, pack

Way: TypeAlias = Literal["forest", "flat", "per_call"]
Part: TypeAlias = Literal["shapes", "break-even", "memory"]


@dataclass
class Config:
    """What to measure."""

    policy: str = "smollm2"
    cache: Path | None = None
    layers: int = 8
    """The policy is cut to its first layers."""
    part: Part = "shapes"
    shape: str | None = None
    """One of `SHAPES` alone."""
    repeats: int = 5
    micro_batch_tokens: int = 8192
    row_tokens: int = 1024
    """Of each of the eight rows of `--part break-even`."""
    per_call: bool = True
    """Measure one row per call too, which takes several times as long."""
    way: Way = "forest"
    """Whose memory to measure, in the child process of `--part memory`; set by the parent."""
    child: bool = False
    threads: int = 1


@dataclass(frozen=True)
class Shape:
    """`branches` trajectories that share `prefix` tokens; each turn is a prompt's delta and a reply of equal length."""

    prefix: int
    branches: int
    turns: int
    tokens_per_turn: int

    def rows(self, vocab_size: int) -> list[TrainingRow]:
        """Return the trajectories as rows; half of the tokens after the prefix are trained."""
        random = np.random.default_rng(0)
        prefix = random.integers(0, vocab_size, self.prefix)
        half = self.tokens_per_turn // 2
        rows = []
        for branch in range(self.branches):
            body = random.integers(0, vocab_size, self.turns * self.tokens_per_turn)
            mask = np.zeros(self.prefix + len(body), dtype=bool)
            for turn in range(self.turns):
                end = self.prefix + (turn + 1) * self.tokens_per_turn
                mask[end - half : end] = True
            rows.append(make_row(np.concatenate((prefix, body)), mask, branch))
        return rows

    def calls(self, vocab_size: int) -> list[TrainingRow]:
        """Return what a trainer without trees sees: each call a row of its own, its history only context."""
        calls = []
        half = self.tokens_per_turn // 2
        for row in self.rows(vocab_size):
            for turn in range(self.turns):
                end = self.prefix + (turn + 1) * self.tokens_per_turn
                mask = np.zeros(end, dtype=bool)
                mask[end - half :] = True
                calls.append(make_row(row.tokens.token_ids[:end], mask, row.rollout))
        return calls


SHAPES = {
    "group of 8, prefix 2048": Shape(prefix=2048, branches=8, turns=4, tokens_per_turn=64),
    "8 turns x 8 branches": Shape(prefix=512, branches=8, turns=8, tokens_per_turn=32),
}


def make_row(token_ids: Any, mask: Any, rollout: int) -> TrainingRow:
    """Make a row that trains where `mask` is set."""
    length = len(token_ids)
    zeros = np.zeros(length, dtype=np.int32)
    tokens = TokenRow(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.full(length, -1.0, dtype=np.float32),
        policy_versions=zeros,
        temperatures=np.ones(length, dtype=np.float32),
        call_indices=zeros,
    )
    index = np.where(mask, np.cumsum(mask) - 1, -1)
    return TrainingRow(tokens, mask.astype(np.float32), 1.0 / max(int(mask.sum()), 1), rollout, index)


def packings(shape: Shape, config: Config, vocab_size: int) -> dict[Way, Callable[[], list[MicroBatch]]]:
    """Return how each way packs a shape."""
    rows, budget = shape.rows(vocab_size), config.micro_batch_tokens
    return {
        "forest": lambda: plant(rows, max_tokens=budget),
        "flat": lambda: pack(rows, max_tokens=budget),
        "per_call": lambda: pack(shape.calls(vocab_size), max_tokens=budget),
    }


def step(policy: Policy, batches: Sequence[MicroBatch]) -> None:
    """Do the forward and backward passes of an update."""
    for batch in batches:
        logprobs, _ = token_logprobs(policy.module, batch)
        (-batch.weights * batch.advantages * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    policy.module.zero_grad()


def cpu_seconds(run: Callable[[], None]) -> float:
    """Measure the CPU time of this process."""
    start = time.process_time()
    run()
    return time.process_time() - start


def load(config: Config) -> Policy:
    """Load the policy and cut it."""
    policy = load_policy(config.policy, cache=config.cache or cache_dir())
    decoder: Any = policy.module.get_decoder()
    decoder.layers = decoder.layers[: config.layers]
    policy.module.config.num_hidden_layers = len(decoder.layers)
    return policy


def measure(policy: Policy, shape: Shape, config: Config) -> dict[str, float]:
    """Time a shape's step in every way, interleaved; and say what part of the saving that FLOPs allow is there."""
    vocab_size = int(policy.module.config.vocab_size)
    ways = packings(shape, config, vocab_size)
    if not config.per_call:
        del ways["per_call"]
    best: dict[str, float] = {}
    for _ in range(config.repeats):
        for way, make in ways.items():
            # Packing included: it is part of the step.
            seconds = cpu_seconds(lambda make=make: step(policy, make()))  # type: ignore[misc]
            best[way] = min(best.get(way, seconds), seconds)
            print(f"{way} {seconds:.2f} s", file=sys.stderr, flush=True)
    flops, forests = Flops.of(policy.module), ways["forest"]()
    result = {f"{way}_cpu_s": seconds for way, seconds in best.items()}
    others: dict[Way, list[TrainingRow]] = {"flat": shape.rows(vocab_size)}
    if config.per_call:
        others["per_call"] = shape.calls(vocab_size)
    for way, rows in others.items():
        shared = sharing(rows, forests)
        ideal, saving = shared.ideal_saving(flops), best[way] / best["forest"]
        result |= {f"{way}_token_ratio": shared.dedup_ratio, f"{way}_ideal_saving": ideal}
        result |= {f"{way}_saving": saving, f"{way}_share": saving / ideal}
    return result


def break_even(policy: Policy, config: Config) -> dict[str, dict[str, float]]:
    """Time eight rows that share a growing part of their tokens."""
    results = {}
    length = config.row_tokens
    for shared in (0, length // 32, length // 16, length // 8, length // 4):
        shape = Shape(prefix=shared, branches=8, turns=1, tokens_per_turn=length - shared)
        results[f"{shared} of {length} shared"] = measure(policy, shape, config)
    return results


def peak_bytes(config: Config, shape: Shape) -> int:
    """Measure, in this process, what a step takes beyond what was held before it."""
    policy = load(config)
    module: Any = policy.module
    (getattr(module, "activation_checkpointing_enable", None) or module.gradient_checkpointing_enable)(
        {"use_reentrant": False}
    )
    module.train()
    batches = packings(shape, config, int(module.config.vocab_size))[config.way]()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before, peak, done = resident_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], resident_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    step(policy, batches)
    done.set()
    thread.join()
    return peak[0] - before


def resident_bytes() -> int:
    """Return the memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory(config: Config) -> dict[str, dict[str, float]]:
    """Measure each way's peak in a process of its own."""
    results: dict[str, dict[str, float]] = {}
    for name in [config.shape] if config.shape else SHAPES:
        results[name] = {}
        for way in ("forest", "flat"):
            options = ["--part", "memory", "--child", "--way", way, "--shape", name]
            options += ["--policy", config.policy, "--layers", str(config.layers)]
            options += ["--micro-batch-tokens", str(config.micro_batch_tokens)]
            options += ["--cache", str(config.cache or cache_dir())]
            done = subprocess.run(
                [sys.executable, __file__, *options], check=True, capture_output=True, text=True, env=os.environ
            )
            results[name][f"{way}_peak_mib"] = int(done.stdout.split()[-1]) / 2**20
    return results


def main(config: Config) -> None:
    """Run what was asked for and print it."""
    torch.set_num_threads(config.threads)
    if config.child:
        print(peak_bytes(config, SHAPES[config.shape or next(iter(SHAPES))]))
        return
    if config.part == "memory":
        results = memory(config)
    elif config.part == "break-even":
        results = break_even(load(config), config)
    else:
        policy = load(config)
        names = [config.shape] if config.shape else list(SHAPES)
        results = {name: measure(policy, SHAPES[name], config) for name in names}
    for name, result in results.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in result.items()))
    load_average = os.getloadavg()[0]
    print(f"load average {load_average:.1f}")
    settings = {key: str(value) for key, value in asdict(config).items()}
    print(json.dumps({"config": settings, "load_average": load_average, "results": results}))


if __name__ == "__main__":
    main(tyro.cli(Config))
