"""A training run that is killed in the middle of an update takes every sandbox with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clawgym_env.testing import descendants, is_running

ROOT = Path(__file__).parents[2]
SANDBOXED = b"/opt/clawgym/mini"


@pytest.mark.policy
def test_after_kill_9_in_mid_update_no_sandbox_process_survives(tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_grpo.py", "--num-tasks", "2", "--eval-tasks", "4"]
    with (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(
            [*command, "--output-dir", str(tmp_path / "run")],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            alive = _wait_for_harnesses(run, tmp_path)
        finally:
            run.send_signal(signal.SIGKILL)
            run.wait()
    deadline = time.monotonic() + 5
    while (left := {pid for pid in alive if is_running(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _wait_for_harnesses(run: subprocess.Popen[bytes], folder: Path) -> set[int]:
    """Return the run's descendants once the first evaluation is over and two harnesses of an update are at work."""
    for _ in range(600):
        assert run.poll() is None, (folder / "output").read_text()
        metrics = folder / "run" / "metrics.jsonl"
        if metrics.exists() and metrics.stat().st_size:
            alive = descendants(run.pid)
            if sum(SANDBOXED in _command_line(pid) for pid in alive) >= 2:
                return alive
        time.sleep(0.1)
    raise AssertionError("no update began within a minute: " + (folder / "output").read_text())


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
