"""What an agent can leave in its workspace that makes an honest grader's programs run the agent's code.

Python's own traps are sprung by `command` and its start-up hook; here are those of pytest and git, which read settings
from the folder they work in. Invariant: nothing of the workspace is changed but what lies beside hidden files.

A limit: a program of the workspace that a checker starts, a driver named in `.gitattributes` included, has its rights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

_PYTEST_SETTINGS = frozenset({"pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"})
_LOADED_BESIDE = ("conftest.py", "__init__.py", "__pycache__")
_GIT = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null"}
"""`git status` alone runs the one and, by the hook `post-index-change`, what the other holds."""


def loaded_beside(hidden: Iterable[PurePosixPath], given: Iterable[PurePosixPath]) -> list[PurePosixPath]:
    """Return what Python or pytest would load from the folders of hidden files though nobody asked for it.

    Args:
        hidden: files in folders that the agent could write to.
        given: files of the task, which stay.
    """
    kept = {*given, *hidden}
    folders = {parent for path in hidden for parent in path.parents if parent.parts}
    return sorted({folder / name for folder in folders for name in _LOADED_BESIDE} - kept)


def guarded_environment(
    workdir: PurePosixPath, owned: Sequence[str], hidden: Iterable[PurePosixPath]
) -> dict[str, str]:
    """Return the variables that keep git and pytest from the workspace's own settings.

    Args:
        owned: top-level folders of the workspace that are the grader's.
        hidden: all hidden files; pytest settings among them hold.
    """
    environment = {"GIT_CONFIG_COUNT": str(len(_GIT))}
    for number, (key, value) in enumerate(_GIT.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    if owned:
        options = f"--rootdir={workdir} --confcutdir={workdir / owned[0]}"
        if not any(path.name in _PYTEST_SETTINGS for path in hidden):
            options += " -c /dev/null"
        environment["PYTEST_ADDOPTS"] = options
    return environment
