from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = (
    "torch",
    "transformers",
    "vllm",
    "docker",
    "ray",
    "starlette",
    "uvicorn",
    "renderers",
    "tokenizers",
    "stable_baselines3",
)
ADAPTERS_MAY_USE = {
    "clawgym_env.harness",
    "clawgym_env.sandbox",
    "clawgym_env.trace.calls",
    "clawgym_env.errors",
    "clawgym_env.messages",
}


def imports_of(file: Path) -> Iterator[str]:
    """Yield the absolute names of modules a file imports anywhere, under TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
    "statement",
    [
        "import clawgym_env",
        "from clawgym_env import CallEnv, RolloutVectorEnv, rollouts",
        "import clawgym_env.wrappers",
    ],
)
def test_importing_the_package_pulls_in_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_making_and_resetting_an_environment_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, gymnasium, clawgym_env\n"
        "env = gymnasium.make('ClawGym-Mini-v0'); env.reset(seed=0); env.close()\n"
        f"print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def test_the_environment_imports_neither_learners_nor_adapters() -> None:
    for file in modules("clawgym_env"):
        for name in imports_of(file):
            assert not within(name, {"learners", "harness_adapters", "examples", "tests"}), f"{file}: {name}"


def test_adapters_see_only_their_contract() -> None:
    for file in modules("harness_adapters"):
        for name in imports_of(file):
            assert not within(name, {"learners"}), f"{file}: {name}"
            if within(name, {"clawgym_env"}):
                assert within(name, ADAPTERS_MAY_USE), f"{file}: {name}"


def test_learners_know_no_adapter_but_the_demonstrations_of_mini() -> None:
    for file in modules("learners"):
        for name in imports_of(file):
            if within(name, {"harness_adapters"}):
                assert within(name, {"harness_adapters.mini.demonstrations"}), f"{file}: {name}"


def test_the_packages_are_the_ones_of_this_repository() -> None:
    import clawgym_env
    import harness_adapters
    import learners

    for package in (clawgym_env, harness_adapters, learners):
        assert package.__file__ is not None
        assert Path(package.__file__).parent.parent == ROOT


def test_every_public_name_can_be_loaded() -> None:
    import clawgym_env

    for name in clawgym_env.__all__:
        assert getattr(clawgym_env, name) is not None
    assert set(dir(clawgym_env)) == set(clawgym_env.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = clawgym_env.nonsense
