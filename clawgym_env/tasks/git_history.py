"""A repository among a task's files loses its past, and its future, before the agent sees it.

The runner calls this once the files are in the sandbox: later commits, other branches, stashes, reflogs and packs often
hold the solution. Invariant: afterwards `.git` holds one commit of what HEAD held, with its message, author and dates,
and no object that this commit does not need; where that cannot be had, there is no `.git`.

Limits: what was staged is unstaged; remotes, tags, hooks and submodules are gone. Repositories that a container image
brings along, bare ones and archives stay as their author made them.
"""

from __future__ import annotations

import logging
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from clawgym_env.sandbox.base import Sandbox

if TYPE_CHECKING:
    from clawgym_env.tasks.task import Task

_logger = logging.getLogger(__name__)

_TIMEOUT_S = 120.0

_SCRUB = r"""
set -eu
cd "$1"
new=$(mktemp -d)
trap 'rm -rf .git "$new"' EXIT  # whatever fails, the history does not stay
mkdir -p .git/refs .git/objects  # folders without a file are not among a task's files
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_DIR=.git
old() { git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c safe.directory='*' "$@"; }
new() { GIT_DIR=$new/.git git "$@"; }
(unset GIT_DIR; git init -q --template= --object-format="$(old rev-parse --show-object-format)" "$new")
new symbolic-ref HEAD "$(old symbolic-ref -q HEAD || echo refs/heads/main)"
for key in user.name user.email core.autocrlf core.filemode core.ignorecase core.symlinks; do
    if value=$(old config --local "$key"); then new config "$key" "$value"; fi
done
mkdir -p "$new/.git/info"
if [ -f .git/info/exclude ] && [ ! -L .git/info/exclude ]; then cp .git/info/exclude "$new/.git/info/exclude"; fi
if old rev-parse -q --verify HEAD >/dev/null; then
    tree=$(old rev-parse --verify 'HEAD^{tree}')
    show() { old show -s --date=raw --format="$1" HEAD; }
    old rev-list --objects --no-object-names "$tree" | old pack-objects -q --stdout | new unpack-objects -q
    commit=$(old cat-file commit HEAD | sed '1,/^$/d' | GIT_AUTHOR_NAME=$(show %an) GIT_AUTHOR_EMAIL=$(show %ae) \
        GIT_AUTHOR_DATE=$(show %ad) GIT_COMMITTER_NAME=$(show %cn) GIT_COMMITTER_EMAIL=$(show %ce) \
        GIT_COMMITTER_DATE=$(show %cd) new commit-tree "$tree")
    new update-ref "$(new symbolic-ref HEAD)" "$commit"
    new fsck --connectivity-only --no-dangling >/dev/null
    GIT_WORK_TREE=. new reset -q
fi
rm -rf .git
mv "$new/.git" .git
trap - EXIT
rm -rf "$new"
"""


async def scrub_history(sandbox: Sandbox, task: Task) -> None:
    """Reduce every repository that came with the task's files to one commit; see the module for what is lost."""
    for folder in _repositories(task):
        path = str(PurePosixPath(task.workdir) / folder)
        done = await sandbox.exec(["sh", "-c", _SCRUB, "sh", path], timeout_s=_TIMEOUT_S)
        if done.exit_code != 0:
            await sandbox.exec(["rm", "-rf", f"{path}/.git"])
            reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.exit_code}"
            _logger.warning("Removed %s/.git of task %s, which could not be scrubbed: %s", folder, task.id, reason)


def _repositories(task: Task) -> list[PurePosixPath]:
    """Return the folders of the workspace that the task's files make repositories, the deepest first."""
    found = set()
    for file in task.files:
        parts = PurePosixPath(file.path).parts
        if ".git" in parts:
            found.add(PurePosixPath(*parts[: parts.index(".git")]))
    return sorted(found, key=lambda folder: len(folder.parts), reverse=True)
