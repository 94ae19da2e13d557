"""The code of the README and docs/ runs as it stands there, section by section, in order.

Where a snippet is of a size that a test cannot wait for, `SMALLER` says what is put in the place of what; what only a
GPU or a server can run is compiled and its names are looked up. Everything else is executed unchanged.
"""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from markdown_pages import ROOT, Section, sections


@dataclass(frozen=True)
class How:
    """How a section's snippets are run."""

    marks: tuple[str, ...] = ()
    smaller: Mapping[str, str] = field(default_factory=dict)
    """What stands there to what is run instead."""
    runs: bool = True
    """False where this machine cannot."""


PYTHON: Mapping[str, How] = {
    "README.md: The loop": How(
        marks=("policy",),
        smaller={
            "num_envs=64": "num_envs=2",
            "group_size=8": "group_size=2",
            "zeros(64": "zeros(2",
            "range(20)": "range(1)",
        },
    ),
    "environments.md: A step": How(
        marks=("policy",),
        smaller={
            "num_envs=8": "num_envs=2",
            "group_size=4": "group_size=2",
            "zeros(8": "zeros(2",
            "as_completed(16)": "as_completed(2)",
        },
    ),
    "commands.md: Evaluations": How(marks=("policy",), smaller={"size=4": "size=2"}),
    "training.md: Trainers": How(
        marks=("policy",), smaller={"num_envs=64": "num_envs=4", "num_updates=200": "num_updates=1"}
    ),
    "training.md: Several harnesses": How(
        marks=("policy", "harness"),
        smaller={"num_envs=16": "num_envs=4", "group_size=4": "group_size=2", "* 16": "* 4"},
    ),
    "training.md: Cold starts": How(marks=("policy",), smaller={"size=8": "size=2"}),
    "training.md: vLLM": How(runs=False),
    "training.md: Many GPUs": How(
        marks=("policy",),
        smaller={"num_envs=64": "num_envs=2", "group_size=8": "group_size=2", "num_updates=200": "num_updates=1"},
    ),
}
"""Sections that are not simply run; the others are, and need no policy."""
BASH = {"tasks.md: Sets of tasks"}
"""Sections whose shell commands are cheap and need no network."""
REGISTERS = 'lint.pyflakes.allowed-unused-imports = ["clawgym_env"]'
"""It is imported for its ids."""


def parametrized(language: str) -> Any:
    found = [one for one in sections() if one.blocks(language)]
    return pytest.mark.parametrize(
        "section",
        [
            pytest.param(one, id=one.name, marks=[getattr(pytest.mark, mark) for mark in how(one).marks])
            for one in found
        ],
    )


def how(section: Section) -> How:
    return PYTHON.get(section.name, How())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty folder, so that snippets may write relative paths."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@parametrized("python")
def test_the_python_of_a_section_runs(section: Section, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {"__name__": "__readme__"}
    text = "\n".join(section.blocks("python"))
    assert all(text.count(old) for old in how(section).smaller), "what is made smaller stands in the section"
    for number, block in enumerate(section.blocks("python")):
        for old, new in how(section).smaller.items():
            block = block.replace(old, new)
        code = compile(block, f"{section.name}, block {number}", "exec")
        if how(section).runs:
            exec(code, names)
        else:
            imported(ast.parse(block))


def imported(tree: ast.Module) -> None:
    """Look up every name that a block imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)


def test_no_snippet_uses_an_unknown_name_or_imports_one_in_vain(tmp_path: Path) -> None:
    for number, section in enumerate(one for one in sections() if one.blocks("python")):
        (tmp_path / f"section{number}.py").write_text(
            f"# {section.name}\n" + "\n\n".join(section.blocks("python")), encoding="utf-8"
        )
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F,E9", "--config", REGISTERS, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    "section",
    [pytest.param(one, id=one.name) for one in sections() if one.name in BASH],
)
def test_the_shell_commands_of_a_section_run(section: Section, here: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    for block in section.blocks("bash"):
        done = subprocess.run(["bash", "-euc", block], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_section_that_is_treated_apart_is_there() -> None:
    assert set(PYTHON) | BASH <= {one.name for one in sections()}
