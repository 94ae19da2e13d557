"""The harness that does nothing: what a task gives for an untouched workspace.

With `oracle` it proves a task sound: nothing should earn next to nothing.
"""

from __future__ import annotations

from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.sandbox.base import Sandbox


class NoopHarness(HarnessAdapter):
    """Ends at once, without a model call."""

    name = "noop"
    version = "1.0"
    dialect: Dialect = "chat"
    supports_resume = True
    calls_model = False
    memory_mb = 64

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        return HarnessExit(0, b"", b"", "")
