"""Nothing that an agent leaves in its workspace runs as the grader or passes for its verdict."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path

import pytest
from arena import CHECK, SHELL_CHECK, reward, rollout, task

from clawgym_env.grading.specs import CommandGrading
from clawgym_env.sandbox.base import Mount, SandboxBackend
from clawgym_env.tasks.task import Task, TaskFile

WIN = "import os; os.write(1, b'1.0\\n'); os._exit(0)"
PYTHON = task()
SHELL = task(SHELL_CHECK, name="check.sh")
BOTH = pytest.mark.parametrize("checked_by", [PYTHON, SHELL], ids=["python", "shell"])


@BOTH
def test_the_honest_answer_earns_the_reward_and_no_answer_none(backend: SandboxBackend, checked_by: Task) -> None:
    assert reward(backend, "echo 42 > answer.txt", checked_by) == 1.0
    assert reward(backend, "true", checked_by) == 0.0


@BOTH
def test_a_grader_of_the_agents_own_is_not_run(backend: SandboxBackend, checked_by: Task) -> None:
    plant = f"mkdir -p reward && echo {WIN!r} > reward/check.py && echo 'echo 1.0; exit' > reward/check.sh"
    assert reward(backend, f"{plant}; echo 7 > reward/expected.txt; echo 7 > answer.txt", checked_by) == 0.0


@BOTH
def test_a_grader_that_the_agent_made_unwritable_or_a_link_is_replaced(
    backend: SandboxBackend, checked_by: Task
) -> None:
    plant = f"mkdir -p mine && echo {WIN!r} > mine/check.py && echo 'echo 1.0; exit' > mine/check.sh"
    lock = "chmod 0444 mine/* && chmod 0555 mine && ln -s mine reward"
    assert reward(backend, f"{plant}; {lock}", checked_by) == 0.0


@BOTH
def test_reward_files_of_the_agent_are_not_read(backend: SandboxBackend, checked_by: Task) -> None:
    files = "reward/reward.txt reward/reward.json /logs/verifier/reward.txt /tmp/reward.txt reward.txt reward.json"
    plant = f'for f in {files}; do mkdir -p "$(dirname $f)"; echo 1.0 > $f; done 2>/dev/null; true'
    assert reward(backend, plant, checked_by) == 0.0


@pytest.mark.parametrize("how", ["file", "link", "folder"])
def test_a_reward_file_written_beforehand_is_gone_before_the_grader_runs(backend: SandboxBackend, how: str) -> None:
    graded = Task(
        id="t",
        instruction="",
        folders=("/logs/verifier",),
        hidden_files=(TaskFile(path="reward/check.sh", data=b"true"),),
        grading=CommandGrading(
            command=("bash", "reward/check.sh"), score="reward_file", reward_files=("/logs/verifier/reward.txt",)
        ),
    )
    target = "/logs/verifier/reward.txt"
    plants = {
        "file": f"echo 1.0 > {target}",
        "link": f"echo 1.0 > w; ln -s $PWD/w {target}",
        "folder": f"mkdir {target}",
    }
    for where in ("fresh", "same"):
        found = rollout(backend, plants[how], graded.model_copy(update={"grade_in": where}))
        assert found.grade is None
        assert found.stop_reason == "grader_error"


def test_modules_in_the_workspace_are_not_imported_by_the_grader(backend: SandboxBackend) -> None:
    plant = f"""
for module in csv encodings/__init__ json os pathlib re site sitecustomize subprocess usercustomize; do
    for folder in . reward .local; do mkdir -p $(dirname $folder/$module); echo {WIN!r} > $folder/$module.py; done
done
"""
    assert reward(backend, plant, PYTHON) == 0.0


def test_modules_in_the_workspace_are_not_imported_by_python_c_or_m_either(backend: SandboxBackend) -> None:
    plant = f"for m in json csv check unittest; do echo {WIN!r} > $m.py; done"
    one_liner = "import json, csv, os; print(float(os.path.exists('answer.txt')))"
    assert reward(backend, plant, task(command=("python3", "-c", one_liner))) == 0.0
    piped = b"python3 reward/check.py | python3 -c 'import sys, json, csv; print(sys.stdin.read().split()[-1])'"
    shell = task(piped, name="pipe.sh")
    with_checker = shell.model_copy(
        update={"hidden_files": (*shell.hidden_files, TaskFile(path="reward/check.py", data=CHECK))}
    )
    assert reward(backend, plant, with_checker) == 0.0
    unit = (
        b"import os, unittest\nclass T(unittest.TestCase):\n    def test(self): assert os.path.exists('answer.txt')\n"
    )
    tests = task(unit, name="test_it.py", command=("python3", "-m", "unittest", "discover", "-s", "reward"))
    by_exit_code = tests.model_copy(
        update={"grading": CommandGrading(command=tests.grading.command, score="exit_code")}
    )  # type: ignore[union-attr]
    assert reward(backend, plant, by_exit_code) == 0.0
    assert reward(backend, "echo 42 > answer.txt", by_exit_code) == 1.0


def test_pth_files_and_start_up_files_of_the_home_are_not_run_by_the_grader(backend: SandboxBackend) -> None:
    plant = f"""
for v in 3.9 3.10 3.11 3.12 3.13; do
    site=$HOME/.local/lib/python$v/site-packages; mkdir -p $site
    echo "import os; {WIN}" > $site/evil.pth
    echo {WIN!r} > $site/usercustomize.py; echo {WIN!r} > $site/sitecustomize.py
done
echo {WIN!r} > $HOME/.pythonrc.py; echo {WIN!r} > $HOME/pyvenv.cfg
for f in .bashrc .profile .bash_profile .bash_login .bash_logout .bash_env .zshenv .inputrc; do
    echo 'echo 1.0; kill -9 $$' > $HOME/$f; cp $HOME/$f $PWD/$f
done
"""
    assert reward(backend, plant, PYTHON) == 0.0
    assert reward(backend, plant, SHELL) == 0.0
    login = task(SHELL_CHECK, name="check.sh", command=("bash", "-l", "reward/check.sh"))
    assert reward(backend, plant, login) == 0.0


def test_programs_of_the_agent_do_not_replace_those_of_the_grader(backend: SandboxBackend) -> None:
    plant = r"""
for d in . bin $HOME/bin $HOME/.local/bin /tmp reward node_modules/.bin; do
    mkdir -p $d
    for p in python3 python bash sh grep cat tr env; do printf '#!/bin/sh\necho 1.0\n' > $d/$p; chmod +x $d/$p; done
done
for d in /usr/local/bin /usr/local/sbin /usr/bin /bin; do cp bin/cat $d/python3; cp bin/cat $d/grep; done 2>/dev/null
true
"""
    assert reward(backend, plant, PYTHON) == 0.0
    assert reward(backend, plant, SHELL) == 0.0


def test_compiled_modules_beside_hidden_files_of_a_shared_folder_are_not_loaded(backend: SandboxBackend) -> None:
    graded = Task(
        id="t",
        instruction="",
        files=(TaskFile(path="tests/data.txt", data=b"1"),),
        hidden_files=(
            TaskFile(path="tests/helper.py", data=b"def score(): return 0.0\n"),
            TaskFile(
                path="tests/check.py",
                data=b"import sys; sys.path.insert(0, 'tests'); import helper; print(helper.score())",
            ),
        ),
        grading=CommandGrading(command=("python3", "tests/check.py")),
    )
    plant = """
python3 - <<'END'
import importlib.util, py_compile
open("fake.py", "w").write("def score(): return 1.0\\n")
py_compile.compile("fake.py", cfile=importlib.util.cache_from_source("tests/helper.py"),
    invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
END
"""
    assert reward(backend, plant, graded) == 0.0


def test_an_input_that_the_checker_trusts_is_as_it_was_given(backend: SandboxBackend) -> None:
    given = task(
        b"cmp -s data/in.txt answer.txt && [ ! -L data/in.txt ] && [ ! -L data ] && echo 1.0 || echo 0.0",
        name="check.sh",
        files=(TaskFile(path="data/in.txt", data=b"given", restored=True),),
    )
    assert reward(backend, "cp data/in.txt answer.txt; rm data/in.txt", given) == 1.0
    for plant in (
        "echo x > data/in.txt",
        "ln -sf ../answer.txt data/in.txt",
        "mv data d; mkdir e; ln -s e data; cp a* e/in.txt",
    ):
        assert reward(backend, f"echo x > answer.txt; {plant}", given) == 0.0


def test_what_the_grader_keeps_outside_the_workspace_is_not_the_agents(backend: SandboxBackend) -> None:
    plant = f"""
mkdir -p /tmp/clawgym-grader/encodings && for m in json csv re sitecustomize encodings/__init__; do
    echo {WIN!r} > /tmp/clawgym-grader/$m.py
done
"""
    for where in ("fresh", "same"):
        assert reward(backend, plant, PYTHON.model_copy(update={"grade_in": where})) == 0.0
    linked = "mkdir mine && echo bad > mine/json.py && ln -s $PWD/mine /tmp/clawgym-grader"
    assert reward(backend, linked, PYTHON.model_copy(update={"grade_in": "same"})) == 0.0


def test_a_repository_of_the_agent_does_not_make_the_graders_git_run_its_programs(backend: SandboxBackend) -> None:
    checker = b"git status --porcelain >/dev/null 2>&1; if [ -e answer.txt ]; then echo 1.0; else echo 0.0; fi"
    plant = r"""
git init -q . && printf '#!/bin/sh\ntouch answer.txt\n' > evil && chmod +x evil && git add evil
git config core.fsmonitor "$PWD/evil"; for h in post-index-change fsmonitor-watchman; do cp evil .git/hooks/$h; done
git status >/dev/null 2>&1; [ -e answer.txt ] || echo the plant is harmless >&2; rm -f answer.txt
"""
    found = rollout(backend, plant, task(checker, name="check.sh"))
    assert found.grade is not None
    assert found.grade.reward == 0.0
    assert "harmless" not in found.harness_output


@pytest.fixture(scope="module")
def pytest_mount(tmp_path_factory: pytest.TempPathFactory) -> Mount:
    """Return pytest as a folder that a sandbox can be shown: images and hosts need not have it."""
    folder = tmp_path_factory.mktemp("pytest")
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(Path(importlib.import_module(name).__path__[0]), folder / name)
    shutil.copy(Path(pytest.__path__[0]).parent / "py.py", folder)
    for parent in (folder, *folder.parents[:2]):
        parent.chmod(0o755)
    return Mount(source=folder, target="/opt/pytest")


ALL_PASS = """
import pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.get_result().outcome = "passed"
"""


@pytest.mark.parametrize("shared", [False, True], ids=["own-folder", "shared-folder"])
def test_pytest_settings_and_plugins_of_the_agent_do_not_change_the_outcome_of_hidden_tests(
    backend: SandboxBackend, pytest_mount: Mount, shared: bool
) -> None:
    test = b"import csv, os\ndef test_answer(): assert os.path.exists('answer.txt')\n"
    run = b"PYTHONPATH=$PYTHONPATH:/opt/pytest python3 -m pytest -q tests/test_hidden.py"
    graded = Task(
        id="t",
        instruction="",
        files=(TaskFile(path="tests/test_given.py", data=b""),) if shared else (),
        hidden_files=(TaskFile(path="tests/test_hidden.py", data=test), TaskFile(path="reward/run.sh", data=run)),
        grading=CommandGrading(command=("bash", "reward/run.sh"), score="exit_code"),
        mounts=(pytest_mount,),
    )
    hooks = f"mkdir -p tests; printf {ALL_PASS!r} | tee conftest.py tests/conftest.py tests/__init__.py"
    settings = (
        r"mkdir -p tests; printf '[pytest]\naddopts = --collect-only\n' | tee pytest.ini tox.ini tests/pytest.ini"
    )
    assert reward(backend, "touch answer.txt", graded) == 1.0
    assert [reward(backend, plant, graded) for plant in (hooks, settings)] == [0.0, 0.0]


def test_an_answer_that_looks_like_a_verdict_is_none(backend: SandboxBackend) -> None:
    shows_the_answer = task(b"cat answer.txt | head -c 100; echo; echo 0.0", name="check.sh")
    assert reward(backend, r"printf '1.0\n\n{\"reward\": 1.0}\n1.0' > answer.txt", shows_the_answer) == 0.0


def test_a_program_of_the_workspace_cannot_speak_after_the_grader_has_ended(backend: SandboxBackend) -> None:
    checker = task(b"bash program.sh >/dev/null 2>&1 & wait; echo 0.0", name="check.sh")
    late = r"""
cat > program.sh <<'END'
(setsid sh -c 'while kill -0 '$PPID' 2>/dev/null; do sleep 0.05; done; sleep 0.3; echo 1.0 > /proc/1/fd/1; echo 1.0' &)
END
"""
    assert reward(backend, late, checker) == 0.0
