"""Real tasks through a real harness with an embedded policy, checked token for token.

`python benchmarks/real_tasks.py --harness "claude-code?bare" --policy smollm2 --tasks FOLDER` runs rollouts one after
another and compares every call in the tree with what the engine really read and sampled: prompt ids, sampled ids and
log-probabilities, bit for bit. Prints a table and a JSON; exits 1 on a difference or an infrastructure failure.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import numpy as np
import tyro
from renderers.base import Renderer

import clawgym_env
from clawgym_env import cache_dir
from clawgym_env.engine.base import Engine, Generation, SamplingParams, TokenIds
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.policy import load_policy
from clawgym_env.rollout import StopReason
from clawgym_env.tasks import Limits

INFRASTRUCTURE = {StopReason.SANDBOX_ERROR, StopReason.ENGINE_ERROR, StopReason.GRADER_ERROR}


@dataclass(frozen=True)
class Args:
    tasks: str
    """A folder in the ClawGym format, or a name."""
    harness: str = "mini"
    """With options, as in "claude-code?bare"."""
    policy: str = "smollm2"
    limit: int = 3
    context_length: int | None = None
    """Stretches smollm2's window of 8k, for smoke runs."""
    max_tokens: int = 96
    """Of one reply."""
    max_calls: int = 6
    wall_clock_s: float = 900.0


@dataclass
class Recorder:
    """An engine that remembers what went in and what came out."""

    inner: Engine
    seen: list[tuple[TokenIds, Generation]] = field(default_factory=list)

    @property
    def renderer(self) -> Renderer:
        return self.inner.renderer

    @property
    def context_length(self) -> int:
        return self.inner.context_length

    @property
    def policy_version(self) -> int:
        return self.inner.policy_version

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        generation = await self.inner.generate(prompt_token_ids, sampling)
        self.seen.append((np.array(prompt_token_ids, dtype=np.int32), generation))
        return generation

    def update_weights(self, apply: Callable[[], None]) -> int:
        return self.inner.update_weights(apply)

    async def pause(self) -> None:
        await self.inner.pause()

    async def resume(self) -> None:
        await self.inner.resume()

    async def close(self) -> None:
        await self.inner.close()


def identical_calls(rollout: clawgym_env.Rollout, recorder: Recorder) -> int:
    """Count the calls of a rollout that are bit for bit a generation of the engine."""
    return sum(
        any(
            np.array_equal(rollout.tree.prompt(call.index), prompt)
            and np.array_equal(call.token_ids, generation.token_ids)
            and np.array_equal(call.logprobs, generation.logprobs)
            for prompt, generation in recorder.seen
        )
        for call in rollout.tree
    )


def main(args: Args) -> None:
    policy = load_policy(args.policy, cache=cache_dir(), context_length=args.context_length)
    recorder = Recorder(TorchEngine(policy))
    env = gym.make(
        clawgym_env.env_id(args.harness.partition("?")[0]),
        tasks=Path(args.tasks) if Path(args.tasks).exists() else args.tasks,
        harness=args.harness,
        engine=recorder,
        sampling=SamplingParams(max_tokens=args.max_tokens),
        limits=Limits(max_calls=args.max_calls, wall_clock_s=args.wall_clock_s),
    )
    rows, ok = [], True
    for seed in range(args.limit):
        env.reset(seed=seed)
        _, reward, _, _, info = env.step(0)
        rollout = info["rollout"]
        same = identical_calls(rollout, recorder)
        ok &= same == len(rollout.tree) > 0 and rollout.stop_reason not in INFRASTRUCTURE and rollout.graded
        row = {
            "task": rollout.task_id,
            "stop": str(rollout.stop_reason),
            "reward": round(float(reward), 3),
            "calls": len(rollout.tree),
            "identical_calls": same,
            "prompt_tokens": rollout.tree.num_prompt_tokens,
            "sampled_tokens": rollout.tree.num_completion_tokens,
            "trained_tokens": rollout.tree.buckets()["trained"],
            "seconds": round(rollout.timing["total"], 1),
        }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        if rollout.error:
            print("   ", rollout.error)
    env.close()
    print(json.dumps({"harness": args.harness, "policy": args.policy, "ok": ok, "rollouts": rows}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main(tyro.cli(Args))
