from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

import pytest

from clawgym_env.engine.base import SamplingParams
from clawgym_env.evaluation import EvaluationResult, EvaluationSettings, TaskResult
from clawgym_env.evaluation.report import COLUMNS, csv_text, overview, report
from clawgym_env.evaluation.result import evaluation_result

PROMISED = {"pass_at_1", "strict_pass", "ci95", "by_category", "by_stop_reason", "tasks"}


def task(name: str, *scores: float | None, category: str = "a", harness: str = "mini") -> TaskResult:
    n = len(scores)
    return TaskResult(
        id=name,
        category=category,
        harness=harness,
        scores=scores,
        stop_reasons=tuple("sandbox_error" if score is None else "completed" for score in scores),
        components=tuple({} if score is None else {"part": score} for score in scores),
        calls=(3,) * n,
        prompt_tokens=(100,) * n,
        sampled_tokens=(20,) * n,
        judge_calls=(0,) * n,
        judge_tokens=(0,) * n,
        seconds=(1.5,) * n,
        errors=tuple("no | room\nleft" if score is None else "" for score in scores),
        rollout_ids=tuple(f"{harness}/{name}/{index}" for index in range(n)),
    )


def result(*tasks: TaskResult, ungraded_as_zero: bool = False) -> EvaluationResult:
    settings = EvaluationSettings(
        tasks="folder",
        num_tasks=len({one.id for one in tasks}),
        tasks_digest="0",
        harnesses=tuple(dict.fromkeys(one.harness for one in tasks)),
        harness_versions=("1",),
        policy="tiny",
        sampling=SamplingParams(),
        sandbox="local",
        grader="task",
        judge="",
        limits={},
        attempts=len(tasks[0].scores),
        seed=0,
        clawgym_version="0",
    )
    return evaluation_result(tasks, settings, ungraded_as_zero=ungraded_as_zero)


def cells(markdown: str, first: str) -> list[str]:
    """Return the cells of the first table row that begins with `first`."""
    row = next(line for line in markdown.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split(" | ")]


def rows(text: str) -> Sequence[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_json_has_the_promised_keys_and_reads_back() -> None:
    made = result(task("x", 1.0), task("y", 0.5))
    text = made.model_dump_json()
    assert set(json.loads(text)) >= PROMISED
    assert EvaluationResult.model_validate_json(text) == made


def test_pass_at_1_is_the_mean_over_attempts_then_tasks() -> None:
    made = result(task("x", 1.0, 0.0), task("y", 0.5, 0.5), task("z", 1.0, None))
    assert made.pass_at_1 == pytest.approx((0.5 + 0.5 + 1.0) / 3)
    assert made.strict_pass == pytest.approx((0.5 + 0.0 + 1.0) / 3)
    assert made.ci95 is not None
    assert made.ci95[0] <= made.pass_at_1 <= made.ci95[1]


def test_a_sum_of_weights_that_misses_one_by_rounding_is_a_full_score() -> None:
    assert result(task("x", sum([0.1] * 10))).strict_pass == 1.0
    assert result(task("x", 0.999)).strict_pass == 0.0


def test_what_has_no_grade_is_left_out_and_counted_loudly() -> None:
    made = result(task("x", 1.0), task("y", None), task("z", 0.5))
    assert made.pass_at_1 == pytest.approx(0.75)
    assert not made.complete
    assert (made.ungraded.rollouts, made.ungraded.tasks, made.ungraded.counted_as) == (1, 1, "excluded")
    assert made.ungraded.pass_at_1_if_excluded == pytest.approx(0.75)
    assert made.ungraded.pass_at_1_if_zero == pytest.approx(0.5)
    assert "**1 ROLLOUTS HAVE NO GRADE**" in overview(made)


def test_what_has_no_grade_counts_as_zero_on_demand_and_both_numbers_stay() -> None:
    made = result(task("x", 1.0), task("y", None), task("z", 0.5), ungraded_as_zero=True)
    assert made.pass_at_1 == pytest.approx(0.5)
    assert made.by_harness["mini"].pass_at_1 == pytest.approx(0.5)
    assert made.ungraded.pass_at_1_if_excluded == pytest.approx(0.75)
    assert made.tasks[1].scores == (None,), "the record itself is not changed"
    assert not made.complete


def test_without_any_grade_there_are_no_numbers() -> None:
    made = result(task("x", None), task("y", None))
    assert (made.pass_at_1, made.strict_pass, made.ci95) == (None, None, None)
    assert made.ungraded.pass_at_1_if_zero == 0.0
    assert "**Pass@1 –**" in report(made)


def test_a_task_with_one_graded_attempt_is_complete() -> None:
    made = result(task("x", 0.5, None))
    assert made.complete
    assert made.ungraded.rollouts == 1
    assert made.by_harness["mini"].pass_at_k == {}, "one grade says nothing of two attempts"


def test_several_attempts_show_what_one_of_k_and_all_of_k_would_reach() -> None:
    by_harness = result(task("x", 1.0, 0.0, 0.5), task("y", 1.0, 1.0, 1.0)).by_harness["mini"]
    assert by_harness.pass_at_k == pytest.approx({2: (2 / 3 + 1) / 2, 3: 1.0})
    assert by_harness.all_of_k == pytest.approx({2: 0.5, 3: 0.5})
    assert by_harness.best_of_k == pytest.approx({2: ((1.0 + 1.0 + 0.5) / 3 + 1) / 2, 3: 1.0})
    assert result(task("x", 1.0)).by_harness["mini"].pass_at_k == {}


def test_categories_and_harnesses_have_numbers_of_their_own() -> None:
    made = result(
        task("x", 1.0, category="code"),
        task("y", 0.0, category="mail"),
        task("x", 0.5, category="code", harness="pi"),
        task("y", 0.5, category="mail", harness="pi"),
    )
    assert {name: one.pass_at_1 for name, one in made.by_category.items()} == {"code": 0.75, "mail": 0.25}
    assert {name: one.pass_at_1 for name, one in made.by_harness.items()} == {"mini": 0.5, "pi": 0.5}
    assert made.pass_at_1 == 0.5
    assert made.by_category["code"].tasks == 1
    assert made.by_category["code"].rollouts == 2


def test_harnesses_on_the_same_tasks_do_not_make_the_interval_narrower() -> None:
    scores = [0.0, 1.0] * 20
    one = result(*(task(f"t{i}", score) for i, score in enumerate(scores)))
    three = result(*(task(f"t{i}", score, harness=name) for name in "abc" for i, score in enumerate(scores)))
    assert three.ci95 == one.ci95


def test_stop_reasons_are_counted_with_their_grades() -> None:
    reasons = result(task("x", 1.0, None), task("y", 0.5, 0.0)).by_stop_reason
    assert list(reasons) == ["completed", "sandbox_error"]
    assert (reasons["completed"].rollouts, reasons["completed"].graded) == (3, 3)
    assert reasons["completed"].mean_score == pytest.approx(0.5)
    assert (reasons["sandbox_error"].rollouts, reasons["sandbox_error"].mean_score) == (1, None)


def test_the_csv_has_a_row_per_rollout() -> None:
    made = result(task("x", 1.0, None), task("y", 0.5, 0.0, category="b, c"))
    found = rows(csv_text(made))
    assert tuple(found[0]) == COLUMNS
    assert [(row["task"], row["attempt"], row["score"], row["strict_pass"]) for row in found] == [
        ("x", "0", "1.0", "1"),
        ("x", "1", "", ""),
        ("y", "0", "0.5", "0"),
        ("y", "1", "0.0", "0"),
    ]
    assert found[1]["error"] == "no | room\nleft"
    assert json.loads(found[2]["components"]) == {"part": 0.5}
    assert found[2]["category"] == "b, c"


def test_the_report_names_the_worst_what_has_no_grade_and_the_settings() -> None:
    tasks = [task(f"t{i}", i / 12, category="ab"[i % 2]) for i in range(13)]
    text = report(result(*tasks, task("gone", None)), command="clawgym eval --out here")
    worst = text.partition("## Lowest scores")[2].partition("## Without a grade")[0]
    assert [f"| t{i} |" in worst for i in range(13)] == [True] * 10 + [False] * 3
    assert cells(text.partition("## Without a grade")[2], "gone") == [
        "gone",
        "mini",
        "sandbox_error",
        "no \\| room left",
    ]
    assert cells(text, "category")[1:4] == ["Pass@1", "95 % interval", "strict pass"]
    assert cells(text, "sandbox") == ["sandbox", "local"]
    assert "```\nclawgym eval --out here\n```" in text


def test_a_perfect_result_lists_no_lowest_scores() -> None:
    assert "Lowest scores" not in report(result(task("x", 1.0)))
