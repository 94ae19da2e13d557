"""Runs root's tests of `local-as-user`, and of the fake, in child pytests under uid 65534 and reports them as its own.

The fake has no walls: root must not run its tests, and they get a pid namespace of their own besides.

As a plugin of the child (`-p ordinary_user --ordinary-user FOLDER`) it runs what FOLDER/wanted.json names and writes
each report to FOLDER/reports.jsonl; in the parent `pytest_pyfunc_call`, which the conftest imports, starts that child
at the first such test, and each test then does nothing but to end as it ended there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import pytest

from clawgym_env.sandbox.bubblewrap import find_bwrap

_WALLS = {"local-as-user": (), "fake": ("--unshare-pid", "--proc", "/proc")}
"""The parameter of fixture `backend` -> bubblewrap's arguments of its child."""
_NOBODY = 65534
_REPOSITORY = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 900
_Reports: TypeAlias = dict[str, list[pytest.TestReport]]
_reports = pytest.StashKey[dict[str, _Reports]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ordinary-user", metavar="FOLDER", help="(child) where the wanted tests and the reports are")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(json.loads(Path(config.getoption("ordinary_user"), "wanted.json").read_text()))
    items[:] = [item for item in items if item.nodeid in wanted]


class _Writer:
    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file = Path(config.getoption("ordinary_user"), "reports.jsonl")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._file.open("a") as file:
            file.write(json.dumps(data) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Writer(config))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """End as the test ended in its child; any other test is none of our business."""
    parameter = _child(pyfuncitem)
    if parameter is None:
        return None
    children = pyfuncitem.session.stash.setdefault(_reports, {})
    if parameter not in children:
        children[parameter] = _run_child(pyfuncitem.session, parameter)
    reports = children[parameter][pyfuncitem.nodeid]
    for report in reports:
        if report.failed:
            sections = "".join(f"\n--- {name} ---\n{text}" for name, text in report.sections)
            pytest.fail(f"As uid {_NOBODY}, in {report.when}:\n{report.longreprtext}{sections}", pytrace=False)
        if report.skipped:
            pytest.skip(report.longreprtext)
    return True


def _child(item: pytest.Item) -> str | None:
    """Return which child runs a test, None where this process does."""
    call = getattr(item, "callspec", None)
    parameter = call.params.get("backend") if call is not None and os.geteuid() == 0 else None
    return parameter if parameter in _WALLS else None


def _run_child(session: pytest.Session, parameter: str) -> _Reports:
    wanted = {item.nodeid for item in session.items if _child(item) == parameter}
    folder = Path(tempfile.mkdtemp(prefix="clawgym-ordinary-"))
    try:
        (folder / "wanted.json").write_text(json.dumps(list(wanted)))
        for path in (folder, folder / "wanted.json"):
            os.chown(path, _NOBODY, _NOBODY)
        plugin = ["-p", "no:cacheprovider", "-p", "ordinary_user", "--ordinary-user", str(folder)]
        plugin += ["-q", "--basetemp", str(folder / "tmp")]
        files = sorted({nodeid.partition("::")[0] for nodeid in wanted})
        done = subprocess.run(
            [*_as_nobody(_WALLS[parameter]), sys.executable, "-m", "pytest", *plugin, *files],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "TMPDIR": str(folder),
                "PYTHONPATH": str(Path(__file__).parent),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        reports: _Reports = {nodeid: [] for nodeid in wanted}
        file = folder / "reports.jsonl"
        for line in file.read_text().splitlines() if file.exists() else ():
            hook = session.config.hook
            report = hook.pytest_report_from_serializable(config=session.config, data=json.loads(line))
            reports[report.nodeid].append(report)
    finally:
        shutil.rmtree(folder)
    for nodeid, found in reports.items():
        if not any(report.when == "teardown" for report in found):
            text = f"The tests of the ordinary user ended with {done.returncode} before this one:\n{done.stdout}"
            found.append(pytest.TestReport(nodeid, (nodeid, None, nodeid), {}, "failed", text, "call"))
    return reports


def _as_nobody(walls: Sequence[str]) -> list[str]:
    """Return a command prefix: another user, for whom what these tests need is not hidden in a private home."""
    bwrap = [find_bwrap(), "--dev-bind", "/", "/", *walls, "--die-with-parent"]
    hidden: set[Path] = set()
    for needed in {Path(path).resolve() for path in (sys.base_prefix, sys.prefix, _REPOSITORY)}:
        private = [folder for folder in reversed(needed.parents) if folder.stat().st_mode & 0o005 != 0o005]
        if not private:
            continue
        if private[0] not in hidden:
            bwrap += ["--tmpfs", str(private[0])]
            hidden.add(private[0])
        for folder in reversed(needed.parents[:-1]):
            if folder.is_relative_to(private[0]) and folder != private[0]:
                bwrap += ["--perms", "0755", "--dir", str(folder)]
        bwrap += ["--ro-bind", str(needed), str(needed)]
    ids = [f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups"]
    return [*bwrap, "--chdir", str(_REPOSITORY), "--", "setpriv", *ids, "--"]
