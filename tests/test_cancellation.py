"""A cancellation must arrive: one that is lost leaves a rollout that never ends."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest
from test_runner import run

from clawgym_env.harness import HarnessContext
from clawgym_env.rollout import StopReason
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks import Limits
from clawgym_env.testing import Ask

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in ("clawgym_env", "harness_adapters") for path in (ROOT / package).rglob("*.py"))


def test_a_harness_that_swallows_a_cancellation_is_ended_all_the_same() -> None:
    async def stubborn(ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        await ask("hello")
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            await asyncio.sleep(3600)
        return ""

    assert run(stubborn, limits=Limits(wall_clock_s=0.3)).stop_reason is StopReason.WALL_CLOCK


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_uses_wait_for_which_loses_cancellations_on_python_3_11(source: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    assert "asyncio.wait_for" not in {ast.unparse(call.func) for call in calls}
