"""The default grader: answers, reward files and hidden files at absolute paths."""

import asyncio
import errno
from collections.abc import Callable
from typing import Any

import pytest

from clawgym_env.errors import GraderError
from clawgym_env.grading import Grade, Judge, Outcome, TaskGrader, as_grader
from clawgym_env.grading.specs import AnswerGrading, CommandGrading
from clawgym_env.messages import Message
from clawgym_env.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks import Task, TaskFile
from clawgym_env.testing import FakeBackend

Agent = str
"""A shell script that plays the agent."""


def grade(
    task: Task,
    agent: Agent = "true",
    outcome: Outcome = Outcome(),
    *,
    backend: Callable[[], SandboxBackend] = FakeBackend,
    after: str = "true",
) -> Grade:
    """Grade what `agent` leaves; `after` must hold in the sandbox then."""

    async def main() -> Grade:
        spec = SandboxSpec(workdir=task.workdir, folders=task.folders)
        sandbox: Sandbox = await backend().open(spec)
        try:
            assert (await sandbox.exec(["sh", "-c", agent])).exit_code == 0
            got = await TaskGrader().grade(task, sandbox, outcome)
            assert (await sandbox.exec(["sh", "-c", after])).exit_code == 0
            return got
        finally:
            await sandbox.close()

    return asyncio.run(main())


def answer_task(**changes: Any) -> Task:
    return Task(id="t", instruction="How much?", grading=AnswerGrading(expected="42", **changes))


def test_the_visible_response_is_the_answer_or_the_file_is() -> None:
    assert grade(answer_task(), outcome=Outcome("42")).components == {"answer": 1.0}
    assert grade(answer_task(), outcome=Outcome("41")).reward == 0.0
    in_file = answer_task(file="answer.txt")
    assert grade(in_file, "echo 42 > answer.txt", Outcome("41")).reward == 1.0
    assert grade(in_file, "echo 41 > answer.txt", Outcome("42")).reward == 0.0
    assert "Expected '42', got '41\\n'" in grade(in_file, "echo 41 > answer.txt").output


@pytest.mark.parametrize("agent", ["true", "mkdir answer.txt", "ln -s /etc/hostname answer.txt", "mkfifo answer.txt"])
def test_an_answer_that_is_not_there_is_a_wrong_one_with_a_word_why(agent: str) -> None:
    got = grade(answer_task(file="answer.txt"), agent, Outcome("42"))
    assert got.reward == 0.0
    assert "Expected an answer in answer.txt, got" in got.output


def test_an_answer_that_the_machine_cannot_read_is_no_wrong_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: object, path: str, **options: object) -> bytes:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr("clawgym_env.sandbox.fake.FakeSandbox.read_file", broken)
    with pytest.raises(GraderError, match=r"to read the answer of task 't', got: .*Input/output"):
        grade(answer_task(file="answer.txt"), "echo 42 > answer.txt")


def harbor_task(script: str, *, expected: bytes = b"right") -> Task:
    return Task(
        id="t",
        instruction="",
        folders=("/tests", "/logs/verifier"),
        hidden_files=(
            TaskFile(path="/tests/test.sh", data=script.encode()),
            TaskFile(path="/tests/data/expected.txt", data=expected),
        ),
        grading=CommandGrading(
            command=("bash", "/tests/test.sh"),
            score="reward_file",
            reward_files=("/logs/verifier/reward.txt", "/logs/verifier/reward.json"),
        ),
    )


COMPARE = "if cmp -s answer.txt /tests/data/expected.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


def test_hidden_files_lie_in_the_tasks_folders_and_the_reward_is_read_from_its_file() -> None:
    task = harbor_task(COMPARE)
    assert grade(task, "printf right > answer.txt", backend=LocalBackend).reward == 1.0
    assert grade(task, "printf wrong > answer.txt", backend=LocalBackend).reward == 0.0


def test_the_first_reward_file_that_exists_counts_with_its_parts() -> None:
    script = """echo '{"reward": 0.25, "speed": 3}' > /logs/verifier/reward.json; exit 1"""
    got = grade(harbor_task(script), backend=LocalBackend)
    assert (got.reward, got.components) == (0.25, {"speed": 3.0})
    both = f"{script.removesuffix('; exit 1')}; echo 0.75 > /logs/verifier/reward.txt"
    assert grade(harbor_task(both), backend=LocalBackend).reward == 0.75


@pytest.mark.parametrize(
    "plant",
    [
        "echo 1 > /logs/verifier/reward.txt",
        "mkdir /logs/verifier/reward.txt /logs/verifier/reward.json",
        "ln -s ../../tmp/mine /logs/verifier/reward.txt; echo 1 > /tmp/mine",
        "echo 'echo 1 > /logs/verifier/reward.txt' > /tests/conftest.sh",
        "mkdir -p /tests/.hidden /tests/data/expected.txt/full; echo x > /tests/.hidden/y; echo x > /tests/..two",
        "ln -s ../root /tests/data",
    ],
)
def test_what_lies_in_the_places_of_the_grader_is_gone_before_it_works(plant: str) -> None:
    script = '[ -e /tests/conftest.sh ] && . /tests/conftest.sh; echo "nothing written"'
    left = '[ "$(cd /tests; find . | sort | tr "\\n" " ")" = ". ./data ./data/expected.txt ./test.sh " ]'
    with pytest.raises(GraderError, match="no such file"):
        grade(harbor_task(script), plant, backend=LocalBackend)
    written = harbor_task("echo 0.5 > /logs/verifier/reward.txt")
    assert grade(written, plant, backend=LocalBackend, after=left).reward == 0.5


def test_a_hidden_file_outside_the_tasks_folders_is_refused() -> None:
    task = harbor_task("true").model_copy(update={"folders": ("/logs/verifier", "/tests/data")})
    with pytest.raises(GraderError, match=r"Expected '/tests/test\.sh' to lie in one of the task's folders"):
        grade(task)


def test_what_was_said_is_given_to_the_checker_as_a_transcript() -> None:
    script = (
        "python3 -c \"import json, os; p = json.load(open(os.environ['OPENCLAW_REWARD_PAYLOAD']));"
        "print(json.dumps(p['transcript'])); print(len(p['transcript']) / 4)\""
    )
    task = Task(
        id="t",
        instruction="Hi",
        hidden_files=(TaskFile(path="reward/reward.sh", data=script.encode()),),
    )
    said = (Message("user", "Hi"), Message("assistant", "Hello."))
    got = grade(task, outcome=Outcome("Hello.", said), backend=LocalBackend)
    assert got.reward == 0.5
    assert "Hello." in got.output


def test_a_grader_that_leaves_daemons_is_read_when_it_ends() -> None:
    task = Task(
        id="t",
        instruction="",
        hidden_files=(TaskFile(path="reward/reward.sh", data=b"setsid sleep 100 & disown; echo 0.5"),),
    )
    assert grade(task, backend=LocalBackend).reward == 0.5


def test_a_judge_goes_with_the_tasks_own_grading_only() -> None:
    judge = Judge("http://judge/v1", "m")
    made = as_grader(None, judge=judge)
    assert isinstance(made, TaskGrader)
    assert made.judge is judge
    with pytest.raises(ValueError, match="Expected a judge or a grader, got both"):
        as_grader(TaskGrader(), judge=judge)
