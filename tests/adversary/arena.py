"""Where attacks happen: an agent that is a shell script, run and graded by the real runner in real sandboxes.

The task asks for `answer.txt` to hold 42. No attack writes it, so any reward above 0 is a success of the attacker.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.grading import GraderLike, as_grader
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.pool import RolloutPool, RolloutRequest, ServedPolicy
from clawgym_env.rollout import Rollout
from clawgym_env.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from clawgym_env.tasks.task import Limits, Task, TaskFile

T = TypeVar("T")

SECRET = b"the hidden answer is 42\n"
CHECK = b"""
import csv, json, os, pathlib, re, subprocess
root = pathlib.Path(os.getcwd())
expected = re.search("[0-9]+", (root / "reward" / "expected.txt").read_text())[0]
answer = root / "answer.txt"
good = answer.is_file() and answer.read_text().strip() == expected
print(json.dumps({"answer": float(good)}))
print(float(good))
"""
SHELL_CHECK = b"""
want=$(grep -o '[0-9]*' reward/expected.txt)
got=$(cat answer.txt 2>/dev/null | tr -d ' \\n')
if [ "$want" = "$got" ]; then echo 1.0; else echo 0.0; fi
"""
LIMITS = Limits(wall_clock_s=60, grader_s=20)


def task(check: bytes = CHECK, *, name: str = "check.py", command: tuple[str, ...] = (), **changes: object) -> Task:
    """Return the task with a checker."""
    hidden = (TaskFile(path=f"reward/{name}", data=check), TaskFile(path="reward/expected.txt", data=SECRET))
    argv = command or ("python3" if name.endswith(".py") else "bash", f"reward/{name}")
    made = Task(id="t", instruction="", hidden_files=hidden, grading=CommandGrading(command=argv), limits=LIMITS)
    return made.model_copy(update=changes)


class ScriptAgent(HarnessAdapter):
    """An agent that is one bash script."""

    name = "script"
    version = "1"
    dialect: Dialect = "chat"
    calls_model = False

    def __init__(self, script: str) -> None:
        self._script = script

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        done = await sandbox.exec(["bash", "-c", self._script, "bash", context.base_url])
        return HarnessExit(done.exit_code, done.stdout, done.stderr, done.stdout.decode(errors="replace"))


def rollout(backend: SandboxBackend, script: str, task: Task, grader: GraderLike | None = None) -> Rollout:
    """Let an agent run a script, grade what it leaves, return the whole."""
    (found,) = rollouts(backend, [script], task, grader)
    return found


def rollouts(
    backend: SandboxBackend, agents: Sequence[str | HarnessAdapter], task: Task, grader: GraderLike | None = None
) -> list[Rollout]:
    """Let agents, scripts by default, run at the same time, each in a rollout of its own."""

    async def main() -> list[Rollout]:
        with tempfile.TemporaryDirectory() as cache:
            pool = RolloutPool(
                backend=backend, grader=as_grader(grader), cache=Path(cache), max_concurrency=len(agents)
            )
            served = ServedPolicy("policy", ScriptedEngine(["Hello."]))
            try:
                adapters = [ScriptAgent(agent) if isinstance(agent, str) else agent for agent in agents]
                return await pool.run(
                    [
                        RolloutRequest(task, adapter, served, group_id="g", index=index, seed=0)
                        for index, adapter in enumerate(adapters)
                    ]
                )
            finally:
                await pool.close()

    return asyncio.run(main())


def reward(backend: SandboxBackend, script: str, task: Task) -> float:
    """Return what an agent gets for a script; it must be graded, since getting out of a grade is a success too."""
    found = rollout(backend, script, task)
    assert found.grade is not None, found.error
    return found.grade.reward


def inside(backend: SandboxBackend, body: Callable[[Sandbox], Awaitable[T]], **spec: object) -> T:
    """Run a coroutine function in an open sandbox and return its result."""

    async def main() -> T:
        sandbox = await backend.open(SandboxSpec.model_validate(spec))
        try:
            return await body(sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(main())


ATTEMPT = """
import ctypes, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    got = libc.syscall(number, *arguments)
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got
def attempt():
{body}
try:
    print("got", repr(attempt()))
except OSError as error:
    print("refused")
"""


def attempts(backend: SandboxBackend, bodies: Mapping[str, str]) -> dict[str, str]:
    """Run bodies of Python functions as the agent, each in a process of its own of one sandbox.

    `call(number, …)` makes a system call. Returns by name: "refused" for an OSError, else what the function got.
    """

    async def main(sandbox: Sandbox) -> dict[str, str]:
        found = {}
        for name, body in bodies.items():
            indented = "\n".join(f"    {line}" for line in body.strip().splitlines())
            result = await sandbox.exec(["python3", "-c", ATTEMPT.format(body=indented)], timeout_s=30)
            found[name] = (result.stdout or result.stderr).decode().strip()
        return found

    return inside(backend, main)
