"""Whether tasks are sound when they are run: doing nothing earns next to nothing, the known solution everything.

Behind `clawgym tasks check --run`. The harnesses `noop` and `oracle` run in real sandboxes through the same runner as a
policy's, graders included. Invariant: what cannot be proven here is returned as skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from clawgym_env import registry
from clawgym_env.grading.specs import HybridGrading, RubricGrading
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.tasks.task import Task, TaskSet

if TYPE_CHECKING:
    from clawgym_env.runner import RolloutRequest, ServedPolicy

Player: TypeAlias = Literal["noop", "oracle"]


@dataclass(frozen=True, slots=True)
class Proof:
    """What one task gave one of the two players."""

    task_id: str
    player: Player
    score: float | None
    """None where it was not graded."""
    error: str = ""
    """Why not, or what went wrong on the way."""
    skipped: bool = False
    """It could not be tried here, which is nobody's fault."""


def prove(
    tasks: TaskSet,
    *,
    sandbox: str | SandboxBackend = "local",
    jobs: int = 2,
    on_proof: Callable[[Proof], None] = lambda proof: None,
) -> Sequence[Proof]:
    """Play every task idly and, where a solution is known, perfectly.

    A task with a checker and a rubric is judged by its checker alone; one with a rubric alone is skipped, and so is one
    with an image where the backend has none. MCP servers are left out: neither player uses them.

    Args:
        jobs: sandboxes at once.
        on_proof: told of each as it is there.

    Returns:
        One `Proof` per task and player, in no order.
    """
    from clawgym_env.engine.scripted import ScriptedEngine
    from clawgym_env.envs.service import RolloutService
    from clawgym_env.runner import ServedPolicy

    proofs: list[Proof] = []

    def done(proof: Proof) -> None:
        proofs.append(proof)
        on_proof(proof)

    backend = registry.backend(sandbox)
    silent = ServedPolicy("silent", ScriptedEngine([""]))
    with closing(
        RolloutService(tasks=tasks, harness="noop", policies=[silent], sandbox=backend, max_concurrency=jobs)
    ) as service:
        for rollout in service.as_completed(_requests(tasks, backend, silent, done)):
            done(_proof(rollout))
    return proofs


def num_proofs(tasks: TaskSet) -> int:
    """Return how many proofs `prove` gives."""
    return sum(1 if tasks.solution(task) is None else 2 for task in tasks)


def _proof(rollout: Rollout) -> Proof:
    player: Player = "oracle" if rollout.harness == "oracle" else "noop"
    completed = rollout.stop_reason is StopReason.COMPLETED
    error = "" if completed else f"{rollout.stop_reason}: {rollout.error} {rollout.harness_output}".rstrip()
    # A workspace is graded after a failed command too; but doing nothing cannot fail, so its score would say nothing.
    scored = rollout.graded and (completed or player == "oracle")
    return Proof(rollout.task_id, player, rollout.reward if scored else None, error)


def _requests(
    tasks: TaskSet, backend: SandboxBackend, silent: ServedPolicy, skip: Callable[[Proof], None]
) -> Iterator[RolloutRequest]:
    from clawgym_env.runner import RolloutRequest

    for task in tasks:
        solution = tasks.solution(task)
        players: Sequence[Player] = ("noop",) if solution is None else ("noop", "oracle")
        why_not = _unprovable(task, backend)
        for player in players:
            if why_not:
                skip(Proof(task.id, player, None, why_not, skipped=True))
                continue
            yield RolloutRequest(
                task=_by_code_alone(task),
                adapter=registry.adapter(player).knowing(solution),
                served=silent,
                group_id=f"{player}/{task.id}",
                index=0,
                seed=0,
            )


def _unprovable(task: Task, backend: SandboxBackend) -> str:
    if isinstance(task.grading, RubricGrading):
        return "only a judge can grade it"
    if task.image is not None and not backend.capabilities.images:
        return f"it needs an image, and the sandbox {backend.name!r} has none: --sandbox docker"
    return ""


def _by_code_alone(task: Task) -> Task:
    grading = task.grading.automated if isinstance(task.grading, HybridGrading) else task.grading
    return task.model_copy(update={"grading": grading, "mcp_servers": ()})
