"""The harness adapter contract: how one agent product is installed, started headless and pointed at the proxy.

An adapter knows everything about its product (command line, configuration files, markers on the wire) and nothing
about tokens, trees or rewards. The runner gives it an open sandbox and a `HarnessContext`; it comes back when the
product has come to its own end. Time limits belong to the runner.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from clawgym_env.messages import ChatRequest, Dialect, Message
from clawgym_env.sandbox.base import Mount, Sandbox
from clawgym_env.tasks.task import McpServer as McpServer  # part of the contract
from clawgym_env.tasks.task import SolutionStep, Task
from clawgym_env.trace.calls import CallKind


@dataclass(frozen=True, slots=True)
class HarnessContext:
    """What the harness is told for one rollout."""

    instruction: str
    """What the user says in this turn."""
    base_url: str
    """`http://127.0.0.1:PORT/r/KEY`, without `/v1`: reachable from inside the sandbox only."""
    api_key: str
    """A dummy; the key in the URL is what counts."""
    model: str
    workdir: str
    context_length: int
    """Tokens of the policy's window, prompt and reply together."""
    max_tokens: int
    """Tokens of one reply."""
    wall_clock_s: float
    seed: int
    mcp_servers: tuple[McpServer, ...] = ()
    """Tool servers of the task, for an adapter with `supports_mcp` to configure."""
    session: int = 0
    """Counts the sessions of this sandbox; in each of them the harness remembers nothing of the others."""
    resume: bool = False
    """Go on with this session, which the last `run` left; only for an adapter with `supports_resume`."""
    resumable: bool = False
    """Some `run` of this sandbox is to go on with a session; the same for all of them."""


@dataclass(frozen=True, slots=True)
class HarnessExit:
    """How the harness ended. Exit codes are recorded, never trusted."""

    exit_code: int
    stdout: bytes
    stderr: bytes
    response: str
    """The answer the harness shows its user; empty when it shows none."""
    timed_out: bool = False


class BundledServer(Protocol):
    """An MCP server that comes with the project; a task names it as the program `clawgym:NAME`."""

    @property
    def argv(self) -> tuple[str, ...]:
        """The command inside a sandbox."""

    def install(self, cache: Path) -> None:
        """Put the server into `cache`. Idempotent."""

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Return what of `cache` the sandbox must show.

        Raises:
            HarnessNotInstalled: with the command to run.
        """


class HarnessAdapter(ABC):
    """Base of every adapter. Subclasses set the class fields and implement `run`."""

    name: str
    """As in `clawgym install NAME`."""
    version: str
    """Of the product; an adapter with a choice sets it per instance."""
    dialect: Dialect
    """What it speaks to the proxy; an adapter with a choice sets it per instance."""
    supports_mcp: ClassVar[bool] = False
    supports_resume: ClassVar[bool] = False
    """Whether a second `run` in the same sandbox can go on with the session of the first."""
    calls_model: ClassVar[bool] = True
    """False where a run without a single model call is no failure (oracle, noop)."""
    plays_solutions: ClassVar[bool] = False
    """Whether each rollout's adapter is made by `knowing`."""
    memory_mb: int = 2048
    """What the product needs at least; the sandbox gets the larger of this and the task's own limit."""

    def refusal(self, task: Task) -> str:
        """Return why this harness cannot do a task; empty where it can."""
        if any(not turn.new_session for turn in task.turns) and not self.supports_resume:
            return (
                f"Expected a harness that can go on with its session for task {task.id!r}, got {self.name!r}. "
                "Choose another harness, or tasks of one turn."
            )
        if task.mcp_servers and not self.supports_mcp:
            return (
                f"Expected a harness that speaks MCP for task {task.id!r}, got {self.name!r}. "
                "Choose another harness, or tasks without mcp_servers."
            )
        return ""

    def knowing(self, solution: Sequence[SolutionStep] | None) -> HarnessAdapter:
        """Return this harness for a task with that solution, where one is known.

        Raises:
            HarnessUnsuitable: it cannot do without.
        """
        return self

    def install(self, cache: Path) -> None:  # noqa: B027 (an adapter with nothing to install is fine)
        """Put the product into `cache` (may take minutes). Idempotent."""

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        """Return what of `cache` the sandbox must show.

        Raises:
            HarnessNotInstalled: with the command to run.
        """
        return ()

    @abstractmethod
    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        """Run the product on one instruction until it ends by itself."""

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        """Say what kind of call this is, or None to leave it to the generic rules of `trace.classify`."""
        return None

    def transient_suffix(self, messages: Sequence[Message]) -> int:
        """Return how many trailing messages of this request the next request will not contain."""
        return 0

    def rewrite(self, request: ChatRequest) -> ChatRequest:
        """Remove per-request nonces and clock stamps that no switch of the product turns off."""
        return request
