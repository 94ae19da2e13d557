"""`clawgym doctor`: what it finds here, and what it says of machines that lack something."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import pytest

from clawgym_env import cli, registry
from clawgym_env.cache import cache_dir
from clawgym_env.doctor import Finding, Report, equipment, examine, machine, sandboxes
from clawgym_env.errors import SandboxError
from clawgym_env.ownership import owner_tag
from clawgym_env.testing import FakeBackend

NAMESPACES = "namespaces of its own (user, mnt, pid, net, ipc, uts, cgroup)"


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine on which nothing was installed or built, without a Docker engine."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.setenv("CLAWGYM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    monkeypatch.delenv("CLAWGYM_DOCKER", raising=False)
    return tmp_path


def report_of(folder: Path) -> Report:
    return examine(cache=folder / "cache", policy="tiny", private_docker=folder / "docker")


def named(report: Report, name: str) -> Finding:
    """Return a finding by its name, extras apart: one is called "docker", too."""
    (finding,) = [one for one in report.findings if one.name == name and one.topic != "packages"]
    return finding


def test_an_empty_machine_lacks_a_policy_and_every_line_has_its_cure(
    empty: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    report = Report.model_validate({name: value for name, value in printed.items() if name != "ready"})
    assert printed["ready"] is report.ready is False
    assert [finding.name for finding in report.having("problem")] == ["tiny"]
    assert named(report, "tiny").fix == "clawgym policy build tiny"
    assert named(report, "pi").fix == "clawgym install pi"
    assert named(report, "documents").fix == "clawgym install documents"
    assert named(report, "mini").status == "ok"
    assert {finding.name for finding in report.findings if finding.topic == "harnesses"} == {
        *(set(registry.HARNESSES) - {"command", "noop", "oracle"}),
        *registry.MCP_SERVERS,
        "node",
    }
    assert all(finding.fix for finding in report.findings if finding.status != "ok")
    assert not any(finding.fix for finding in report.findings if finding.status == "ok")


def test_a_sandbox_is_really_opened_and_says_what_it_saw_inside(empty: Path) -> None:
    found = named(report_of(empty), "local")
    assert found.status == "ok", found
    assert found.found.startswith("opened, ran true, closed in ")
    assert found.found.endswith(f" s: {NAMESPACES}; a seccomp filter; no capabilities")


def test_nothing_is_left(empty: Path) -> None:
    def groups() -> set[str]:
        return {str(path) for path in Path("/sys/fs/cgroup").rglob(f"{owner_tag()}-*")}

    before = groups()
    assert named(report_of(empty), "local").status == "ok"
    assert {path.name for path in empty.iterdir()} == {"tmp"}, "not even the cache's folder is made"
    assert not list((empty / "tmp").iterdir())
    assert groups() == before


def test_an_engine_that_answers_makes_an_empty_machine_ready(empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (empty / "script.json").write_text('["pear"]')
    assert cli.main(["doctor", "--engine", f"scripted:{empty}/script.json"]) == 0
    printed = capsys.readouterr().out
    assert "answers; 1048576 tokens" in printed
    assert "rollouts with the bundled harness run here" in printed
    for topic in ("machine", "sandbox", "model", "harnesses", "packages"):
        assert f"\n{topic}\n" in printed
    assert "-> clawgym install pi\n" in printed


@pytest.mark.parametrize(
    ("engine", "found", "fix"),
    [
        ("vllm:http://127.0.0.1:9", "http://127.0.0.1:9", "clawgym serve"),
        ("scripted:nowhere.json", "nowhere.json", ""),
        ("nonsense", "scripted:FILE", ""),
        ("no_such_module:Engine", "no_such_module", "PYTHONPATH"),
    ],
)
def test_an_engine_that_does_not_answer_is_the_problem(engine: str, found: str, fix: str, tmp_path: Path) -> None:
    (problem,) = equipment.engine(engine, tmp_path)
    assert (problem.name, problem.status) == (engine, "problem")
    assert found in problem.found
    assert fix in problem.fix


@pytest.mark.policy
def test_a_built_policy_is_found_by_its_folder(tmp_path: Path) -> None:
    tiny, *_ = equipment.policies("tiny", cache_dir(), needed=True)
    assert (tiny.name, tiny.status) == ("tiny", "ok")
    (unknown, *_) = equipment.policies(str(tmp_path), cache_dir(), needed=True)
    assert unknown.status == "problem"
    assert "Hugging Face folder" in unknown.found


def test_without_bubblewrap_the_command_that_brings_it_is_named(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda program: None)
    report = report_of(empty)
    assert named(report, "bubblewrap").status == "warning"
    assert named(report, "local").status == "problem"
    for name in ("bubblewrap", "local"):
        assert "apt-get install bubblewrap" in named(report, name).fix


def test_walls_that_do_not_stand_are_named(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "backend", lambda name: FakeBackend())
    found = named(report_of(empty), "local")
    assert found.status == "warning"
    assert "NOT COMPLETE: namespaces of its own ()" in found.found


class _Closed(FakeBackend):
    async def open(self, spec: object) -> None:  # type: ignore[override]
        raise SandboxError("Expected a sandbox, got a kernel that says no. See sysctl.")


@pytest.mark.parametrize("container", [False, True])
def test_a_sandbox_that_does_not_open_is_the_problem(
    container: bool, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandboxes, "backend", lambda name: _Closed())
    monkeypatch.setattr(sandboxes, "in_container", lambda: container)
    found = named(report_of(empty), "local")
    assert (found.status, found.found) == ("problem", "Expected a sandbox, got a kernel that says no")
    assert found.fix == (f"Start this container with {machine.CONTAINER_FLAGS}" if container else "See sysctl.")


def test_a_docker_sandbox_that_opens_is_a_way_where_the_local_one_does_not(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(private_engine: Path) -> Iterator[Finding]:
        yield Finding(topic="sandbox", name="docker", status="ok", found="Docker 99 answers")

    def opened(name: str, made: object) -> Iterator[Finding]:
        status = "ok" if name == "docker" else "problem"
        yield Finding(topic="sandbox", name=name, status=status, found="tried", fix="" if status == "ok" else "sysctl.")

    monkeypatch.setattr(sandboxes, "_docker", answers)
    monkeypatch.setattr(sandboxes, "_opened", opened)
    report = report_of(empty)
    assert named(report, "local").status == "warning"
    assert named(report, "local").fix == "sysctl. Or use --sandbox docker."
    assert (named(report, "docker").status, named(report, "docker").found) == ("ok", "tried")


def test_the_private_docker_engine_is_pointed_at(empty: Path) -> None:
    (empty / "docker").mkdir()
    with socket.socket(socket.AF_UNIX) as engine:
        engine.bind(str(empty / "docker" / "docker.sock"))
        found = named(report_of(empty), "docker")
    assert found.status == "optional"
    assert found.fix == f"export DOCKER_HOST=unix://{empty}/docker/docker.sock"


def test_a_check_that_breaks_is_a_finding_and_the_rest_goes_on(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Iterator[Finding]:
        raise RuntimeError("a driver from another world. Buy a new one.")
        yield

    for name in ("gpus", "disk", "memory"):
        monkeypatch.setattr(machine, name, broken)
    report = report_of(empty)
    gpu = named(report, "GPU")
    assert (gpu.status, gpu.found) == ("warning", "RuntimeError: a driver from another world")
    assert gpu.fix == "Buy a new one."
    assert named(report, "local").status == "ok"


@pytest.mark.parametrize(("sees", "last"), [(True, "GPU"), (False, "GPU in torch")])
def test_gpus_are_listed_and_whether_torch_uses_them(
    sees: bool, last: str, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = empty / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 580.65'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(empty), prepend=os.pathsep)
    monkeypatch.setattr(machine, "_torch_sees_gpu", lambda: sees)
    monkeypatch.setattr(machine, "_torch_build", lambda: "2.13.0+cpu (CUDA none)")
    findings = list(machine.gpus())
    assert findings[0].found == "NVIDIA H200, 143771 MiB, 580.65"
    assert findings[-1].name == last


def test_what_is_scarce_is_a_warning(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (memory,) = machine.memory({"mini": 256, "whale": 1 << 30})
    assert memory.status == "warning"
    assert memory.found.endswith("less than whale may take")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12 - 10**9, 10**9))  # type: ignore[attr-defined]
    (disk,) = machine.disk(empty / "not" / "there")
    assert disk.status == "warning"
    assert "CLAWGYM_CACHE" in disk.fix


@pytest.mark.parametrize(("system", "way"), [("Darwin", "Linux machine"), ("Windows", "WSL2")])
def test_elsewhere_than_on_linux_the_way_in_is_the_whole_report(
    system: str, way: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    for words in (way, "docker run", "reduced isolation"):
        assert words in printed
    assert "bubblewrap" not in printed
    assert cli.main(["rollout"]) == 1
    assert capsys.readouterr().err.startswith(f"clawgym: Expected Linux, got {system}. Run it in ")


def test_an_ordinary_user_is_told_which_setting_forbids_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sandboxes, "_SYSCTLS", {"kernel.ostype": ("Linux", "Plan9")})
    (found,) = sandboxes._namespaces()
    assert found.status == "warning"
    assert found.fix == "sudo sysctl -w kernel.ostype=Plan9"


def test_limits_of_processes_one_by_one_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from clawgym_env.sandbox.local import LocalBackend

    monkeypatch.setattr(sandboxes, "backend", lambda name: LocalBackend(use_cgroups=False))
    (found,) = sandboxes._limits()
    assert found.status == "warning"
    assert "memory of each process alone" in found.found


@pytest.fixture
def asks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what the installed project asks for."""

    def set_requirements(*requirements: str, extras: tuple[str, ...]) -> None:
        told = Message()
        for extra in extras:
            told["Provides-Extra"] = extra
        monkeypatch.setattr(equipment.metadata, "metadata", lambda name: told)
        monkeypatch.setattr(equipment.metadata, "requires", lambda name: list(requirements))

    return set_requirements


def test_packages_are_compared_with_what_the_extras_ask_for(asks: Callable[..., None]) -> None:
    asks(
        "numpy>=1",
        'pydantic>=1; extra == "here"',
        'pydantic>=99; extra == "old"',
        'no-such-package; extra == "gone"',
        'no-such-package; extra == "vllm-cpu"',
        'pytest; extra == "dev"',
        extras=("here", "old", "gone", "vllm-cpu", "dev"),
    )
    here, old, gone, apart = equipment.packages()
    assert (here.status, here.found[:9], here.fix) == ("ok", "pydantic ", "")
    assert (old.status, old.fix) == ("optional", "pip install 'clawgym[old]'")
    assert old.found.endswith("(wanted: >=99)")
    assert (gone.found, gone.fix) == ("no no-such-package", "pip install 'clawgym[gone]'")
    assert apart.fix == "scripts/install-vllm-cpu"
