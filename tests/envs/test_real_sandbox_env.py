"""The face over the real things: the mini harness as a process in the local sandbox, only the policy is scripted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import clawgym_env
from clawgym_env.engine.scripted import tool_call
from clawgym_env.testing import descendants, is_running

MINI = "ClawGym-Mini-v0"
ROOT = Path(__file__).parents[2]
TASKS = "bundled:family=write_word"


@pytest.fixture
def engine(tmp_path: Path) -> str:
    """A policy of strings: it writes some file, then says so."""
    script = tmp_path / "script.json"
    script.write_text(json.dumps([tool_call("write", path="out.txt", content="hello"), "Done."]))
    return f"scripted:{script}"


def test_check_env_is_clean_on_the_real_thing_with_warnings_as_errors(engine: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(MINI, tasks=TASKS, engine=engine, render_mode="ansi")
        check_env(env.unwrapped)
        env.close()
    assert not sandboxes()


def test_a_group_of_real_rollouts_shares_its_task_and_leaves_nothing_behind(engine: str) -> None:
    envs = gym.make_vec(MINI, num_envs=4, group_size=2, tasks=TASKS, engine=engine)
    envs.reset(seed=0)
    observations, rewards, terminations, _, infos = envs.step(np.zeros(4, dtype=int))
    found = clawgym_env.rollouts(infos)
    assert [rollout.stop_reason for rollout in found] == ["completed"] * 4
    assert terminations.all()
    assert infos["num_calls"].tolist() == [2] * 4
    assert observations["response"] == ("Done.",) * 4
    assert rewards.tolist() == [rollout.reward for rollout in found]
    prompts = [rollout.tree.prompt(0).tolist() for rollout in found]
    assert prompts[0] == prompts[1] != prompts[2], "two rollouts of a task begin with the same tokens"
    envs.close()
    assert not sandboxes()


INTERRUPTED = """
import gymnasium, clawgym_env, numpy
from clawgym_env.engine.scripted import ScriptedEngine
envs = gymnasium.make_vec("ClawGym-Mini-v0", num_envs=2, engine=ScriptedEngine(["never"], latency_s=600))
envs.reset(seed=0)
try:
    envs.step(numpy.zeros(2, dtype=int))
except KeyboardInterrupt:
    print("interrupted", flush=True)
envs.close()
"""


def test_ctrl_c_in_the_middle_of_a_step_leaves_no_sandbox_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while len(harnesses := agents(process.pid)) < 2:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        everything = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=60)
    assert printed == "interrupted\n", errors
    assert process.returncode == 0, errors
    assert harnesses <= everything
    assert not [pid for pid in everything if is_running(pid)]


def agents(pid: int) -> set[int]:
    """Return the harness processes below a process."""
    return {one for one in descendants(pid) if b"agent.py" in command_line(one)}


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def sandboxes() -> set[int]:
    """Return the sandbox processes this process has started."""
    return {pid for pid in descendants(os.getpid()) if b"bwrap" in command_line(pid)}
