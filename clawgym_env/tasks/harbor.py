"""Harbor task folders: `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh`, `solution/solve.sh`.

Schema 1.x in its old and new spellings. The tests run where the agent worked, as in Harbor's `shared` mode, once every
process of the agent is dead. Invariant: `tests/` is hidden, `solution/` is no part of the task, and what a task needs
that our sandboxes have not (several containers or steps, a GPU, a health check) is refused, never left out in silence.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, field_validator, model_validator

from clawgym_env.errors import TaskError
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import Image
from clawgym_env.tasks.dockerfile import working_directory
from clawgym_env.tasks.reading import OnError, files_below, load_each, naming, read_text
from clawgym_env.tasks.task import Limits, McpServer, SolutionStep, Task, TaskSet

CONFIG, INSTRUCTION, TEST = "task.toml", "instruction.md", "tests/test.sh"
DEFAULT_WORKDIR = "/app"
"""Where neither `task.toml` nor the Dockerfile says one."""
FOLDERS = ("/tests", "/logs/verifier", "/logs/agent", "/logs/artifacts")
REWARD_FILES = ("/logs/verifier/reward.txt", "/logs/verifier/reward.json")
SOLUTION = "/solution"
_SIZES = {"k": 1 / 1024, "m": 1.0, "g": 1024.0, "t": 1024.0**2}
_TEMPLATE = re.compile(r"\$\{\w+(?::-([^}]*))?\}")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _Server(_Section):
    name: str
    transport: str = "sse"
    command: str | None = None
    args: tuple[str, ...] = ()


class _Environment(_Section):
    docker_image: str | None = None
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    tpu: dict[str, JsonValue] | None = None
    workdir: str | None = None
    env: dict[str, str] = Field(default_factory=dict)
    healthcheck: dict[str, JsonValue] | None = None
    mcp_servers: tuple[_Server, ...] = ()
    allow_internet: bool | None = None
    network_mode: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _old_sizes(cls, value: Any) -> Any:
        """Read the sizes of schema 1.0: `memory = "4G"`."""
        if isinstance(value, dict):
            value = dict(value)
            for old in ("memory", "storage"):
                if isinstance(size := value.pop(old, None), str):
                    value.setdefault(f"{old}_mb", _megabytes(size))
        return value


class _Verifier(_Section):
    timeout_sec: float = Field(default=600.0, gt=0.0)
    env: dict[str, str] = Field(default_factory=dict)
    environment_mode: Literal["shared", "separate"] = "shared"
    environment: dict[str, JsonValue] | None = None
    collect: tuple[JsonValue, ...] = ()

    @model_validator(mode="after")
    def _shared_only(self) -> Self:
        if self.environment_mode == "separate" or self.environment is not None or self.collect:
            raise ValueError("expected a verifier that shares the agent's environment, the only one supported")
        return self


class _Agent(_Section):
    timeout_sec: float | None = Field(default=None, gt=0.0)


class _Solution(_Section):
    env: dict[str, str] = Field(default_factory=dict)


class TaskToml(_Section):
    """What we read of `task.toml`; unknown keys are ignored, as Harbor ignores them."""

    schema_version: str = "1.0"
    task: dict[str, JsonValue] = Field(default_factory=dict)
    metadata: dict[str, JsonValue] = Field(default_factory=dict)
    agent: _Agent = _Agent()
    verifier: _Verifier = _Verifier()
    environment: _Environment = _Environment()
    solution: _Solution = _Solution()
    steps: tuple[JsonValue, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _old_version(cls, value: Any) -> Any:
        if isinstance(value, dict) and "version" in value:
            return {"schema_version": value["version"], **value}
        return value

    @field_validator("metadata", mode="before")
    @classmethod
    def _dates_as_text(cls, value: Any) -> Any:
        return json.loads(json.dumps(value, default=str))

    @field_validator("schema_version")
    @classmethod
    def _first_schema(cls, value: str) -> str:
        if not value.startswith("1."):
            raise ValueError(f"expected schema 1.x, got {value!r}")
        return value


def load_harbor(path: str | Path, *, on_error: OnError | None = None) -> TaskSet:
    """Load a folder of Harbor task folders, in the order of their names, or one task folder.

    The set knows the solutions: `solution/solve.sh`, where there is one.

    Args:
        on_error: told what is wrong with a task, which is then left out.

    Raises:
        TaskError: without `on_error` the first thing that is wrong, with the file's path; no task at all in any case.
    """
    root = Path(path)
    folders = [root] if (root / CONFIG).is_file() else sorted(file.parent for file in root.glob(f"*/{CONFIG}"))
    if not folders:
        raise TaskError(f"Expected Harbor task folders with a {CONFIG} in {root}, got none.")
    found = load_each(folders, _load_task, on_error)
    by_id = {task.id: folder for folder, task in found.items()}

    def solve(task: Task) -> Sequence[SolutionStep] | None:
        return _solution(by_id[task.id], task)

    return TaskSet.of(list(found.values()), name=root.resolve().name, solve=solve)


def _load_task(folder: Path) -> Task:
    config = _read_config(folder)
    _check_supported(folder, config)
    tests = tuple(files_below(folder / "tests", PurePosixPath("/tests")))
    if f"/{TEST}" not in (file.path for file in tests):
        raise TaskError(f"Expected {folder / TEST}, got no such file.")
    settings, environment = config.environment, folder / "environment"
    dockerfile = environment / "Dockerfile"
    text = read_text(dockerfile) if dockerfile.is_file() else ""
    if settings.docker_image is None and not text:
        raise TaskError(f"Expected {dockerfile}, or docker_image in {folder / CONFIG}, got neither.")
    image = Image(name=settings.docker_image, writable=True) if settings.docker_image else None
    with naming(folder / CONFIG):
        variables = [f"{name}={value}" for name, value in _literal(config.verifier.env, "verifier").items()]
        return Task(
            id=folder.resolve().name,
            instruction=read_text(folder / INSTRUCTION),
            hidden_files=tests,
            grading=CommandGrading(
                command=(*(("env", *variables) if variables else ()), "bash", f"/{TEST}"),
                score="reward_file",
                reward_files=REWARD_FILES,
            ),
            grade_in="same",
            workdir=settings.workdir or working_directory(text) or DEFAULT_WORKDIR,
            image=image or Image(build=environment.absolute(), writable=True),
            folders=FOLDERS,
            env=_literal(settings.env, "environment"),
            memory_mb=settings.memory_mb or Task.model_fields["memory_mb"].default,
            cpus=settings.cpus or Task.model_fields["cpus"].default,
            disk_mb=settings.storage_mb or 10_240,
            mcp_servers=tuple(map(_server, settings.mcp_servers)),
            limits=_limits(config),
            metadata=_metadata(config),
        )


def _read_config(folder: Path) -> TaskToml:
    path = folder / CONFIG
    text = read_text(path)
    try:
        values = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise TaskError(f"Expected TOML in {path}, got: {error}.") from error
    with naming(path):
        return TaskToml.model_validate(values)


def _check_supported(folder: Path, config: TaskToml) -> None:
    environment = config.environment
    lacking = {
        "several steps": config.steps,
        "several containers (docker-compose.yaml)": any(folder.glob("environment/docker-compose.y*ml")),
        "a health check": environment.healthcheck,
        "a GPU": environment.gpus or environment.tpu,
        f"the operating system {environment.os!r}": environment.os.lower() != "linux",
    }
    if needs := [what for what, needed in lacking.items() if needed]:
        raise TaskError(f"Expected a Harbor task of one container and one step, got {folder} with {', '.join(needs)}.")


def _limits(config: TaskToml) -> Limits:
    wall_clock_s = config.agent.timeout_sec or Limits().wall_clock_s
    return Limits(wall_clock_s=wall_clock_s, grader_s=config.verifier.timeout_sec)


def _metadata(config: TaskToml) -> dict[str, JsonValue]:
    metadata: dict[str, JsonValue] = dict(config.metadata)
    if config.task.get("name"):
        metadata["name"] = config.task["name"]
    environment = config.environment
    if environment.allow_internet or environment.network_mode in ("public", "allowlist"):
        metadata["internet"] = True  # the sandbox has none: `clawgym tasks check` says so
    return metadata


def _server(server: _Server) -> McpServer:
    if server.transport != "stdio" or server.command is None:
        raise TaskError(f"Expected MCP servers over stdio, got {server.name!r} over {server.transport}.")
    name = re.sub(r"[^a-z0-9_]", "_", server.name.lower())
    return McpServer(name=name, command=(*shlex.split(server.command), *server.args))


def _literal(env: dict[str, str], section: str) -> dict[str, str]:
    """Return variables with the defaults of `${NAME:-default}` filled in; nothing of the host's enters a sandbox."""

    def default(match: re.Match[str]) -> str:
        if match[1] is None:
            raise TaskError(
                f"Expected values or defaults in [{section}.env], got {match[0]}, which asks for a variable of the "
                "host. Write its value, or ${NAME:-default}."
            )
        return match[1]

    return {name: _TEMPLATE.sub(default, value) for name, value in env.items()}


def _megabytes(size: str) -> int:
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMGT])I?B?\s*", size, re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected a size such as 512M or 4G, got {size!r}")
    return int(float(found[1]) * _SIZES[found[2].lower()])


def _solution(folder: Path, task: Task) -> Sequence[SolutionStep] | None:
    """Return the steps that bring in `solution/` and run it in the workspace."""
    if not (folder / "solution" / "solve.sh").is_file():
        return None
    env = _literal(_read_config(folder).solution.env, "solution")
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in env.items())
    return (
        SolutionStep("copy_in", {"source": str((folder / "solution").absolute()), "path": SOLUTION}),
        SolutionStep("bash", {"command": f"{exports}bash {SOLUTION}/solve.sh"}),
    )
