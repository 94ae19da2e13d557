"""Harbor task folders: what loads, where its parts go, and what is refused."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym_env.errors import TaskError
from clawgym_env.grading.base import Outcome
from clawgym_env.grading.command import grade_command
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.harness import HarnessContext
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.tasks import McpServer, SolutionStep
from clawgym_env.tasks.harbor import load_harbor
from clawgym_env.testing import FakeBackend
from harness_adapters.oracle import OracleHarness

OLD = """
version = "1.0"
[metadata]
category = "files"
created = 2026-03-01
[agent]
timeout_sec = 120.0
[verifier]
timeout_sec = 60.0
[environment]
cpus = 1
memory = "4G"
storage = "10G"
"""
NEW = """
schema_version = "1.3"
[task]
name = "org/hello"
[verifier]
env = { MODE = "strict", LEVEL = "${LEVEL:-3}" }
[environment]
memory_mb = 512
storage_mb = 2048
workdir = "/srv/site"
network_mode = "public"
env = { COLOUR = "red" }
[[environment.mcp_servers]]
name = "Docs-1"
transport = "stdio"
command = "python3 /srv/docs.py"
args = ["--quiet"]
[solution]
env = { ANSWER = "it is 42" }
"""


def make_task(folder: Path, config: str = OLD, *, dockerfile: str = "FROM debian\nWORKDIR /app\n") -> Path:
    (folder / "environment").mkdir(parents=True)
    (folder / "tests").mkdir()
    (folder / "solution").mkdir()
    (folder / "task.toml").write_text(config)
    (folder / "instruction.md").write_text("Write the answer.\n")
    (folder / "environment" / "Dockerfile").write_text(dockerfile)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    (folder / "tests" / "test_state.py").write_text("")
    (folder / "solution" / "solve.sh").write_text('echo "$ANSWER" > answer.txt\n')
    return folder


def test_a_folder_of_the_old_schema_loads(tmp_path: Path) -> None:
    make_task(tmp_path / "b")
    make_task(tmp_path / "a")
    (tmp_path / "README.md").touch()
    first, second = load_harbor(tmp_path)
    assert (first.id, second.id) == ("a", "b")
    assert first.instruction == "Write the answer.\n"
    assert first.files == ()
    assert [file.path for file in first.hidden_files] == ["/tests/test.sh", "/tests/test_state.py"]
    assert first.grading == CommandGrading(
        command=("bash", "/tests/test.sh"),
        score="reward_file",
        reward_files=("/logs/verifier/reward.txt", "/logs/verifier/reward.json"),
    )
    assert (first.grade_in, first.workdir) == ("same", "/app")
    assert first.image is not None
    assert (first.image.build, first.image.writable) == ((tmp_path / "a" / "environment").absolute(), True)
    assert {"/tests", "/logs/verifier", "/logs/agent"} <= set(first.folders)
    assert (first.limits.wall_clock_s, first.limits.grader_s) == (120.0, 60.0)
    assert (first.memory_mb, first.disk_mb, first.cpus) == (4096, 10240, 1.0)
    assert first.metadata == {"category": "files", "created": "2026-03-01"}


def test_a_task_of_the_new_schema_loads_alone(tmp_path: Path) -> None:
    (task,) = load_harbor(make_task(tmp_path / "one", NEW))
    assert (task.memory_mb, task.disk_mb, task.workdir) == (512, 2048, "/srv/site")
    assert task.env == {"COLOUR": "red"}
    assert isinstance(task.grading, CommandGrading)
    assert task.grading.command == ("env", "MODE=strict", "LEVEL=3", "bash", "/tests/test.sh")
    assert task.mcp_servers == (McpServer(name="docs_1", command=("python3", "/srv/docs.py", "--quiet")),)
    assert task.metadata == {"name": "org/hello", "internet": True}
    assert task.limits.grader_s == 600.0


def test_a_prebuilt_image_is_taken_by_name(tmp_path: Path) -> None:
    config = '[environment]\ndocker_image = "registry.example/hello:1"\n'
    folder = make_task(tmp_path / "one", config)
    (task,) = load_harbor(folder)
    assert task.image is not None
    assert (task.image.name, task.workdir) == ("registry.example/hello:1", "/app")
    (folder / "environment" / "Dockerfile").unlink()
    assert load_harbor(folder)[0].workdir == "/app"


def test_the_set_knows_its_solutions(tmp_path: Path) -> None:
    make_task(tmp_path / "a", NEW)
    (make_task(tmp_path / "b") / "solution" / "solve.sh").unlink()
    tasks = load_harbor(tmp_path)
    assert tasks.solution(tasks[0]) == (
        SolutionStep("copy_in", {"source": str(tmp_path / "a" / "solution"), "path": "/solution"}),
        SolutionStep("bash", {"command": "export ANSWER='it is 42'; bash /solution/solve.sh"}),
    )
    assert tasks[1:].solution(tasks[1]) is None


def add(text: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / "task.toml").write_text(text)

    return spoil


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no TOML": (add("["), r"Expected TOML in .*t/task.toml"),
    "a later schema": (add('version = "2.0"'), r"t/task.toml, got schema_version: .*expected schema 1.x, got '2.0'"),
    "a size that is none": (add('[environment]\nmemory = "lots"'), r"got environment: .*512M or 4G, got 'lots'"),
    "a negative time": (add("[agent]\ntimeout_sec = -1"), r"agent.timeout_sec: "),
    "endless time": (add("[agent]\ntimeout_sec = inf"), r"wall_clock_s: "),
    "several steps": (add('[[steps]]\nname = "a"'), r"one container and one step, got .*t with several steps"),
    "a GPU": (add("[environment]\ngpus = 1"), "a GPU"),
    "windows": (add('[environment]\nos = "windows"'), "operating system 'windows'"),
    "a health check": (add('[environment.healthcheck]\ncommand = "true"'), "a health check"),
    "containers": (lambda folder: (folder / "environment" / "docker-compose.yaml").touch(), "several containers"),
    "a verifier of its own": (add('[verifier]\nenvironment_mode = "separate"'), "shares the agent's environment"),
    "a host's variable": (add('[environment]\nenv = { KEY = "${SECRET}" }'), r"\[environment.env\], got \$\{SECRET\}"),
    "a remote server": (add('[[environment.mcp_servers]]\nname = "x"\nurl = "http://x"'), "'x' over sse"),
    "no tests": (lambda folder: (folder / "tests" / "test.sh").unlink(), r"Expected .*t/tests/test.sh"),
    "no instruction": (lambda folder: (folder / "instruction.md").unlink(), r"t/instruction.md: No such file"),
    "no image": (lambda folder: (folder / "environment" / "Dockerfile").unlink(), r"Dockerfile, or docker_image"),
    "deep TOML": (add(f"x = {'[' * 5000}"), "Expected TOML in .*t/task.toml"),
    "a link out": (lambda folder: (folder / "tests" / "x").symlink_to("/etc/passwd"), "links to stay in"),
}


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_folder_is_named_and_costs_no_other(fault: str, tmp_path: Path) -> None:
    spoil, message = BAD[fault]
    make_task(tmp_path / "good")
    spoil(make_task(tmp_path / "t"))
    with pytest.raises(TaskError, match=message):
        load_harbor(tmp_path)
    errors: list[TaskError] = []
    assert [task.id for task in load_harbor(tmp_path, on_error=errors.append)] == ["good"]
    assert len(errors) == 1


def test_no_task_is_said(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Expected Harbor task folders"):
        load_harbor(tmp_path)


@pytest.mark.parametrize("reward", ["echo 0.5 > reward.txt", 'echo \'{"reward": 0.5, "speed": 1}\' > reward.json'])
def test_the_solution_is_played_and_its_reward_read_where_the_agent_worked(reward: str, tmp_path: Path) -> None:
    folder = make_task(tmp_path / "one", NEW)
    # The fake sandbox is a folder of the host: paths are relative to the workspace /srv/site.
    test = f'cd ../../logs/verifier && grep -q "it is 42" ../../srv/site/answer.txt && [ $MODE = strict ] && {reward}'
    (folder / "tests" / "test.sh").write_text(test)
    (folder / "solution" / "solve.sh").write_text('echo "$ANSWER" > answer.txt')
    tasks = load_harbor(folder)
    (task,) = tasks

    async def play() -> tuple[float, int]:
        sandbox = await FakeBackend().open(SandboxSpec(workdir=task.workdir, folders=task.folders))
        try:
            for name in task.folders:
                await sandbox.write_file(f"{name}/.keep", b"")
            steps = [_relative(step) for step in tasks.solution(task) or ()]
            exit = await OracleHarness(steps=lambda instruction: steps).run(sandbox, _context(task.workdir))
            assert isinstance(task.grading, CommandGrading)
            grading = task.grading.model_copy(update={"command": (*task.grading.command[:-1], "../../tests/test.sh")})
            return (await grade_command(grading, task, sandbox, Outcome())).reward, exit.exit_code
        finally:
            await sandbox.close()

    assert asyncio.run(play()) == (0.5, 0)


def _relative(step: SolutionStep) -> SolutionStep:
    return SolutionStep(step.tool, {key: text.replace("bash /", "bash ../../") for key, text in step.arguments.items()})


def _context(workdir: str) -> HarnessContext:
    return HarnessContext(
        instruction="",
        base_url="",
        api_key="",
        model="",
        workdir=workdir,
        context_length=1,
        max_tokens=1,
        wall_clock_s=1.0,
        seed=0,
    )
