"""The call clock over the real things: the mini harness as a process in the local sandbox, and vectors of processes."""

from __future__ import annotations

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
from env_fakes import SOUND_TASKS, WordGrader
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AsyncVectorEnv

from clawgym_env.engine.scripted import tool_call
from clawgym_env.testing import FakeBackend, InProcessHarness, descendants, is_running

CALL = "ClawGym-Mini-Call-v0"
ROOT = Path(__file__).parents[2]
TASKS = "bundled:family=write_word"


def test_check_env_is_clean_on_the_real_thing_without_anything_built() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = gym.make(CALL, tasks=TASKS, render_mode="ansi")
        check_env(env.unwrapped)
        env.close()
    assert not sandboxes()


def test_a_caller_does_a_task_with_tools_and_an_abandoned_episode_leaves_no_process() -> None:
    env = gym.make(CALL, tasks=TASKS)
    prompt, info = env.reset(seed=1)
    _, word, _, path, _ = prompt.split("<|im_start|>user\n")[1].split('"')
    first = info["call_id"]
    prompt, reward, terminated, truncated, info = env.step(tool_call("bash", command=f"printf '{word}\\n' > {path}"))
    assert "<tool_response>" in prompt
    assert (reward, terminated, truncated, info["parent_id"]) == (0.0, False, False, first)
    answer, reward, terminated, truncated, info = env.step("Done.")
    assert (answer, reward, terminated, truncated, info["num_calls"]) == ("Done.", 1.0, True, False, 2)
    env.reset()
    env.step(tool_call("bash", command="sleep 600 & echo"))
    assert sandboxes()
    env.reset()
    env.close()
    assert not sandboxes()


INTERRUPTED = """
import gymnasium, clawgym_env
from clawgym_env.engine.scripted import tool_call
env = gymnasium.make("ClawGym-Mini-Call-v0")
env.reset(seed=0)
try:
    env.step(tool_call("bash", command="sleep 600"))
except KeyboardInterrupt:
    print("interrupted", flush=True)
try:
    env.step("more")
except gymnasium.error.ResetNeeded:
    print("over", flush=True)
env.reset()
"""


def test_ctrl_c_in_the_middle_of_a_step_and_an_end_without_close_leave_no_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not any(b"sleep\x00600" in command_line(one) for one in descendants(process.pid)):
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.05)
        everything = descendants(process.pid)
        process.send_signal(signal.SIGINT)
        printed, errors = process.communicate(timeout=120)
    assert printed == "interrupted\nover\n", errors
    assert process.returncode == 0, errors
    assert not [pid for pid in everything if is_running(pid)]


def make() -> gym.Env[str, str]:
    return gym.make(
        CALL, tasks=SOUND_TASKS, harness=InProcessHarness(), sandbox=FakeBackend(), grader=WordGrader(), seed=3
    )


def test_a_vector_of_processes_works_without_shared_memory_and_is_refused_with_the_cure_otherwise() -> None:
    with pytest.raises(ValueError, match="shared_memory=False"):
        AsyncVectorEnv([make])
    envs = AsyncVectorEnv([make, make], shared_memory=False)
    try:
        prompts, infos = envs.reset()
        assert prompts[0] == prompts[1]
        assert infos["task_id"].tolist() == [infos["task_id"][0]] * 2
        word = prompts[0].split("Say ")[1].split("<")[0]
        answers, rewards, terminations, _, infos = envs.step((word, "something else"))
        assert answers == (word, "something else")
        assert rewards.tolist() == [1.0, 0.25]
        assert terminations.all()
        assert [len(rollout.tree) for rollout in infos["rollout"]] == [1, 1]
        assert np.array_equal(infos["num_calls"], [1, 1])
    finally:
        envs.close()


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def sandboxes() -> set[int]:
    """Return the sandbox processes this process has started."""
    return {pid for pid in descendants(os.getpid()) if b"bwrap" in command_line(pid)}
