"""What an agent can leave in its workspace that makes an honest grader's programs run the agent's code.

Python's own traps are sprung by `command` and its start-up hook; here are those of pytest and git, which read settings
from the folder they work in. Invariant: nothing of the workspace is changed but what is loaded with hidden files.

Limits: a program of the workspace that a checker starts, a driver named in `.gitattributes` included, has its rights.
A checker that means to run the agent's own tests or hooks must unset `PYTEST_ADDOPTS` or `GIT_CONFIG_COUNT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

_PYTEST_SETTINGS = frozenset({"pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg"})
_PYTEST_HOOKS = "conftest.py"
_GIT = {"core.fsmonitor": "false", "core.hooksPath": "/dev/null"}
"""`git status` alone runs the one and, by the hook `post-index-change`, what the other holds."""


def loaded_beside(hidden: Sequence[PurePosixPath]) -> set[PurePosixPath]:
    """Return what Python or pytest loads from the folders of hidden files, and above, though no checker asks for it.

    Args:
        hidden: files in folders that the agent could write to, relative to the workspace.
    """
    found = {parent / _PYTEST_HOOKS for path in hidden for parent in path.parents}
    found |= {path.parent / "__pycache__" for path in hidden}
    # A folder of tests, not a package that merely has one in it.
    return found | {path.parent / "__init__.py" for path in hidden if path.name.startswith("test_")}


def guarded_environment(workdir: PurePosixPath, hidden: Sequence[PurePosixPath]) -> dict[str, str]:
    """Return the variables that keep git and pytest from the workspace's own settings.

    Args:
        hidden: all hidden files; pytest settings among them hold.
    """
    environment = {"GIT_CONFIG_COUNT": str(len(_GIT))}
    for number, (key, value) in enumerate(_GIT.items()):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    folders = sorted(path.parts[0] for path in hidden if len(path.parts) > 1 and not path.is_absolute())
    if folders:
        options = f"--rootdir={workdir} --confcutdir={workdir / folders[0]}"
        if not any(path.name in _PYTEST_SETTINGS for path in hidden):
            options += " -c /dev/null"
        environment["PYTEST_ADDOPTS"] = options
    return environment
