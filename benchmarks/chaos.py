"""Kill a controller with SIGKILL at random moments of its rollouts and count what is left.

`python benchmarks/chaos.py --backend local --kills 50`. Each round starts a process that runs mini rollouts without
end, whose agents leave daemons behind, kills it, waits a grace, reaps as the next controller would, and counts what
carries the dead one's mark: processes, control groups, containers, folders. Its store must open, every rollout whole.
Prints a table, then one JSON line; exit code 1 if anything was left or torn.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

from clawgym_env import registry
from clawgym_env.sandbox.limits import ControlGroups
from clawgym_env.sandbox.reaper import reap
from clawgym_env.testing import descendants, is_running
from clawgym_env.trace.store import FILE_NAME, RolloutStore

MARK = "CLAWGYM_CHAOS"
"""An environment variable of every process of an agent."""
SETTLE_S = 10.0
"""What a reaper has killed is gone after this at the latest."""


@dataclass(frozen=True)
class Args:
    """How often, and how."""

    backend: str = "local"
    """local or docker."""
    kills: int = 50
    concurrency: int = 4
    """Rollouts alive when the blow falls."""
    within_s: float = 3.0
    """The blow falls at a random moment of this many seconds after the controller's first order."""
    grace_s: float = 5.0
    """How long sandboxes get to die by themselves before the reaper comes."""
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """What one kill left."""

    delay_s: float
    finished: int
    """Rollouts in the store."""
    died_s: float | None
    """Until the last process was gone; None where the reaper was needed."""
    before: dict[str, int]
    """Leftovers by kind after the grace, before the reaper."""
    after: dict[str, int]
    torn: str
    """What is wrong with the store; empty when nothing is."""


def control(backend: str, run_dir: str, mark: str, concurrency: int) -> None:
    """Be the controller: run rollouts until killed. Prints its owner tag before the first."""
    import gymnasium

    import clawgym_env  # noqa: F401 (registers the environments)
    from clawgym_env.engine.scripted import ScriptedEngine, tool_call
    from clawgym_env.ownership import owner_tag
    from clawgym_env.tasks.loading import load_tasks

    tasks = [task.model_copy(update={"env": {MARK: mark}}) for task in load_tasks("bundled:family=write_word")[:4]]
    daemon = "(setsid sh -c 'setsid sleep 1000 & sleep 1000' &) >/dev/null 2>&1; sleep 0.1"
    script = [tool_call("bash", command=daemon), tool_call("write", path="out.txt", content="hello"), "Done."]
    envs = gymnasium.make_vec(
        "ClawGym-Mini-v0",
        num_envs=concurrency,
        max_concurrency=concurrency,
        tasks=tasks,
        engine=ScriptedEngine(script, latency_s=0.05),
        sandbox=backend,
        run_dir=run_dir,
    )
    print(owner_tag(), flush=True)
    for _ in envs.unwrapped.as_completed(None):  # type: ignore[attr-defined]
        pass


def one_round(args: Args, delay_s: float, folder: Path) -> Round:
    """Start a controller, kill it after `delay_s`, and look."""
    mark = uuid.uuid4().hex
    call = f"import chaos; chaos.control({args.backend!r}, {str(folder / 'run')!r}, {mark!r}, {args.concurrency})"
    with (folder / "errors").open("wb") as errors:
        controller = subprocess.Popen(
            [sys.executable, "-c", call], cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        with controller:
            assert controller.stdout is not None
            tag = controller.stdout.readline().strip()
            assert tag, (folder / "errors").read_text()
            time.sleep(delay_s)
            controller.send_signal(signal.SIGSTOP)  # so that the list of its children stays true for one moment
            children = descendants(controller.pid)
            controller.kill()
    if controller.returncode != -signal.SIGKILL:
        raise RuntimeError(f"The controller ended by itself: {(folder / 'errors').read_text()}")

    def left() -> dict[str, int]:
        return leftovers(tag, mark, children)

    died_s = wait_until(lambda: not left().get("processes"), args.grace_s)
    before = left()
    asyncio.run(reap([registry.backend(args.backend)]))
    wait_until(lambda: not left().get("processes"), SETTLE_S)
    asyncio.run(reap([registry.backend(args.backend)]))  # a group that still held a dying process
    finished, torn = read_store(folder / "run")
    return Round(delay_s, finished, died_s, before, left(), torn)


def leftovers(tag: str, mark: str, children: set[int]) -> dict[str, int]:
    """Count what there is of a dead controller's on this machine, by kind."""
    groups = ControlGroups.find()
    found = {
        "processes": len({pid for pid in children if is_running(pid)} | marked_processes(f"{MARK}={mark}", tag)),
        "groups": len([path for path in groups.directories() if path.name.startswith(tag)]) if groups else 0,
        "folders": len(list(Path(tempfile.gettempdir()).glob(f"clawgym-*{tag}*"))),
        "containers": containers(tag) if "docker" in sys.modules else 0,
    }
    return {kind: count for kind, count in found.items() if count}


def marked_processes(mark: str, tag: str) -> set[int]:
    """Return the processes that have a mark in their environment, or are in a control group of the tag's owner."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"/{tag}" in (entry / "cgroup").read_text() or mark.encode() in (entry / "environ").read_bytes():
                found.add(int(entry.name))
        except OSError:
            continue
    return {pid for pid in found if is_running(pid)}


def containers(tag: str) -> int:
    """Return how many containers, running or not, a controller owns."""
    import docker

    with closing(docker.from_env()) as client:
        return len(client.api.containers(all=True, filters={"label": f"clawgym.owner={tag}"}))


def read_store(run_dir: Path) -> tuple[int, str]:
    """Open a killed run's store as its successor would; return how many rollouts are whole, and what is wrong."""
    try:
        with RolloutStore(run_dir) as store:
            rollouts = list(store.rollouts())
            for rollout in rollouts:
                if len(rollout.tree) != len(store.calls(rollout.id)):
                    return len(rollouts), f"{rollout.id} lacks calls"
        with closing(sqlite3.connect(run_dir / FILE_NAME)) as connection:
            (verdict,) = connection.execute("PRAGMA integrity_check").fetchone()
        return len(rollouts), "" if verdict == "ok" else str(verdict)
    except Exception as error:
        return 0, repr(error)


def wait_until(condition: Callable[[], bool], limit_s: float) -> float | None:
    """Return the seconds until a condition held; None when it did not within the limit."""
    started = time.monotonic()
    while not condition():
        if time.monotonic() - started > limit_s:
            return None
        time.sleep(0.05)
    return time.monotonic() - started


def main(args: Args) -> int:
    """Run the rounds and print what they left."""
    if args.backend != "local":
        registry.backend(args.backend)  # tells early what is missing
    moments = random.Random(args.seed)
    rounds = []
    print("kill  after s  finished  dead in s  before the reaper / after it")
    for number in range(args.kills):
        with tempfile.TemporaryDirectory(prefix="clawgym-chaos-") as folder:
            done = one_round(args, moments.uniform(0.0, args.within_s), Path(folder))
        rounds.append(done)
        died = "reaped" if done.died_s is None else f"{done.died_s:.2f}"
        found = f"{done.before or 'nothing'} / {done.after or 'nothing'} {done.torn}"
        print(f"{number + 1:4}  {done.delay_s:7.2f}  {done.finished:8}  {died:>9}  {found}", flush=True)
    by_themselves = [done.died_s for done in rounds if done.died_s is not None]
    summary = {
        **asdict(args),
        "rollouts_finished": sum(done.finished for done in rounds),
        "dead_in_s_median": round(statistics.median(by_themselves), 3) if by_themselves else None,
        "dead_in_s_max": round(max(by_themselves), 3) if by_themselves else None,
        "needed_the_reaper": args.kills - len(by_themselves),
        "left_before_reaper": dict(sum((Counter(done.before) for done in rounds), Counter[str]())),
        "left_after_reaper": dict(sum((Counter(done.after) for done in rounds), Counter[str]())),
        "torn_stores": [done.torn for done in rounds if done.torn],
    }
    print(json.dumps(summary))
    return 1 if summary["left_after_reaper"] or summary["torn_stores"] else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
