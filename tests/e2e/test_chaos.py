"""A controller killed with -9 at random moments of its rollouts leaves nothing that the next one does not remove."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def chaos(backend: str, *, kills: int, within_s: float, docker_host: str = "") -> dict[str, object]:
    """Run the benchmark and return its summary."""
    command = [sys.executable, "benchmarks/chaos.py", "--backend", backend, "--kills", str(kills)]
    done = subprocess.run(
        [*command, "--within-s", str(within_s)],
        cwd=ROOT,
        env={**os.environ, "DOCKER_HOST": docker_host} if docker_host else None,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return summary


def test_killed_controllers_leave_no_orphan_and_no_torn_rollout() -> None:
    summary = chaos("local", kills=5, within_s=1.5)
    assert summary["left_after_reaper"] == {}
    assert summary["torn_stores"] == []
    assert summary["needed_the_reaper"] == 0, "local sandboxes die with their controller, by themselves"


def test_killed_controllers_leave_no_container(docker_host: str) -> None:
    summary = chaos("docker", kills=3, within_s=4.0, docker_host=docker_host)
    assert summary["left_after_reaper"] == {}
    assert summary["torn_stores"] == []
