from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import clawgym_env
from clawgym_env import EvaluationResult, RolloutStore, evaluate, load_tasks
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.envs.service import JUDGE_CACHE
from clawgym_env.errors import HarnessUnsuitable, JudgeMissing, SandboxError
from clawgym_env.evaluation import EvaluationError, Progress
from clawgym_env.grading.specs import Criterion, RubricGrading
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.tasks.task import McpServer, Task, TaskFile, TaskSet
from clawgym_env.testing import ANSWER_FILE, Ask, FakeBackend, InProcessHarness, answer_once
from harness_adapters.noop import NoopHarness

WORDS = {"apple": "fruit", "pear": "fruit", "oak": "tree", "stone": ""}
TASKS = TaskSet.of(
    [Task(id=word, instruction=f"Say {word}", metadata={"category": kind}) for word, kind in WORDS.items()], "words"
)


def score(task: Task, workspace: Path) -> float:
    """1.0 where the answer holds the last word of the instruction, else 0.25."""
    return 1.0 if task.instruction.split()[-1] in (workspace / ANSWER_FILE).read_text() else 0.25


def run(tasks: Any = TASKS, **options: Any) -> EvaluationResult:
    options = {"harness": InProcessHarness(), "engine": ScriptedEngine(["apple oak stone"]), "grader": score, **options}
    return evaluate(tasks, sandbox=FakeBackend(), **options)


class Worker:
    """An agent that remembers what it was asked, and whose sandbox breaks while it is told to."""

    def __init__(self, *broken: str) -> None:
        self.asked: list[str] = []
        self.broken = set(broken)

    def harness(self) -> InProcessHarness:
        return InProcessHarness(self._act)

    async def _act(self, ask: Ask, sandbox: Sandbox, context: HarnessContext) -> str:
        word = context.instruction.split()[-1]
        self.asked.append(word)
        if word in self.broken:
            raise SandboxError("The disk is gone.")
        return await answer_once(ask, sandbox, context)


def timeless(result: EvaluationResult) -> EvaluationResult:
    """Return a result without what a repetition changes."""
    still = tuple(task.model_copy(update={"seconds": ()}) for task in result.tasks)
    return result.model_copy(update={"tasks": still})


def test_results_are_returned_and_written(tmp_path: Path) -> None:
    result = run(out=tmp_path / "new" / "folder", command="the command")
    folder = tmp_path / "new" / "folder"
    assert result.pass_at_1 == pytest.approx((3 * 1.0 + 0.25) / 4)
    assert result.strict_pass == pytest.approx(0.75)
    assert {name: one.pass_at_1 for name, one in result.by_category.items()} == {
        "fruit": 0.625,
        "tree": 1.0,
        "uncategorised": 1.0,
    }
    assert [(task.id, task.scores, task.calls) for task in result.tasks][:2] == [
        ("apple", (1.0,), (1,)),
        ("pear", (0.25,), (1,)),
    ]
    assert result.tasks[0].sampled_tokens[0] > 0
    assert result.complete
    assert EvaluationResult.model_validate_json((folder / "results.json").read_bytes()) == result
    assert (folder / "results.csv").read_text().count("\n") == 5
    assert "the command" in (folder / "report.md").read_text()
    with RolloutStore(folder, read_only=True) as store:
        assert set(store.rollout_ids()) == {task.rollout_ids[0] for task in result.tasks}


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(limit=2).settings.num_tasks == 2
    assert list(tmp_path.iterdir()) == []


def test_a_finished_evaluation_is_not_run_again(tmp_path: Path) -> None:
    worker = Worker()
    first = run(harness=worker.harness(), out=tmp_path)
    assert run(harness=worker.harness(), out=tmp_path, max_concurrency=3) == first
    assert sorted(worker.asked) == sorted(WORDS)


def test_an_interrupted_evaluation_comes_to_what_an_uninterrupted_one_does(tmp_path: Path) -> None:
    worker = Worker()

    def interrupt(progress: Progress) -> None:
        if progress.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(harness=worker.harness(), attempts=2, out=tmp_path / "a", on_progress=interrupt)
    assert not (tmp_path / "a" / "results.json").exists()
    with RolloutStore(tmp_path / "a", read_only=True) as store:
        finished = len(store.rollout_ids())
    seen: list[Progress] = []
    result = run(harness=worker.harness(), attempts=2, out=tmp_path / "a", on_progress=seen.append)
    assert (seen[0].done, seen[0].total, seen[0].latest) == (finished, 8, None)
    assert [progress.done for progress in seen] == list(range(finished, 9))
    assert timeless(result) == timeless(run(attempts=2, out=tmp_path / "b", max_concurrency=4))


def test_only_what_infrastructure_made_fail_is_tried_again(tmp_path: Path) -> None:
    worker = Worker("pear", "oak")
    first = run(harness=worker.harness(), out=tmp_path)
    assert (first.ungraded.rollouts, first.ungraded.tasks, first.complete) == (2, 2, False)
    assert first.tasks[1].errors[0] == "SandboxError: The disk is gone."
    worker.asked.clear()
    worker.broken = {"oak"}
    seen: list[Progress] = []
    second = run(harness=worker.harness(), out=tmp_path, on_progress=seen.append)
    assert (seen[0].done, seen[0].ungraded) == (2, 0)
    assert set(worker.asked) == {"pear", "oak"}
    assert (second.tasks[1].scores, second.tasks[2].scores) == ((0.25,), (None,))
    worker.broken = set()
    assert run(harness=worker.harness(), out=tmp_path).complete
    worker.asked.clear()
    assert run(harness=worker.harness(), out=tmp_path).complete, "old failures in the store do not come back"
    assert worker.asked == []


def test_a_first_prompt_that_is_too_long_is_not_tried_again(tmp_path: Path) -> None:
    worker = Worker()
    short = ScriptedEngine(["x"], context_length=8)
    result = run(harness=worker.harness(), engine=short, limit=1, out=tmp_path)
    assert result.tasks[0].stop_reasons == ("context_length",)
    assert result.tasks[0].scores == (None,)
    asked = len(worker.asked)
    assert run(harness=worker.harness(), engine=short, limit=1, out=tmp_path) == result
    assert len(worker.asked) == asked


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("seed", {"seed": 1}),
        ("attempts", {"attempts": 2}),
        ("num_tasks", {"limit": 3}),
        ("tasks", {"tasks": "bundled"}),
        ("limits", {"limits": {"max_calls": 3}}),
        ("sampling", {"sampling": {"temperature": 0.5}}),
        ("harnesses", {"harness": NoopHarness()}),
        ("policy", {"engine": "scripted:elsewhere"}),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, change: dict[str, Any]) -> None:
    run(out=tmp_path)
    before = (tmp_path / "results.json").read_bytes()
    with pytest.raises(EvaluationError, match=f"Expected {name} to be"):
        run(**{"out": tmp_path, **change})
    assert (tmp_path / "results.json").read_bytes() == before


def test_tasks_with_other_contents_are_refused(tmp_path: Path) -> None:
    checker = tmp_path / "check.py"
    tasks = [Task(id="apple", instruction="Say apple", hidden_files=(TaskFile(path="c.py", source=checker),))]
    checker.write_text("1")
    run(tasks, out=tmp_path / "out")
    checker.write_text("2")
    with pytest.raises(EvaluationError, match="tasks_digest"):
        run(tasks, out=tmp_path / "out")


def test_fresh_discards_the_evaluation_found_and_nothing_else(tmp_path: Path) -> None:
    worker = Worker()
    run(harness=worker.harness(), out=tmp_path, seed=1)
    (tmp_path / JUDGE_CACHE).mkdir(parents=True)
    result = run(harness=worker.harness(), out=tmp_path, fresh=True)
    assert result.settings.seed == 0
    assert not (tmp_path / JUDGE_CACHE).exists()
    assert len(worker.asked) == 2 * len(WORDS)
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(EvaluationError, match="thesis"):
        run(out=tmp_path, fresh=True)
    assert (tmp_path / "results.json").exists()


def test_a_folder_with_another_run_in_it_is_refused(tmp_path: Path) -> None:
    run(out=tmp_path)
    (tmp_path / "eval.json").unlink()
    with pytest.raises(EvaluationError, match="another run's rollouts"):
        run(out=tmp_path)


def test_a_folder_that_was_left_before_its_settings_were_written_is_taken(tmp_path: Path) -> None:
    RolloutStore(tmp_path).close()
    (tmp_path / "eval.json.part").write_text("{")
    assert run(out=tmp_path).complete


def test_every_attempt_with_every_harness_has_a_seed_of_its_own(tmp_path: Path) -> None:
    harnesses = ["clawgym_env.testing:InProcessHarness", "in-process-too"]
    with pytest.raises(clawgym_env.ClawGymError, match="in-process-too"):
        run(harness=harnesses)
    result = run(harness=[InProcessHarness(), NoopHarness()], attempts=3, limit=2, out=tmp_path, max_concurrency=4)
    assert [(task.id, task.harness, len(task.scores)) for task in result.tasks] == [
        ("apple", "in-process", 3),
        ("pear", "in-process", 3),
        ("apple", "noop", 3),
        ("pear", "noop", 3),
    ]
    assert set(result.by_harness) == {"in-process", "noop"}
    assert set(result.by_harness["in-process"].pass_at_k) == {2, 3}
    with RolloutStore(tmp_path, read_only=True) as store:
        assert len({rollout.seed for rollout in store.rollouts()}) == 12


def test_the_same_harness_twice_is_refused() -> None:
    with pytest.raises(EvaluationError, match="different names"):
        run(harness=[InProcessHarness(), InProcessHarness()])


def test_limits_by_name_leave_the_others_to_the_task() -> None:
    seen: list[Task] = []

    def grader(task: Task, workspace: Path) -> float:
        seen.append(task)
        return score(task, workspace)

    run(
        [Task(id="apple", instruction="Say apple", limits={"max_total_tokens": 77})],
        grader=grader,
        limits={"max_calls": 5},
    )
    assert (seen[0].limits.max_calls, seen[0].limits.max_total_tokens) == (5, 77)


def test_a_task_that_a_harness_cannot_do_is_refused_before_anything_is_run() -> None:
    worker, server = Worker(), McpServer(name="papers", command=("serve",))
    tasks = [*TASKS, Task(id="tools", instruction="Say apple", mcp_servers=(server,))]
    with pytest.raises(HarnessUnsuitable, match="tools"):
        run(tasks, harness=worker.harness())
    assert worker.asked == []


def test_a_task_that_needs_a_judge_is_refused_where_none_is_given() -> None:
    rubric = RubricGrading(criteria=(Criterion(name="kind", question="Is it kind?"),))
    with pytest.raises(JudgeMissing, match="letter"):
        evaluate(
            [Task(id="letter", instruction="Write.", grading=rubric)],
            harness=InProcessHarness(),
            engine=ScriptedEngine(["x"]),
            sandbox=FakeBackend(),
        )


def test_text_that_utf_8_cannot_hold_is_written_as_a_question_mark(tmp_path: Path) -> None:
    task = Task(id="lone \ud800", instruction="Say \ud800", metadata={"category": "\udfff"})
    result = run([task], engine=ScriptedEngine(["x"]), grader=lambda task, workspace: 0.5, out=tmp_path)
    assert (result.tasks[0].id, result.tasks[0].category) == ("lone ?", "?")
    assert EvaluationResult.model_validate_json((tmp_path / "results.json").read_bytes()) == result


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"limit": 0}])
def test_nothing_to_do_is_a_mistake(wrong: dict[str, int]) -> None:
    with pytest.raises(EvaluationError, match="at least 1"):
        run(**wrong)


def test_bundled_tasks_give_the_oracle_everything_and_the_idle_nothing(tmp_path: Path) -> None:
    result = evaluate(
        "bundled:level=1-2,size=4",
        harness=["oracle", "noop"],
        engine=ScriptedEngine(["never asked"]),
        out=tmp_path,
        max_concurrency=2,
    )
    assert {name: one.pass_at_1 for name, one in result.by_harness.items()} == {"oracle": 1.0, "noop": 0.0}
    assert json.loads((tmp_path / "results.json").read_text())["strict_pass"] == 0.5


def test_an_oracle_for_tasks_whose_solutions_nobody_knows_is_refused_before_anything_runs() -> None:
    tasks = list(load_tasks("bundled:level=1,size=2"))
    with pytest.raises(HarnessUnsuitable, match="known solutions"):
        evaluate(tasks, harness="oracle", engine=ScriptedEngine(["never asked"]))
