"""Playing tasks idly and perfectly: sound ones, unsound ones, and those that cannot be tried."""

import pytest

from clawgym_env import cli, registry
from clawgym_env.errors import HarnessError
from clawgym_env.grading.specs import AnswerGrading, CommandGrading, Criterion, HybridGrading, RubricGrading
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.sandbox.base import Image, Sandbox
from clawgym_env.tasks import McpServer, SolutionStep, Task, TaskFile, TaskSet, Turn
from clawgym_env.tasks.proving import Proof, num_proofs, prove
from clawgym_env.testing import FakeBackend
from harness_adapters.noop import NoopHarness

CHECKER = CommandGrading(command=("sh", "reward/check.sh"))
CHECK = b"if [ -f done.txt ]; then echo 1; else echo 0.05; fi\n"
RUBRIC = RubricGrading(criteria=(Criterion(name="a", question="b"),))
WRITE = (SolutionStep("write", {"path": "done.txt", "content": "x"}),)


def task(id: str, **changes: object) -> Task:
    hidden = (TaskFile(path="reward/check.sh", data=CHECK),)
    made = Task(id=id, instruction=f"Do {id}.", hidden_files=hidden, grading=CHECKER)
    return made.model_copy(update=changes)


def by_name(proofs: object) -> dict[tuple[str, str], Proof]:
    assert isinstance(proofs, list)
    return {(proof.task_id, proof.player): proof for proof in proofs}


def test_idleness_and_solutions_are_scored_by_the_tasks_own_grading() -> None:
    tasks = TaskSet.of(
        [
            task("plain"),
            task("hybrid", grading=HybridGrading(automated=CHECKER, rubric=RUBRIC)),
            task("served", mcp_servers=(McpServer(name="docs", command=("clawgym:documents",)),)),
            task("long", turns=(Turn(text="more"), Turn(text="again", new_session=True))),
            task("answer", grading=AnswerGrading(expected="42")),
            task("unsolved"),
        ],
        solve=lambda one: {
            "answer": (SolutionStep("answer", {"text": "<FINAL_ANSWER>42</FINAL_ANSWER>"}),),
            "unsolved": None,
        }.get(one.id, WRITE),
    )
    seen: list[Proof] = []
    backend = FakeBackend()
    proofs = by_name(prove(tasks, sandbox=backend, jobs=2, on_proof=seen.append))
    assert len(proofs) == len(seen) == num_proofs(tasks) == 11
    for id in ("plain", "hybrid", "served", "long"):
        assert proofs[id, "noop"].score == 0.05, proofs[id, "noop"]
        assert proofs[id, "oracle"].score == 1.0, proofs[id, "oracle"]
    assert proofs["answer", "noop"].score == 0.0
    assert proofs["answer", "oracle"].score == 1.0
    assert proofs["unsolved", "noop"].score == 0.05
    assert backend.most_alive <= 2
    assert not backend.alive


def test_what_cannot_be_tried_is_skipped_with_the_reason() -> None:
    tasks = TaskSet.of(
        [task("judged", grading=RUBRIC), task("boxed", image=Image(name="debian"))], solve=lambda one: WRITE
    )
    proofs = by_name(prove(tasks, sandbox=FakeBackend()))
    assert all(proof.skipped and proof.score is None for proof in proofs.values())
    assert "judge" in proofs["judged", "noop"].error
    assert "--sandbox docker" in proofs["boxed", "oracle"].error


def test_a_grader_that_fails_is_no_score() -> None:
    broken = task("broken", hidden_files=(TaskFile(path="reward/check.sh", data=b"exit 3"),))
    (proof,) = prove(TaskSet.of([broken]), sandbox=FakeBackend())
    assert (proof.score, proof.skipped) == (None, False)
    assert "exit code 3" in proof.error


def test_a_solution_that_fails_says_how() -> None:
    steps = (SolutionStep("bash", {"command": "echo no such tool >&2; exit 5"}),)
    (_, proof) = sorted(prove(TaskSet.of([task("broken")], solve=lambda one: steps), sandbox=FakeBackend()), key=str)
    assert (proof.player, proof.score) == ("oracle", 0.05)
    assert "code 5" in proof.error
    assert "no such tool" in proof.error


class _Lost(NoopHarness):
    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        raise HarnessError("Expected to do nothing, got lost.")


def test_an_idle_player_that_fails_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "HARNESSES", {"noop": f"{__name__}:_Lost"})
    (proof,) = prove(TaskSet.of([task("plain")]), sandbox=FakeBackend())
    assert proof.score is None
    assert "got lost" in proof.error


SOUND = TaskSet.of([task("sound")], solve=lambda one: WRITE)
UNSOUND = TaskSet.of([task("gift"), task("[unsolvable]")], solve=lambda one: ())


@pytest.mark.parametrize(
    ("tasks", "flags", "code", "words"),
    [
        (SOUND, [], 0, ["noop: 1 scores, mean 0.0500", "oracle: 1 scores, mean 1.0000"]),
        (SOUND, ["--noop-limit", "0.01"], 1, ["offenders", "sound", "expected <= 0.01"]),
        (UNSOUND, [], 1, ["[unsolvable]", "gift", "expected >= 1"]),
        (UNSOUND, ["--limit", "1", "--oracle-limit", "0.05"], 0, ["oracle: 1 scores, mean 0.0500"]),
    ],
)
def test_the_command_shows_offenders(
    tasks: TaskSet,
    flags: list[str],
    code: int,
    words: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("clawgym_env.tasks.checking.load_tasks", lambda spec, *, on_error: tasks)
    argv = ["tasks", "check", "ignored", "--run", "--sandbox", "clawgym_env.testing:FakeBackend", *flags]
    assert cli.main(argv) == code
    printed = capsys.readouterr().out
    assert [word for word in words if word not in printed] == []
