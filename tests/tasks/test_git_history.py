"""An agent finds one commit in a task's repository, whatever history the files carried."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clawgym_env.sandbox.base import Sandbox, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks.git_history import scrub_history
from clawgym_env.tasks.task import Task, TaskFile

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the sandbox shows this machine's git")

IDENTITY = {
    **{f"GIT_{who}_NAME": "Ada Example" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_DATE": "1700000000 +0100" for who in ("AUTHOR", "COMMITTER")},
}
SECRETS = ("the-fix", "old-password", "stashed-idea", "tagged-answer", "branch-answer")


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """Return a function that runs git in `tmp_path/repo`."""
    folder = tmp_path / "repo"
    folder.mkdir()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_CONFIG_NOSYSTEM": "1", **IDENTITY}

    def run(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("init", "-q", "-b", "work")
    return run


def commit(git: Callable[..., str], repo: Path, text: str, message: str) -> None:
    (repo / "src").mkdir(exist_ok=True)
    (repo / "src" / "main.py").write_text(text)
    git("add", "-A")
    git("commit", "-q", "-m", message)


@pytest.fixture
def repo(tmp_path: Path, git: Callable[..., str]) -> Path:
    """A repository at the second of three commits, the answer in every corner that git has."""
    folder = tmp_path / "repo"
    commit(git, folder, "old-password", "First")
    commit(git, folder, "broken", "Second\n\nWith a body.")
    commit(git, folder, "tagged-answer", "tagged")
    git("tag", "-a", "v9", "-m", "tagged-answer")
    git("reset", "-q", "--hard", "HEAD~1")
    git("checkout", "-q", "-b", "other")
    commit(git, folder, "branch-answer", "branch-answer")
    git("checkout", "-q", "work")
    commit(git, folder, "the-fix", "the-fix")
    git("reset", "-q", "--hard", "HEAD~1")
    (folder / "src" / "main.py").write_text("stashed-idea")
    git("stash", "-q")
    git("gc", "-q")
    (folder / ".git" / "hooks" / "pre-commit").write_text("#!/bin/sh\necho the-fix\n")
    git("config", "core.fsmonitor", "echo the-fix")
    (folder / "notes.txt").write_text("not committed")
    return folder


def task_of(repo: Path, under: str = "") -> Task:
    """Return a task whose files are a folder's, as the loaders read them: regular files only."""
    files = [
        TaskFile(path=f"{under}{path.relative_to(repo)}", data=path.read_bytes())
        for path in sorted(repo.rglob("*"))
        if path.is_file()
    ]
    return Task(id="t", instruction="", files=tuple(files))


def after_scrub(task: Task, command: str) -> str:
    """Fill a sandbox with a task's files, scrub, and run a command as the agent."""

    async def main() -> str:
        async with await LocalBackend().open(SandboxSpec()) as sandbox:
            await fill(sandbox, task)
            await scrub_history(sandbox, task)
            done = await sandbox.exec(["sh", "-c", command])
            return done.stdout.decode() + done.stderr.decode()

    return asyncio.run(main())


async def fill(sandbox: Sandbox, task: Task) -> None:
    for file in task.files:
        await sandbox.write_file(f"{task.workdir}/{file.path}", file.read())


DIG = r"""
git log --all --format=%B; git reflog --all; git stash list; git tag -n; git branch -a; find .git -type f | sort
git cat-file --batch-all-objects --batch-check | while read id kind size; do git cat-file -p $id; done
grep -r . .git/config .git/hooks .git/logs 2>/dev/null
python3 - <<'END'
import pathlib, zlib
for path in pathlib.Path(".git").rglob("*"):
    if path.is_file():
        data = path.read_bytes()
        try: data = zlib.decompress(data)
        except zlib.error: pass
        print(data.decode(errors="replace"))
END
"""


def test_no_corner_of_the_repository_holds_what_head_does_not(repo: Path) -> None:
    shown = after_scrub(task_of(repo), DIG)
    assert "broken" in shown
    assert [secret for secret in SECRETS if secret in shown] == []


def test_the_commit_keeps_its_tree_message_author_and_dates(repo: Path, git: Callable[..., str]) -> None:
    form = "--format=%T %an %ae %ad %cd %B"
    shown = after_scrub(
        task_of(repo), f"git log '{form}' --date=raw; git rev-list --all --count; git symbolic-ref HEAD"
    )
    assert shown == git("log", "-1", form, "--date=raw") + "1\nrefs/heads/work\n"


def test_the_work_tree_is_as_it_was_and_work_goes_on(repo: Path) -> None:
    identity = "git config user.email a@b; git config user.name A; echo new > src/main.py"
    work = f"git status --porcelain; {identity}; git commit -qam x; git fsck; git show HEAD~:src/main.py"
    assert after_scrub(task_of(repo), work).splitlines() == ["?? notes.txt", "broken"]


def test_every_repository_of_the_workspace_is_scrubbed(repo: Path) -> None:
    inner = task_of(repo, "deep/er/")
    both = inner.model_copy(update={"files": (*task_of(repo).files, *inner.files)})
    shown = after_scrub(both, f"{DIG}\ncd deep/er\n{DIG}")
    assert shown.count("refs/heads/work") >= 2
    assert [secret for secret in SECRETS if secret in shown] == []


def test_a_repository_without_a_commit_stays_one(git: Callable[..., str], tmp_path: Path) -> None:
    assert "No commits yet" in after_scrub(task_of(tmp_path / "repo"), "git status")


@pytest.mark.parametrize("damage", ["objects", "HEAD"])
def test_a_repository_that_cannot_be_read_is_removed_and_that_is_said(
    repo: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    files = tuple(file for file in task_of(repo).files if f".git/{damage}" not in file.path)
    with caplog.at_level(logging.WARNING):
        shown = after_scrub(Task(id="t", instruction="", files=files), "ls -a; ls -a /tmp")
    assert ".git" not in shown.split()
    assert "could not be scrubbed" in caplog.text


def test_a_task_without_a_repository_costs_no_command() -> None:
    asyncio.run(scrub_history(None, Task(id="t", instruction="", files=(TaskFile(path="a", data=b""),))))  # type: ignore[arg-type]
