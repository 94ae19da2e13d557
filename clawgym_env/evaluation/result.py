"""What an evaluation came to: the schema of `results.json`, and how scores become its numbers.

Made by `run`, shown by `report`. Invariant: a rollout without a grade never counts in silence. It is left out of the
mean or counted as zero, as asked, and both numbers are in `ungraded`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Literal

from pydantic import BaseModel, ConfigDict

from clawgym_env.evaluation.settings import EvaluationSettings
from clawgym_env.evaluation.statistics import attempt_counts, bootstrap_interval, expected_best
from clawgym_env.grading.base import JudgeUsage
from clawgym_env.rollout import Rollout

FULL_SCORE = 1.0 - 1e-9
"""From here on a score counts as 1: weighted sums of full marks may miss it by rounding."""
UNCATEGORISED = "uncategorised"


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskResult(_Frozen):
    """One task through one harness. The tuples hold one item per attempt, in order."""

    id: str
    category: str
    harness: str
    scores: tuple[float | None, ...]
    """In [0, 1]; None where there is no grade."""
    stop_reasons: tuple[str, ...]
    components: tuple[Mapping[str, float], ...]
    """What each score is made of."""
    calls: tuple[int, ...]
    """Model calls."""
    prompt_tokens: tuple[int, ...]
    """Shared ones counted once; of an API model as the API counted them, whole prompts."""
    sampled_tokens: tuple[int, ...]
    judge_calls: tuple[int, ...]
    """Answered requests to the judge, those answered before left out."""
    judge_tokens: tuple[int, ...]
    """Prompts and replies of those requests."""
    seconds: tuple[float, ...]
    """From opening the sandbox to the grade."""
    errors: tuple[str, ...]
    """Why there is no grade, or the harness's failure; mostly empty."""
    rollout_ids: tuple[str, ...]
    """In the store beside the results, where the calls are."""

    @property
    def graded_scores(self) -> list[float]:
        return [score for score in self.scores if score is not None]


class Summary(_Frozen):
    """What a set of tasks came to. Numbers are None where nothing was graded."""

    pass_at_1: float | None
    """Mean score: over the attempts at a task, then over tasks."""
    strict_pass: float | None
    """The same over full scores alone: how often a task is wholly solved."""
    ci95: tuple[float, float] | None
    """Of `pass_at_1`: bootstrap over tasks, percentiles of 10,000 resamples."""
    tasks: int
    rollouts: int
    ungraded: int
    """Rollouts without a grade."""
    pass_at_k: Mapping[int, float]
    """Chance that one of k attempts is wholly right; unbiased. Empty with a single attempt, as the next two."""
    all_of_k: Mapping[int, float]
    """Chance that all of k attempts are wholly right (pass^k); unbiased."""
    best_of_k: Mapping[int, float]
    """Expected best score of k attempts; unbiased."""


class StopCount(_Frozen):
    """The rollouts that ended for one reason."""

    rollouts: int
    graded: int
    mean_score: float | None
    """Of the graded ones."""


class Ungraded(_Frozen):
    """The rollouts without a grade, and what they would change."""

    rollouts: int
    tasks: int
    """Pairs of task and harness without any grade."""
    counted_as: Literal["excluded", "zero"]
    """How they count in all other numbers."""
    pass_at_1_if_excluded: float | None
    pass_at_1_if_zero: float | None


class EvaluationResult(_Frozen):
    """The content of `results.json`; `model_validate_json` reads it back."""

    pass_at_1: float | None
    """As in `Summary`, over all harnesses."""
    strict_pass: float | None
    ci95: tuple[float, float] | None
    by_category: Mapping[str, Summary]
    by_harness: Mapping[str, Summary]
    by_stop_reason: Mapping[str, StopCount]
    ungraded: Ungraded
    tasks: tuple[TaskResult, ...]
    """By harness, then in the order of the tasks."""
    settings: EvaluationSettings

    @property
    def complete(self) -> bool:
        """Whether every task has a grade with every harness."""
        return self.ungraded.tasks == 0


def attempt_result(rollout: Rollout, *, category: str, harness: str) -> TaskResult:
    """Return what one rollout came to: a result of a single attempt, small enough to keep thousands of.

    Args:
        harness: with its options.
    """
    grade, tree = rollout.grade, rollout.tree
    usage = JudgeUsage() if grade is None else grade.judge_usage
    components = {} if grade is None else {_writable(name): value for name, value in grade.components.items()}
    return TaskResult(
        id=_writable(rollout.task_id),
        category=_writable(category),
        harness=harness,
        scores=(None if grade is None else grade.reward,),
        stop_reasons=(rollout.stop_reason.value,),
        components=(components,),
        calls=(len(tree),),
        prompt_tokens=(tree.usage.prompt_tokens,),
        sampled_tokens=(tree.usage.completion_tokens,),
        judge_calls=(usage.calls,),
        judge_tokens=(usage.prompt_tokens + usage.completion_tokens,),
        seconds=(rollout.timing.get("total", 0.0),),
        errors=(_writable(rollout.error),),
        rollout_ids=(rollout.id,),
    )


def joined(attempts: Sequence[TaskResult]) -> TaskResult:
    """Return several results of one task with one harness as one, attempt after attempt."""
    per_attempt = set(TaskResult.model_fields) - {"id", "category", "harness"}
    return attempts[0].model_copy(
        update={name: tuple(chain.from_iterable(getattr(one, name) for one in attempts)) for name in per_attempt}
    )


def evaluation_result(
    tasks: Sequence[TaskResult], settings: EvaluationSettings, *, ungraded_as_zero: bool
) -> EvaluationResult:
    """Turn scores into the numbers of an evaluation.

    Args:
        ungraded_as_zero: count a rollout without a grade as a score of 0 instead of leaving it out.
    """

    def summary(chosen: Sequence[TaskResult], as_zero: bool = ungraded_as_zero) -> Summary:
        return _summary(chosen, as_zero=as_zero, attempts=settings.attempts, seed=settings.seed)

    overall = summary(tasks)
    return EvaluationResult(
        pass_at_1=overall.pass_at_1,
        strict_pass=overall.strict_pass,
        ci95=overall.ci95,
        by_category={name: summary(chosen) for name, chosen in sorted(_grouped(tasks, lambda t: t.category).items())},
        by_harness={name: summary(chosen) for name, chosen in _grouped(tasks, lambda t: t.harness).items()},
        by_stop_reason=_by_stop_reason(tasks),
        ungraded=Ungraded(
            rollouts=overall.ungraded,
            tasks=sum(not task.graded_scores for task in tasks),
            counted_as="zero" if ungraded_as_zero else "excluded",
            pass_at_1_if_excluded=summary(tasks, False).pass_at_1,
            pass_at_1_if_zero=summary(tasks, True).pass_at_1,
        ),
        tasks=tuple(tasks),
        settings=settings,
    )


def _writable(text: str) -> str:
    """Return text as UTF-8 can hold it: JSON may smuggle lone surrogates into tasks and graders' replies."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _summary(results: Sequence[TaskResult], *, as_zero: bool, attempts: int, seed: int) -> Summary:
    # A task is one unit however many harnesses worked on it: its difficulty is shared by them.
    scores = [
        kept
        for same_task in _grouped(results, lambda result: result.id).values()
        if (kept := [counted for result in same_task if (counted := _counted(result, as_zero))])
    ]
    strict = [[[float(score >= FULL_SCORE) for score in cell] for cell in task] for task in scores]
    means = [fmean(map(fmean, task)) for task in scores]
    ks = attempt_counts(attempts)
    failed = [[[1.0 - score for score in cell] for cell in task] for task in strict]
    return Summary(
        pass_at_1=fmean(means) if means else None,
        strict_pass=fmean(fmean(map(fmean, task)) for task in strict) if strict else None,
        ci95=bootstrap_interval(means, seed=seed) if means else None,
        tasks=len({result.id for result in results}),
        rollouts=sum(len(result.scores) for result in results),
        ungraded=sum(score is None for result in results for score in result.scores),
        pass_at_k=_of_k(strict, ks),
        all_of_k={k: 1.0 - value for k, value in _of_k(failed, ks).items()},
        best_of_k=_of_k(scores, ks),
    )


def _counted(result: TaskResult, as_zero: bool) -> list[float]:
    return [score or 0.0 for score in result.scores] if as_zero else result.graded_scores


def _of_k(tasks: Sequence[Sequence[Sequence[float]]], ks: Sequence[int]) -> dict[int, float]:
    """Return the mean over tasks of the expected best of k attempts; tasks with fewer graded ones are left out."""
    found = {}
    for k in ks:
        enough = [cells for task in tasks if (cells := [cell for cell in task if len(cell) >= k])]
        if enough:
            found[k] = fmean(fmean(expected_best(cell, k) for cell in cells) for cells in enough)
    return found


def _by_stop_reason(tasks: Sequence[TaskResult]) -> dict[str, StopCount]:
    found: dict[str, list[float | None]] = {}
    for task in tasks:
        for reason, score in zip(task.stop_reasons, task.scores, strict=True):
            found.setdefault(reason, []).append(score)
    counts = {}
    for reason, scores in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        graded = [score for score in scores if score is not None]
        counts[reason] = StopCount(
            rollouts=len(scores), graded=len(graded), mean_score=fmean(graded) if graded else None
        )
    return counts


def _grouped(tasks: Sequence[TaskResult], key: Callable[[TaskResult], str]) -> dict[str, list[TaskResult]]:
    groups: dict[str, list[TaskResult]] = {}
    for task in tasks:
        groups.setdefault(key(task), []).append(task)
    return groups
