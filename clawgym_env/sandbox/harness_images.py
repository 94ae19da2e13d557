"""Images with a harness inside, for engines that are to show nothing of this machine, and the bases for them.

Made by `clawgym image build`, out of what `clawgym install` put into the cache. Works with a registry (any base by
name) and without (this machine's /usr, or a Debian by debootstrap). Invariant: a harness lies at the path at which
it is mounted elsewhere, and the image says so in a label, so that a rollout is the same in either.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from clawgym_env.errors import SandboxError
from clawgym_env.harness import HarnessAdapter
from clawgym_env.sandbox import image_files
from clawgym_env.sandbox.base import Image
from clawgym_env.sandbox.images import HOLDS, REPOSITORY, ImageStore

HOST, DEBOOTSTRAP = "host", "debootstrap"
"""Bases that need no registry."""
BASE_TAG = f"{REPOSITORY}/base:latest"

_logger = logging.getLogger(__name__)

_SUITE = "bookworm"
_DEBIAN_TAG = f"{REPOSITORY}/debian:{_SUITE}"
_DOCKERFILES = Path(__file__).with_name("image")


def build_harness(store: ImageStore, adapter: HarnessAdapter, *, cache: Path, base: str = HOST) -> str:
    """Build an image with an installed harness inside and return its tag, `clawgym/NAME:VERSION`.

    Args:
        base: `host` (this machine's /usr, shown to the container), `debootstrap` (made first, where it is missing), or
            an image by name.

    Raises:
        HarnessNotInstalled: with the command to run.
        SandboxError: there is nothing to put in, or the build failed.
    """
    mounts = adapter.mounts(cache)
    if not mounts:
        raise SandboxError(f"Expected a harness with files of its own, got {adapter.name!r}: it runs in any image.")
    if base == HOST:
        base = store.skeleton()
    elif base == DEBOOTSTRAP:
        base = BASE_TAG if store.has(BASE_TAG) else build_base(store)
    inside = store.resolve(Image(name=base)).holds | {mount.target for mount in mounts}
    tag = f"{REPOSITORY}/{adapter.name}:{adapter.version}"
    trees = {mount.target.lstrip("/"): mount.source for mount in mounts}
    _build(store, "harness", tag, base=base, trees=trees, labels={HOLDS: " ".join(sorted(inside))})
    return tag


def build_base(store: ImageStore, base: str = DEBOOTSTRAP) -> str:
    """Build the image that harnesses are put on, with the tools that agents expect, and return its tag.

    Args:
        base: `debootstrap`, or a Debian or Ubuntu image by name.

    Raises:
        SandboxError: debootstrap is not here, or the build failed.
    """
    if base == HOST:
        raise SandboxError("Expected debootstrap or an image to start a base from, got this machine's /usr.")
    if base == DEBOOTSTRAP:
        base = _DEBIAN_TAG
        if not store.has(base):
            _debootstrap(store)
    else:
        store.resolve(Image(name=base))
    _build(store, "base", BASE_TAG, base=base)
    return BASE_TAG


def _build(
    store: ImageStore,
    recipe: str,
    tag: str,
    *,
    base: str,
    trees: Mapping[str, Path] | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    dockerfile = _DOCKERFILES / f"{recipe}.Dockerfile"
    instead = {"Dockerfile": dockerfile.read_bytes(), **store.inputs.files(dockerfile)}
    with tempfile.TemporaryFile() as archive:
        image_files.build_context(archive, trees or {}, instead)
        store.build(archive, tag, labels=labels, arguments={"BASE": base})


def _debootstrap(store: ImageStore) -> None:
    """Make a minimal Debian on this machine; half a minute on an idle one."""
    program = shutil.which("debootstrap", path="/usr/sbin:/usr/bin:/sbin:/bin")
    if program is None:
        raise SandboxError(
            "Expected debootstrap on this machine, got none. Run: apt-get install debootstrap, or name an image."
        )
    _logger.info("Making a Debian %s with debootstrap.", _SUITE)
    with tempfile.TemporaryDirectory(prefix="clawgym-debootstrap-") as root:
        done = subprocess.run([program, "--variant=minbase", _SUITE, root], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-5:])
            raise SandboxError(f"Expected debootstrap to make a Debian {_SUITE} (as root), got:\n{said}")
        left_out = ["--exclude=./var/cache/apt/archives/*.deb", "--exclude=./var/lib/apt/lists/*"]
        with tempfile.TemporaryFile() as archive:
            subprocess.run(["tar", "-c", "-C", root, *left_out, "."], stdout=archive, check=True)
            archive.seek(0)
            store.import_archive(archive, _DEBIAN_TAG)
