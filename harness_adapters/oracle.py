"""The harness that knows the solution: plays a task's known steps instead of asking a model.

Solutions travel out of band, for what the sandbox or the task holds a policy might see: the user gives a function from
the instruction to the steps, or names the harness ("oracle") and takes tasks of a set that knows its solutions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Protocol

from clawgym_env.errors import HarnessError, HarnessUnsuitable
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.sandbox.base import Sandbox


class Step(Protocol):
    """One step; `clawgym_env.tasks.SolutionStep` is one."""

    @property
    def tool(self) -> str:
        """ "write" (path, content), "bash" (command), "copy_in" (source, path), "answer" (text), or "read", which
        changes nothing and is skipped. A path is relative to the workspace or absolute."""

    @property
    def arguments(self) -> Mapping[str, str]: ...


class OracleHarness(HarnessAdapter):
    """Plays known steps; no model call."""

    name = "oracle"
    version = "1.0"
    dialect: Dialect = "chat"
    supports_resume = True
    calls_model = False
    plays_solutions = True
    memory_mb = 256

    def __init__(self, *, steps: Callable[[str], Sequence[Step]] | None = None) -> None:
        """Make the harness from a function that turns an instruction into steps; without, tasks must bring theirs."""
        self._steps = steps

    def knowing(self, solution: Sequence[Step] | None) -> OracleHarness:
        """Return the harness that plays a task's own solution, unless this one has steps from elsewhere.

        Raises:
            HarnessUnsuitable: neither is known.
        """
        if self._steps is not None:
            return self
        if solution is None:
            raise HarnessUnsuitable(
                "Expected tasks with known solutions for the harness 'oracle', got one without. Take 'bundled', or a "
                "format that has them (harbor), or pass harness=OracleHarness(steps=…)."
            )
        return OracleHarness(steps=lambda instruction: solution)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        """Play the steps when the task is told; the first command that fails ends the run with its exit code.

        Whatever the user says after that adds no step.

        Raises:
            HarnessError: no steps for this instruction, or a step that is none.
        """
        if context.resume or context.session:
            return HarnessExit(0, b"", b"", "")
        try:
            if self._steps is None:
                raise LookupError(context.instruction)
            steps = self._steps(context.instruction)
        except LookupError as error:
            raise HarnessError(f"Expected an oracle for {context.instruction[:80]!r}, got none.") from error
        output, response = b"", ""
        for step in steps:
            place = str(PurePosixPath(context.workdir) / step.arguments.get("path", ""))
            if step.tool == "write":
                await sandbox.write_file(place, step.arguments["content"].encode())
            elif step.tool == "copy_in":
                await sandbox.copy_in(Path(step.arguments["source"]), place)
            elif step.tool == "answer":
                response = step.arguments["text"]
            elif step.tool == "bash":
                done = await sandbox.exec(["bash", "-c", step.arguments["command"]], cwd=context.workdir)
                output += done.stdout + done.stderr
                if done.exit_code != 0:
                    return HarnessExit(done.exit_code, output, b"", "", done.timed_out)
            elif step.tool != "read":
                raise HarnessError(f"Expected a step to write, read, bash, copy_in or answer, got {step.tool!r}.")
        return HarnessExit(0, output, b"", response)
