"""The harness that knows the solution: plays a task's known steps instead of asking a model.

Solutions travel out of band, for what the sandbox or the task holds a policy might see: the user gives a function from
the instruction to the steps. For bundled tasks::

    known = {instance.task.instruction: instance.oracle for instance in instances}
    OracleHarness(steps=known.__getitem__)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from clawgym_env.errors import HarnessError
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.sandbox.base import Sandbox


class Step(Protocol):
    """One call of a mini tool; `clawgym_env.tasks.bundled.OracleStep` is one."""

    @property
    def tool(self) -> str:
        """ "write" (path, content), "bash" (command) or "read", which changes nothing and is skipped."""

    @property
    def arguments(self) -> Mapping[str, str]: ...


class OracleHarness(HarnessAdapter):
    """Plays known steps; no model call."""

    name = "oracle"
    version = "1.0"
    dialect: Dialect = "chat"
    calls_model = False
    memory_mb = 256

    def __init__(self, *, steps: Callable[[str], Sequence[Step]] | None = None) -> None:
        """Make the harness from a function that turns an instruction into steps."""
        if steps is None:
            raise HarnessError("Expected OracleHarness(steps=…), a function from a task's instruction to its steps.")
        self._steps = steps

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        """Play the steps; the first command that fails ends the run with its exit code.

        Raises:
            HarnessError: no steps for this instruction, or a step that is none.
        """
        try:
            steps = self._steps(context.instruction)
        except LookupError as error:
            raise HarnessError(f"Expected an oracle for {context.instruction[:80]!r}, got none.") from error
        output = b""
        for step in steps:
            if step.tool == "write":
                path = f"{context.workdir}/{step.arguments['path']}"
                await sandbox.write_file(path, step.arguments["content"].encode())
            elif step.tool == "bash":
                done = await sandbox.exec(["bash", "-c", step.arguments["command"]], cwd=context.workdir)
                output += done.stdout + done.stderr
                if done.exit_code != 0:
                    return HarnessExit(done.exit_code, output, b"", "", done.timed_out)
            elif step.tool != "read":
                raise HarnessError(f"Expected an oracle step to write, bash or read, got {step.tool!r}.")
        return HarnessExit(0, output, b"", "")
