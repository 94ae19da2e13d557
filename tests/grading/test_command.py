"""The command grader, over a fake sandbox: a folder and subprocesses."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from clawgym_env.errors import GraderError
from clawgym_env.grading import FunctionGrader, Grade, Grader, Outcome, TaskGrader, as_grader
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import ExecResult, SandboxSpec
from clawgym_env.tasks import Limits, Task, TaskFile
from clawgym_env.tasks.bundled import families

PATH = f"{sys.base_prefix}/bin:/usr/bin:/bin"


class FolderSandbox:
    """Enough of a sandbox for a grader. Paths outside the workspace land in a folder beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spec = SandboxSpec(workdir=str(root / "workspace"))
        self.workspace = root / "workspace"
        self.workspace.mkdir()

    def _host(self, path: str) -> Path:
        return Path(path) if path.startswith(str(self.root)) else self.root / "side" / path.lstrip("/")

    async def exec(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
        max_output: int = 4 << 20,
    ) -> ExecResult:
        moved = {name: str(self._host(value)) if value[0] == "/" else value for name, value in (env or {}).items()}
        try:
            done = subprocess.run(  # noqa: ASYNC221
                argv, env={"PATH": PATH, **moved}, cwd=self.workspace, capture_output=True, timeout=timeout_s
            )
        except subprocess.TimeoutExpired as timeout:
            return ExecResult(124, timeout.stdout or b"", timeout.stderr or b"", timed_out=True)
        out = done.stdout
        return ExecResult(done.returncode, out[:max_output], done.stderr, dropped_bytes=max(0, len(out) - max_output))

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        target = self._host(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    async def copy_out(self, source: str, target: Path) -> None:
        shutil.copytree(source, target)


def shell_task(script: str, *, files: Mapping[str, str] | None = None, grader_s: float = 20.0) -> Task:
    hidden = {"reward/reward.sh": script, **(files or {})}
    return Task(
        id="t",
        instruction="Do it.",
        hidden_files=tuple(TaskFile(path=path, data=text.encode()) for path, text in hidden.items()),
        limits=Limits(grader_s=grader_s),
    )


def grade(task: Task, tmp_path: Path, planted: Mapping[str, str] | None = None, response: str = "") -> Grade:
    sandbox = FolderSandbox(tmp_path)
    for path, text in (planted or {}).items():
        (sandbox.workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (sandbox.workspace / path).write_text(text)
        (sandbox.workspace / path).chmod(0o755)
    return asyncio.run(TaskGrader().grade(task, sandbox, Outcome(response)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("printed", "reward"),
    [
        ("0.25", 0.25),
        ("1", 1.0),
        ("true", 1.0),
        ("False", 0.0),
        ("1e-1", 0.1),
        ("0.5\n\n  ", 0.5),
        ("1.0000000001", 1.0),
    ],
)
def test_the_last_line_that_is_not_blank_is_the_score(printed: str, reward: float, tmp_path: Path) -> None:
    assert grade(shell_task(f"echo noise; echo '{printed}'"), tmp_path).reward == reward


def test_a_json_line_before_the_score_gives_the_components(tmp_path: Path) -> None:
    line = json.dumps({"a": 0.5, "b": True, "note": "x", "bad": float("nan")})
    got = grade(shell_task(f"echo '{line}'; echo more >&2; echo 0.75"), tmp_path)
    assert got.components == {"a": 0.5, "b": 1.0}
    assert got.output == f"{line}\n0.75\nmore"


@pytest.mark.parametrize(
    ("script", "got"),
    [
        ("echo nan", "the score nan"),
        ("echo inf", "the score inf"),
        ("echo 1.5", "the score 1.5"),
        ("echo -0.1", "the score -0.1"),
        ("true", "nothing on stdout"),
        ("echo 0.5; echo done", "the last line 'done'"),
        ("echo 1_0", "the last line '1_0'"),
        ("echo '{\"reward\": 1}'", "the last line '{"),
        ("echo 1; exit 3", "exit code 3"),
        ("echo 1; kill -9 $$", "exit code -9"),
        ("head -c 5000000 /dev/zero | tr '\\0' x; echo; echo 1", "5000003 bytes of output"),
    ],
)
def test_what_is_no_score_is_an_error(script: str, got: str, tmp_path: Path) -> None:
    with pytest.raises(GraderError, match="Expected the grader of task 't' to print a score") as error:
        grade(shell_task(script), tmp_path)
    assert f"got {got}" in str(error.value)
    assert "bash reward/reward.sh" in str(error.value)


def test_an_error_shows_the_end_of_what_was_printed(tmp_path: Path) -> None:
    with pytest.raises(GraderError, match=r"Its output ends: .*KeyError: 'x'"):
        grade(shell_task("python3 -c '{}[\"x\"]' 2>&1 | tail -1"), tmp_path)


def test_a_grader_that_does_not_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GraderError, match=r"got no end within 0\.2 s"):
        grade(shell_task("exec sleep 60", grader_s=0.2), tmp_path)


def test_a_hidden_file_that_is_gone_from_the_host_is_an_error(tmp_path: Path) -> None:
    task = Task(id="t", instruction="", hidden_files=(TaskFile(path="reward/reward.sh", source=tmp_path / "gone"),))
    with pytest.raises(GraderError, match=r"hidden files of task 't', got: .*gone"):
        grade(task, tmp_path)


CLAWGYM_SCRIPT = "python3 reward/check.py . | python3 -c 'import json, sys; print(json.load(sys.stdin)[\"score\"])'"
CHECKER = {
    "reward/check.py": "import json, helper\nprint(json.dumps({'score': helper.SCORE}))\n",
    "reward/helper.py": "SCORE = 0.5\n",
}
CHEAT = "import os\nos.write(1, b'1.0\\n')\nos._exit(0)\n"


@pytest.mark.parametrize(
    "path",
    ["json.py", "json/__init__.py", "sitecustomize.py", "usercustomize.py", "helper.py", "reward/json.py"],
)
def test_a_planted_module_is_not_imported_by_the_grader(path: str, tmp_path: Path) -> None:
    assert grade(shell_task(CLAWGYM_SCRIPT, files=CHECKER), tmp_path, {path: CHEAT}).reward == 0.5


@pytest.mark.parametrize("path", ["python3", "bash", "bin/python3", "reward/python3", "reward/reward.sh", ".bashrc"])
def test_a_planted_program_is_not_run_by_the_grader(path: str, tmp_path: Path) -> None:
    assert grade(shell_task(CLAWGYM_SCRIPT, files=CHECKER), tmp_path, {path: "#!/bin/sh\necho 1.0\n"}).reward == 0.5


def test_a_link_planted_in_place_of_the_graders_folder_is_removed(tmp_path: Path) -> None:
    sandbox = FolderSandbox(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (sandbox.workspace / "reward").symlink_to(tmp_path / "elsewhere")
    task = shell_task("echo 0.5")
    assert asyncio.run(TaskGrader().grade(task, sandbox, Outcome())).reward == 0.5  # type: ignore[arg-type]
    assert os.listdir(tmp_path / "elsewhere") == []


def test_programs_of_the_workspace_that_a_checker_starts_find_their_own_modules(tmp_path: Path) -> None:
    checker = "import subprocess\nprint(subprocess.check_output(['python3', 'tools/run.py'], text=True))\n"
    planted = {"tools/run.py": "import near\nprint(near.VALUE)\n", "tools/near.py": "VALUE = 0.25\n"}
    task = shell_task("python3 reward/check.py", files={"reward/check.py": checker})
    assert grade(task, tmp_path, planted).reward == 0.25


def test_hidden_files_in_a_folder_that_the_task_shares_leave_the_rest_of_it_alone(tmp_path: Path) -> None:
    task = Task(
        id="t",
        instruction="",
        files=(TaskFile(path="tests/given.txt", data=b""),),
        hidden_files=(TaskFile(path="tests/grade.sh", data=b"cat tests/answer.txt"),),
        grading=CommandGrading(command=("bash", "tests/grade.sh")),
    )
    assert grade(task, tmp_path, {"tests/answer.txt": "0.5\n"}).reward == 0.5


def test_the_graders_python_leaves_no_bytecode(tmp_path: Path) -> None:
    script = "python3 -c 'import mod'; ls; echo 1"
    task = shell_task(script, files={"reward/mod.py": ""})
    assert "__pycache__" not in grade(task, tmp_path).output
    assert not list((tmp_path / "workspace" / "reward").glob("__pycache__"))


def test_the_answer_is_given_to_the_checker_as_clawgym_does(tmp_path: Path) -> None:
    script = (
        'python3 -c \'import json, os; print(json.load(open(os.environ["OPENCLAW_REWARD_PAYLOAD"]))["final_message"])\''
    )
    assert grade(shell_task(script), tmp_path, response="0.125").reward == 0.125


def test_a_bundled_task_is_graded_with_its_parts(tmp_path: Path) -> None:
    instance = next(family for family in families() if family.name == "two_files").instance(0)
    step = instance.oracle[0]
    got = grade(instance.task, tmp_path, {step.arguments["path"]: step.arguments["content"]})
    assert got.reward == pytest.approx(0.5)
    assert got.components == {"first_exists": 1.0, "first_content": 1.0, "second_exists": 0.0, "second_content": 0.0}


def a_function(task: Task, workspace: Path) -> float:
    return float((workspace / "score.txt").read_text())


def function_grade(function: object, tmp_path: Path, *, grader_s: float = 20.0) -> Grade:
    sandbox = FolderSandbox(tmp_path)
    (sandbox.workspace / "score.txt").write_text("0.75")
    task = shell_task("", grader_s=grader_s)
    return asyncio.run(as_grader(function).grade(task, sandbox, Outcome()))  # type: ignore[arg-type]


def test_a_function_grades_a_copy_of_the_workspace(tmp_path: Path) -> None:
    def spoil(task: Task, workspace: Path) -> float:
        score = a_function(task, workspace)
        (workspace / "score.txt").unlink()
        return score

    assert function_grade(spoil, tmp_path).reward == 0.75
    assert (tmp_path / "workspace" / "score.txt").exists()


def test_what_a_function_raises_or_returns_amiss_is_an_error(tmp_path: Path) -> None:
    for index, (function, message) in enumerate(
        [
            (lambda task, workspace: (workspace / "gone").read_text(), "got FileNotFoundError: .*gone"),
            (lambda task, workspace: None, "got None"),
            (lambda task, workspace: "1", "got '1'"),
            (lambda task, workspace: 2.0, "got 2.0"),
            (lambda task, workspace: float("nan"), "got nan"),
        ]
    ):
        (tmp_path / str(index)).mkdir()
        with pytest.raises(GraderError, match=message):
            function_grade(function, tmp_path / str(index))


def test_functions_that_hang_are_errors_and_delay_nobody_else(tmp_path: Path) -> None:
    ever = threading.Event()
    (tmp_path / "workspace").mkdir()

    async def main() -> tuple[list[BaseException | Grade], int]:
        sandbox = FolderSandbox(tmp_path / "workspace")
        grader, task = FunctionGrader(lambda task, workspace: float(ever.wait())), shell_task("", grader_s=0.05)
        hung = await asyncio.gather(
            *(grader.grade(task, sandbox, Outcome()) for _ in range(40)),  # type: ignore[arg-type]
            return_exceptions=True,
        )
        return hung, await asyncio.to_thread(int, "1")

    try:
        hung, one = asyncio.run(main())
    finally:
        ever.set()
    assert one == 1
    assert all(isinstance(error, GraderError) and "within 0.05 s, got no end" in str(error) for error in hung)


@pytest.mark.parametrize("error", [SystemExit(1), StopIteration(), TimeoutError("mine")])
def test_no_exception_of_a_function_ends_more_than_its_grade(error: BaseException, tmp_path: Path) -> None:
    def function(task: Task, workspace: Path) -> float:
        raise error

    with pytest.raises(GraderError, match=type(error).__name__):
        function_grade(function, tmp_path)


def test_as_grader_takes_none_a_function_or_a_grader() -> None:
    assert isinstance(as_grader(None), TaskGrader)
    assert isinstance(as_grader(a_function), FunctionGrader)
    grader = TaskGrader()
    assert as_grader(grader) is grader
    assert isinstance(grader, Grader)
    with pytest.raises(TypeError, match="Make an instance"):
        as_grader(TaskGrader)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got 3"):
        as_grader(3)  # type: ignore[arg-type]
