"""A task's MCP server for real: started in the sandbox by unmodified harnesses, its answer in their next prompt."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.errors import HarnessUnsuitable
from clawgym_env.grading.function import FunctionGrader
from clawgym_env.pool import RolloutPool
from clawgym_env.rollout import Rollout
from clawgym_env.runner import RolloutRequest, ServedPolicy
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks.task import McpServer, Task, TaskFile

TASK = Task(
    id="rent",
    instruction="How much is the rent? Search the documents.",
    files=(
        TaskFile(path="papers/contract.txt", data=b"Between the parties.\nThe rent is 943 euros a month.\n"),
        TaskFile(path="papers/menu.txt", data=b"Soup and bread.\n"),
    ),
    mcp_servers=(McpServer(name="papers", command=("clawgym:documents", "--folder", "papers")),),
)


def clerk(prompt: str, turn: int) -> str:
    """Search with whatever name the harness gives the tool, then repeat what was found."""
    if turn == 0:
        offered = re.search(r'"name":\s*"([^"]*search_documents)"', prompt)
        return tool_call(offered.group(1), query="rent in euros") if offered else "I have no documents."
    found = re.search(r"\[contract\.txt:1\]\s.*?rent is (\d+) euros", prompt, re.DOTALL)
    return f"It is {found.group(1)} euros." if found else "Nothing found."


def play(harness: str) -> Rollout:
    """Run the task once."""
    adapter = registry.adapter(harness)
    adapter.install(cache_dir())
    registry.bundled_server("documents").install(cache_dir())

    async def run() -> Rollout:
        pool = RolloutPool(
            backend=LocalBackend(),
            grader=FunctionGrader(lambda task, workspace: 1.0),
            cache=cache_dir(),
            max_concurrency=1,
        )
        served = ServedPolicy("clerk", ScriptedEngine(clerk, context_length=200_000))
        request = RolloutRequest(task=TASK, adapter=adapter, served=served, group_id="g", index=0, seed=0)
        try:
            return (await pool.run([request]))[0]
        finally:
            await pool.close()

    return asyncio.run(run())


@pytest.mark.harness
@pytest.mark.parametrize("harness", ["claude-code?bare", "codex"])
def test_a_harness_answers_with_what_the_server_found(harness: str) -> None:
    rollout = play(harness)
    assert rollout.response == "It is 943 euros.", (rollout.error, rollout.harness_output)
    assert rollout.tree.buckets()["trained"] == rollout.tree.num_completion_tokens
    assert len(rollout.tree.trajectories()) == 1


def test_a_harness_without_mcp_is_refused_before_anything_starts(tmp_path: Path) -> None:
    request = RolloutRequest(
        task=TASK,
        adapter=registry.adapter("mini"),
        served=None,
        group_id="g",
        index=0,
        seed=0,  # type: ignore[arg-type]
    )
    with pytest.raises(HarnessUnsuitable, match="speaks MCP for task 'rent', got 'mini'"):
        request.equipment(tmp_path)
