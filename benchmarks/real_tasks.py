"""Real tasks through a real harness with an embedded policy, checked token for token.

`python benchmarks/real_tasks.py --harness "claude-code?bare" --policy smollm2 --tasks FOLDER` is a small evaluation in
which every call of every tree is compared with what the engine really read and sampled: prompt ids, sampled ids and
log-probabilities, bit for bit. Prints a table and a JSON; exits 1 on a difference or a rollout without a grade.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

import clawgym_env
from clawgym_env import cache_dir
from clawgym_env.engine.base import Generation, SamplingParams, TokenIds
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.evaluation.report import overview
from clawgym_env.policy import Policy, load_policy


@dataclass(frozen=True)
class Args:
    tasks: str
    """A folder of tasks, or a name."""
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


class Recorder(TorchEngine):
    """The embedded engine, remembering what went in and what came out."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy)
        self.seen: list[tuple[TokenIds, Generation]] = []

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        generation = await super().generate(prompt_token_ids, sampling)
        self.seen.append((np.array(prompt_token_ids, dtype=np.int32), generation))
        return generation


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
    recorder = Recorder(load_policy(args.policy, cache=cache_dir(), context_length=args.context_length))
    with tempfile.TemporaryDirectory() as folder:
        result = clawgym_env.evaluate(
            args.tasks,
            harness=args.harness,
            engine=recorder,
            sampling=SamplingParams(max_tokens=args.max_tokens),
            limits={"max_calls": args.max_calls, "wall_clock_s": args.wall_clock_s},
            limit=args.limit,
            out=folder,
        )
        with clawgym_env.RolloutStore(Path(folder), read_only=True) as store:
            rollouts = [store.load(rollout_id) for task in result.tasks for rollout_id in task.rollout_ids]
    ok, rows = result.complete, []
    for rollout in rollouts:
        same = identical_calls(rollout, recorder)
        ok &= same == len(rollout.tree) > 0
        row = {
            "task": rollout.task_id,
            "stop": rollout.stop_reason.value,
            "reward": round(rollout.reward, 3),
            "calls": len(rollout.tree),
            "identical_calls": same,
            "prompt_tokens": rollout.tree.num_prompt_tokens,
            "sampled_tokens": rollout.tree.num_completion_tokens,
            "trained_tokens": rollout.tree.buckets()["trained"],
            "seconds": round(rollout.timing["total"], 1),
        }
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), rollout.error)
    print(overview(result))
    print(json.dumps({"harness": args.harness, "policy": args.policy, "ok": ok, "rollouts": rows}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main(tyro.cli(Args))
