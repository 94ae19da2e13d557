"""Fakes at the two outer borders of a rollout, for tests of everything in between, ours and yours; checks of contracts.

`FakeBackend` opens sandboxes that are temporary folders, `InProcessHarness` is an agent that is one coroutine; proxy,
runner, pool, tree and store between them are the real ones. Nothing here isolates anything: trusted code only.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import httpx

from clawgym_env.contracts import check_backend, check_engine
from clawgym_env.errors import SandboxError
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.sandbox.fake import FakeBackend, FakeSandbox

__all__ = [
    "ANSWER_FILE",
    "Act",
    "Ask",
    "FakeBackend",
    "FakeSandbox",
    "InProcessHarness",
    "answer_once",
    "chat_url",
    "check_backend",
    "check_engine",
    "descendants",
    "is_running",
]

ANSWER_FILE = "answer.txt"
HISTORY = "/root/.in-process.json"
"""What was said in the latest session."""

Ask: TypeAlias = Callable[[str], Awaitable[str]]
"""Says something to the model as the user and returns the reply's text; the conversation is kept."""
Act: TypeAlias = Callable[[Ask, Sandbox, HarnessContext], Awaitable[str]]
"""What the agent does; it returns the answer shown to the user."""


async def answer_once(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
    """Pass the instruction on and keep the reply in `answer.txt`."""
    answer = await ask(context.instruction)
    await sandbox.write_file(f"{context.workdir}/{ANSWER_FILE}", answer.encode())
    return answer


class InProcessHarness(HarnessAdapter):
    """A harness without a process: `act` talks to the proxy over a real socket from the event loop."""

    name = "in-process"
    version = "1"
    dialect: Dialect = "chat"
    supports_resume = True

    def __init__(self, act: Act = answer_once) -> None:
        self._act = act

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        """Run `act`; needs a `FakeSandbox`, whose port is reachable from this process."""
        url = chat_url(sandbox, context)
        history: list[dict[str, str]] = json.loads(await sandbox.read_file(HISTORY)) if context.resume else []
        async with httpx.AsyncClient(timeout=context.wall_clock_s, trust_env=False, verify=False) as client:

            async def ask(text: str) -> str:
                history.append({"role": "user", "content": text})
                body = {"model": context.model, "messages": history, "max_tokens": context.max_tokens}
                response = await client.post(url, json=body)
                response.raise_for_status()
                reply = str(response.json()["choices"][0]["message"]["content"] or "")
                history.append({"role": "assistant", "content": reply})
                return reply

            answer = await self._act(ask, sandbox, context)
        await sandbox.write_file(HISTORY, json.dumps(history).encode())
        return HarnessExit(0, answer.encode(), b"", answer)


def chat_url(sandbox: Sandbox, context: HarnessContext) -> str:
    """Return where a rollout in a fake sandbox has its chat completions, seen from this process.

    Raises:
        SandboxError: the sandbox is no `FakeSandbox`, whose port alone is reachable from here.
    """
    if not isinstance(sandbox, FakeSandbox):
        raise SandboxError(f"Expected a FakeSandbox, got {type(sandbox).__name__}. Pass sandbox=FakeBackend().")
    key = context.base_url.rpartition("/")[2]
    return f"http://127.0.0.1:{sandbox.port}/r/{key}/v1/chat/completions"


def is_running(pid: int) -> bool:
    """Whether a process lives; one that only waits for a lazy parent to collect it does not."""
    status = _status(pid)
    return status is not None and status[0] not in "ZX"


def descendants(pid: int) -> set[int]:
    """Return the ids of a process's living children, their children and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))) is not None:
            children.setdefault(status[1], []).append(int(entry.name))
    found: set[int] = set()
    todo = [pid]
    while todo:
        fresh = children.get(todo.pop(), [])
        found.update(fresh)
        todo += fresh
    return {one for one in found if is_running(one)}


def _status(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and its parent, None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields[0], int(fields[1])
