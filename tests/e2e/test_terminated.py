"""SIGTERM, as schedulers and containers send it, ends the command line in good order."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from clawgym_env.engine.scripted import tool_call
from clawgym_env.sandbox.limits import ControlGroups
from clawgym_env.testing import descendants, is_running

ROOT = Path(__file__).parents[2]


def test_a_terminated_rollout_closes_its_sandbox_and_leaves_nothing_to_reap(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps([tool_call("bash", command="touch begun; sleep 1000")]))
    command = [sys.executable, "-m", "clawgym_env.cli", "rollout", "--engine", f"scripted:{script}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        deadline = time.monotonic() + 50
        while not any(b"sleep" in command_line(pid) for pid in descendants(run.pid)):
            assert run.poll() is None, run.communicate()
            assert time.monotonic() < deadline, "Expected the agent to be at work within 50 s."
            time.sleep(0.05)
        alive = descendants(run.pid)
        run.terminate()
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM, errors
    assert "everything is closed" in errors
    assert not [pid for pid in alive if is_running(pid)]
    groups = ControlGroups.find()
    assert not [path for path in (groups.directories() if groups else []) if path.name.startswith(f"{run.pid}-")]
    assert not list(Path(tempfile.gettempdir()).glob(f"clawgym-{run.pid}-*"))


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
