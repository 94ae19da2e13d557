"""Runs an evaluation, or goes on with one: every task through every harness, as often as asked.

Stands beside the environments on the same `RolloutService`; finished rollouts are in the folder's store before they
are counted. Invariant: a sampling seed depends on (seed, task, harness, attempt) alone, so that an interrupted
evaluation comes to what an uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from clawgym_env._version import __version__
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Engine, RelayingEngine, SamplingParams
from clawgym_env.envs.sampler import Draw, derived_seed
from clawgym_env.envs.service import DEFAULT_POLICY, DEFAULT_TASKS, HarnessLike, RolloutService, SandboxLike
from clawgym_env.evaluation.report import write_results
from clawgym_env.evaluation.result import (
    UNCATEGORISED,
    EvaluationResult,
    TaskResult,
    attempt_result,
    evaluation_result,
    joined,
)
from clawgym_env.evaluation.settings import EvaluationError, EvaluationSettings, claim, tasks_digest
from clawgym_env.grading.base import GraderLike
from clawgym_env.grading.judge import JudgeLike
from clawgym_env.harness import HarnessAdapter
from clawgym_env.pool import RolloutRequest
from clawgym_env.rollout import Rollout, failure_rule
from clawgym_env.tasks.loading import load_tasks
from clawgym_env.tasks.task import Limits, Task, TaskSet, TasksLike

if TYPE_CHECKING:
    from clawgym_env.policy import Policy


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an evaluation is."""

    done: int
    """Rollouts, those of an earlier run included."""
    total: int
    ungraded: int
    """Of those done."""
    mean: float | None
    """Score of the graded ones so far."""
    latest: Rollout | None
    """The one that just finished; None at the start."""


def evaluate(
    tasks: TasksLike = DEFAULT_TASKS,
    *,
    harness: HarnessLike = "mini",
    policy: str | Path | Policy | None = None,
    engine: str | Engine | None = None,
    sampling: SamplingParams | Mapping[str, float] | None = None,
    sandbox: SandboxLike = "local",
    grader: GraderLike | None = None,
    judge: JudgeLike | None = None,
    limits: Limits | Mapping[str, float] | None = None,
    attempts: int = 1,
    limit: int | None = None,
    max_concurrency: int = 1,
    seed: int = 0,
    ungraded_as_zero: bool = False,
    out: str | Path | None = None,
    fresh: bool = False,
    command: str = "",
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> EvaluationResult:
    """Run every task through every harness and return what it came to. Keywords as in `gym.make`, and:

    Args:
        harness: one, or several to compare.
        limits: those to set for all tasks; of a mapping only the named ones, the others stay the task's own.
        attempts: rollouts of each task with each harness.
        limit: how many tasks, from the first on; all by default.
        seed: of the sampling and of the bootstrap.
        ungraded_as_zero: count a rollout that has no grade as a score of 0 instead of leaving it out.
        out: folder for results.json, results.csv, report.md and every rollout. A second call with the same settings
            goes on where the first was stopped or killed, and tries again what infrastructure made fail.
        fresh: discard the evaluation found in `out`.
        command: the command line, for the report.
        on_progress: called at the start and after every rollout.

    Raises:
        EvaluationError: `out` holds something else or other settings, or a harness is named twice.
        HarnessNotInstalled, HarnessUnsuitable, JudgeMissing, PolicyNotBuilt: before anything was started.
    """
    if attempts < 1 or (limit is not None and limit < 1):
        raise EvaluationError(f"Expected attempts and limit of at least 1, got attempts={attempts}, limit={limit}.")
    found = load_tasks(tasks)
    service = RolloutService(
        tasks=found[:limit],
        harness=harness,
        policy=policy,
        engine=engine,
        sampling=sampling,
        sandbox=sandbox,
        grader=grader,
        judge=judge,
        run_dir=out,
        max_concurrency=max_concurrency,
    )
    chosen = list(service.tasks)
    changes = limits.model_dump() if isinstance(limits, Limits) else dict(limits or {})
    labels = _labels(harness, service.harnesses)
    settings = EvaluationSettings(
        tasks=_tasks_label(tasks, found),
        num_tasks=len(chosen),
        tasks_digest=tasks_digest(chosen),
        harnesses=labels,
        harness_versions=tuple(adapter.version for adapter in service.harnesses),
        policy=_policy_label(policy, engine),
        sampling=SamplingParams.model_validate(sampling or {}),
        sandbox=sandbox if isinstance(sandbox, str) else sandbox.name,
        grader="task" if grader is None else _qualified_name(grader),
        judge=_judge_label(judge),
        limits=changes,
        attempts=attempts,
        seed=seed,
        clawgym_version=__version__,
    )
    plan = _Plan([task.with_limits(changes) for task in chosen], labels, attempts, seed)
    with closing(service):
        if out is not None:
            with claim(Path(out), settings, fresh=fresh) as store:
                for rollout in store.rollouts():
                    if not _worth_another_try(rollout):
                        plan.note(rollout)
        on_progress(plan.progress())
        requests = plan.missing(service)
        for rollout in service.as_completed(requests) if requests else ():
            plan.note(rollout)
            on_progress(plan.progress(rollout))
    result = evaluation_result(plan.results(), settings, ungraded_as_zero=ungraded_as_zero)
    if out is not None:
        write_results(result, Path(out), command=command)
    return result


class _Plan:
    """Which rollouts there have to be, and what those finished came to."""

    def __init__(self, tasks: Sequence[Task], harnesses: Sequence[str], attempts: int, seed: int) -> None:
        self._seed = seed
        self._attempts = attempts
        self._groups = {
            f"{index:02d}-{position:06d}": (task, index, harness)
            for index, harness in enumerate(harnesses)
            for position, task in enumerate(tasks)
        }
        """A task and a harness, by the group id of their rollouts."""
        self._finished: dict[tuple[str, int], TaskResult] = {}
        """By group id and attempt."""

    def note(self, rollout: Rollout) -> None:
        """Remember what a finished rollout came to."""
        task, _, harness = self._groups[rollout.group_id]
        category = str(task.metadata.get("category") or UNCATEGORISED)
        result = attempt_result(rollout, category=category, harness=harness)
        self._finished[rollout.group_id, rollout.index] = result

    def missing(self, service: RolloutService) -> list[RolloutRequest]:
        """Return what is left to run: the first attempts at all tasks before the second ones, harnesses in turn.

        Raises:
            HarnessNotInstalled, HarnessUnsuitable, JudgeMissing, PolicyNotBuilt: for the first that cannot be run.
        """
        task_by_task = sorted(self._groups, key=lambda group_id: group_id.partition("-")[2])
        requests = []
        for attempt in range(self._attempts):
            for group_id in task_by_task:
                if (group_id, attempt) not in self._finished:
                    task, index, harness = self._groups[group_id]
                    draw = Draw(task, index, group_id, derived_seed(self._seed, task.id, harness))
                    requests.append(service.request(draw, index=attempt))
                    requests[-1].equipment(cache_dir())
        return requests

    def progress(self, latest: Rollout | None = None) -> Progress:
        scores = [score for result in self._finished.values() for score in result.graded_scores]
        return Progress(
            done=len(self._finished),
            total=len(self._groups) * self._attempts,
            ungraded=len(self._finished) - len(scores),
            mean=fmean(scores) if scores else None,
            latest=latest,
        )

    def results(self) -> list[TaskResult]:
        """Return what every task came to with every harness."""
        attempts = range(self._attempts)
        return [joined([self._finished[group_id, attempt] for attempt in attempts]) for group_id in self._groups]


def _worth_another_try(rollout: Rollout) -> bool:
    """Whether infrastructure left it without a grade; a first prompt too long for the policy stays too long."""
    return not rollout.graded and failure_rule(rollout.stop_reason, policy_asked=False).retries > 0


def _labels(harness: HarnessLike, adapters: Sequence[HarnessAdapter]) -> tuple[str, ...]:
    """Return what to call each harness, unique: as the user named it, or its own name."""
    given = [harness] if isinstance(harness, str | HarnessAdapter) else harness
    labels = tuple(one if isinstance(one, str) else adapter.name for one, adapter in zip(given, adapters, strict=True))
    if len(set(labels)) < len(labels):
        raise EvaluationError(f"Expected harnesses with different names, got {', '.join(labels)}.")
    return labels


def _tasks_label(tasks: TasksLike, found: Sequence[Task]) -> str:
    if isinstance(tasks, str | Path):
        return str(tasks)
    return found.name if isinstance(found, TaskSet) else "tasks"


def _policy_label(policy: str | Path | Policy | None, engine: str | Engine | None) -> str:
    if engine is not None:
        if isinstance(engine, str):
            return engine
        if isinstance(engine, RelayingEngine):
            return engine.name
        return f"{_qualified_name(engine)}, version {engine.policy_version}"
    if policy is None or isinstance(policy, str | Path):
        return str(policy or DEFAULT_POLICY)
    return f"{policy.name}, window {policy.context_length}, renderer {policy.renderer_kind}, version {policy.version}"


def _judge_label(judge: JudgeLike | None) -> str:
    if judge is None or isinstance(judge, str):
        return judge or ""
    return f"{judge.url}#{judge.model}"


def _qualified_name(value: object) -> str:
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{getattr(named, '__qualname__', '')}"
