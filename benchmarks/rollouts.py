"""Rollouts per minute with the scripted engine: everything but the model.

`python benchmarks/rollouts.py --concurrency 32 --rollouts 96` runs mini rollouts (sandbox, harness process, proxy,
tree, grader in a fresh sandbox), prints rollouts/min, the peak memory of the process tree and what is left running.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import tyro

import clawgym_env
from clawgym_env.engine.scripted import ScriptedEngine, tool_call


@dataclass(frozen=True)
class Args:
    concurrency: int = 32
    """Rollouts alive at once."""
    rollouts: int = 96
    harness: str = "mini"


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's live descendants."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parent = int(file.read().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def pss_mb(pids: list[int]) -> float:
    """Return the proportional memory of some processes, in MiB."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:"))
        except OSError:
            continue
    return total / 1024


def reply(prompt: str, call_index: int) -> str:
    """Write one file, then answer."""
    asked = prompt.rsplit("<|im_start|>user", 1)[-1]
    return "Done." if "<tool_response>" in asked else tool_call("write", path="out.txt", content="hello")


def main(args: Args) -> None:
    me, peak, over = os.getpid(), [0.0, 0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.25):
            tree = pss_mb(descendants(me))
            peak[0], peak[1] = max(peak[0], tree), max(peak[1], pss_mb([me]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    envs = gym.make_vec(
        clawgym_env.env_id(args.harness),
        num_envs=args.concurrency,
        max_concurrency=args.concurrency,
        engine=ScriptedEngine(reply),
    )
    finished: list[clawgym_env.Rollout] = []
    started = time.perf_counter()
    while len(finished) < args.rollouts:
        envs.reset(seed=len(finished))
        *_, infos = envs.step(np.zeros(args.concurrency, dtype=int))
        finished += clawgym_env.rollouts(infos)
    seconds = time.perf_counter() - started
    envs.close()
    over.set()
    watcher.join()
    result = {
        "rollouts": len(finished),
        "completed": sum(rollout.stop_reason == "completed" for rollout in finished),
        "calls": sum(len(rollout.tree) for rollout in finished),
        "rollouts_per_min": round(60 * len(finished) / seconds, 1),
        "seconds": round(seconds, 2),
        "peak_sandboxes_pss_mb": round(peak[0], 1),
        "peak_controller_pss_mb": round(peak[1], 1),
        "left_running": len(descendants(me)),
    }
    for key, value in result.items():
        print(f"{key:24} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Args))
