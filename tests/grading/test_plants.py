"""What is removed beside hidden files, and which settings keep pytest and git from the workspace."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from clawgym_env.grading.plants import guarded_environment, loaded_beside

WORKDIR = PurePosixPath("/srv/task")


def paths(*names: str) -> list[PurePosixPath]:
    return [PurePosixPath(name) for name in names]


def test_what_is_loaded_with_a_hidden_test_goes_and_a_package_above_it_stays() -> None:
    assert loaded_beside(paths("pkg/tests/test_a.py")) == set(
        paths(
            "conftest.py", "pkg/conftest.py", "pkg/tests/conftest.py", "pkg/tests/__pycache__", "pkg/tests/__init__.py"
        )
    )
    assert PurePosixPath("pkg/__init__.py") not in loaded_beside(paths("pkg/expected.json"))
    assert loaded_beside([]) == set()


@pytest.mark.parametrize(
    ("hidden", "options"),
    [
        (["reward/check.py"], "--rootdir=/srv/task --confcutdir=/srv/task/reward -c /dev/null"),
        (["tests/test_a.py", "tests/pytest.ini"], "--rootdir=/srv/task --confcutdir=/srv/task/tests"),
        (["check.py"], None),
        (["/tests/test_a.py"], None),
        ([], None),
    ],
)
def test_pytest_reads_settings_of_the_hidden_files_only(hidden: list[str], options: str | None) -> None:
    assert guarded_environment(WORKDIR, paths(*hidden)).get("PYTEST_ADDOPTS") == options


def test_git_gets_every_setting_it_is_told_to_count() -> None:
    environment = guarded_environment(WORKDIR, [])
    count = int(environment["GIT_CONFIG_COUNT"])
    settings = {environment[f"GIT_CONFIG_KEY_{n}"]: environment[f"GIT_CONFIG_VALUE_{n}"] for n in range(count)}
    assert settings == {"core.fsmonitor": "false", "core.hooksPath": "/dev/null"}
