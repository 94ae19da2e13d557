"""An evaluation as text and files: a table for people, a row per rollout, and the JSON that holds it all.

Called by `run` at the end. Invariant: everything here is read off an `EvaluationResult`; nothing is counted anew.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from clawgym_env.evaluation.result import FULL_SCORE, EvaluationResult, Summary, TaskResult
from clawgym_env.evaluation.settings import REPORT_FILE, RESULTS_FILE, TABLE_FILE, write_file

NUM_WORST = 10
MAX_ERROR = 200
"""Characters of an error shown in a table."""

COLUMNS = (
    "task",
    "category",
    "harness",
    "attempt",
    "score",
    "strict_pass",
    "stop_reason",
    "calls",
    "prompt_tokens",
    "sampled_tokens",
    "judge_calls",
    "judge_tokens",
    "seconds",
    "components",
    "error",
    "rollout_id",
)
"""Of results.csv. `score` and `strict_pass` are empty where there is no grade; `components` is JSON."""


def write_results(result: EvaluationResult, folder: Path, *, command: str = "") -> None:
    """Write results.json, results.csv and report.md, each whole or not at all."""
    write_file(folder / RESULTS_FILE, result.model_dump_json(indent=2) + "\n")
    write_file(folder / TABLE_FILE, csv_text(result))
    write_file(folder / REPORT_FILE, report(result, command=command))


def csv_text(result: EvaluationResult) -> str:
    """Return the rollouts as CSV, a row each."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for task in result.tasks:
        for attempt, score in enumerate(task.scores):
            writer.writerow(
                (
                    task.id,
                    task.category,
                    task.harness,
                    attempt,
                    "" if score is None else score,
                    "" if score is None else int(score >= FULL_SCORE),
                    task.stop_reasons[attempt],
                    task.calls[attempt],
                    task.prompt_tokens[attempt],
                    task.sampled_tokens[attempt],
                    task.judge_calls[attempt],
                    task.judge_tokens[attempt],
                    f"{task.seconds[attempt]:.3f}",
                    json.dumps(dict(task.components[attempt])),
                    task.errors[attempt],
                    task.rollout_ids[attempt],
                )
            )
    return text.getvalue()


def overview(result: EvaluationResult) -> str:
    """Return the numbers in short, as Markdown: per harness, per category where there are several, stop reasons."""
    settings, ungraded = result.settings, result.ungraded
    lines = [
        f"**Pass@1 {_number(result.pass_at_1)}** (95 % interval {_interval(result.ci95)}), "
        f"strict pass {_number(result.strict_pass)}: {settings.num_tasks} tasks, "
        f"{settings.attempts} attempt{'s' * (settings.attempts > 1)} each, policy {settings.policy}"
    ]
    if ungraded.rollouts:
        if_excluded, if_zero = _number(ungraded.pass_at_1_if_excluded), _number(ungraded.pass_at_1_if_zero)
        counted = "count them as 0" if ungraded.counted_as == "zero" else "leave them out"
        lines.append(
            f"**{ungraded.rollouts} ROLLOUTS HAVE NO GRADE**, {ungraded.tasks} tasks have none at all. "
            f"Pass@1 is {if_excluded} without them, {if_zero} where they count as 0; the other numbers {counted}. "
            "The same command again tries those again that infrastructure made fail."
        )
    lines.append(_summaries("harness", result.by_harness))
    if len(result.by_category) > 1:
        lines.append(_summaries("category", result.by_category))
    reasons = result.by_stop_reason.items()
    rows = [(name, count.rollouts, count.graded, _number(count.mean_score)) for name, count in reasons]
    lines.append(_table(("stop reason", "rollouts", "graded", "mean score"), rows))
    return "\n\n".join(lines)


def report(result: EvaluationResult, *, command: str = "") -> str:
    """Return the whole report as Markdown: the overview, the worst tasks, what has no grade, the settings."""
    parts = ["# Evaluation", overview(result)]
    below = [task for task in result.tasks if task.graded_scores and _mean(task) < FULL_SCORE]
    if below:
        rows = map(_worst_row, sorted(below, key=_mean)[:NUM_WORST])
        parts += ["## Lowest scores", _table(("task", "harness", "score", "stop reasons", "calls", "error"), rows)]
    missing = [
        (task.id, task.harness, reason, _short(error))
        for task in result.tasks
        for score, reason, error in zip(task.scores, task.stop_reasons, task.errors, strict=True)
        if score is None
    ]
    if missing:
        parts += ["## Without a grade", _table(("task", "harness", "stop reason", "error"), missing)]
    settings = result.settings.model_dump(mode="json")
    parts += ["## Settings", _table(("setting", "value"), [(name, _plain(value)) for name, value in settings.items()])]
    if command:
        parts += ["## Command", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def _summaries(name: str, summaries: Mapping[str, Summary]) -> str:
    ks = sorted({k for summary in summaries.values() for k in summary.pass_at_k})
    head = [name, "Pass@1", "95 % interval", "strict pass", "tasks", "rollouts", "ungraded"]
    head += [column for k in ks for column in (f"pass@{k}", f"pass^{k}", f"best of {k}")]
    rows = []
    for label, one in summaries.items():
        row = [label, _number(one.pass_at_1), _interval(one.ci95), _number(one.strict_pass)]
        row += [str(count) for count in (one.tasks, one.rollouts, one.ungraded)]
        row += [_number(of_k.get(k)) for k in ks for of_k in (one.pass_at_k, one.all_of_k, one.best_of_k)]
        rows.append(row)
    return _table(head, rows)


def _worst_row(task: TaskResult) -> tuple[object, ...]:
    reasons = ", ".join(dict.fromkeys(task.stop_reasons))
    error = next(filter(None, task.errors), "")
    return task.id, task.harness, _number(_mean(task)), reasons, sum(task.calls), _short(error)


def _mean(task: TaskResult) -> float:
    return sum(task.graded_scores) / len(task.graded_scores)


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _short(error: str) -> str:
    """Return the end of an error, where a traceback says what went wrong."""
    text = " ".join(error.split())
    return text if len(text) <= MAX_ERROR else "…" + text[-MAX_ERROR:]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _interval(bounds: tuple[float, float] | None) -> str:
    return "–" if bounds is None else f"{bounds[0]:.4f}–{bounds[1]:.4f}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
