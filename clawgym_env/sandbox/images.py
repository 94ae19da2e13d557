"""The file system that a container gets: the host's own /usr, an image by name, or one built from a folder.

Asked by the Docker backend before it opens a sandbox. Works with and without a registry in reach: the default image is
made on this machine in less than a second. Invariant: an image that is made for a task is named by a hash of what it is
made from, so it is made once, and a folder that changed never meets an older build.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from docker import DockerClient
from docker.errors import APIError, DockerException, ImageNotFound
from docker.utils.build import exclude_paths

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox import image_files, lent_python
from clawgym_env.sandbox.base import Image, Mount
from clawgym_env.sandbox.bubblewrap import find_python
from clawgym_env.sandbox.build_inputs import BuildInputs

REPOSITORY = "clawgym"
HOST_USR = "clawgym.host-usr"
"""Label of an image that has no /usr of its own: its containers are shown the host's."""
HOLDS = "clawgym.holds"
"""Label of an image with harnesses inside: the mount targets that it does not need, separated by spaces."""

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """An image that the engine has, and what a container of it needs."""

    tag: str
    mounts: tuple[Mount, ...]
    """Host folders to show, read-only."""
    python: tuple[str, ...]
    """The command that starts Python inside, whether or not the image has one: for our supervisor, not for agents."""
    environment: Mapping[str, str]
    """What the image sets for every command."""
    holds: frozenset[str] = frozenset()
    """Targets of a spec's mounts that the image has inside already."""


@dataclass(frozen=True, slots=True)
class MadeImage:
    """An image that this project made."""

    tag: str
    size_bytes: int
    """With the layers that it shares with others."""
    holds: frozenset[str]
    """Where in it harnesses are."""


class ImageStore:
    """The images of one engine. Methods block, and may be called from several threads: one asks, the others wait.

    A folder is read once in the life of a store.
    """

    def __init__(self, client: DockerClient, *, inputs: BuildInputs | None = None) -> None:
        self._client = client
        self.inputs = inputs or BuildInputs()
        self._resolved: dict[Image | None, ResolvedImage] = {}
        self._locks: dict[Image | None, threading.Lock] = {}
        self._guard = threading.Lock()

    def resolve(self, image: Image | None) -> ResolvedImage:
        """Return what a container of `image` is made of; None is the host's own /usr.

        Raises:
            SandboxError: it can be neither found nor pulled nor built.
        """
        with self._guard:
            lock = self._locks.setdefault(image, threading.Lock())
        with lock, _engine_errors():
            if image not in self._resolved:
                self._resolved[image] = self._resolve(image)
            return self._resolved[image]

    def has(self, tag: str) -> bool:
        """Whether the engine has an image by that name."""
        with _engine_errors():
            try:
                self._client.images.get(tag)
            except ImageNotFound:
                return False
            return True

    def made_here(self) -> list[MadeImage]:
        """Return the images of ours that the engine has, by name."""
        with _engine_errors():
            found = self._client.images.list(filters={"reference": f"{REPOSITORY}/*"})
        made = {
            name: MadeImage(name, image.attrs["Size"], _holds(image.labels))
            for image in found
            for tag in image.tags
            if (name := tag.removeprefix("localhost/")).startswith(f"{REPOSITORY}/")  # Podman's way to say: from here
        }
        return [made[name] for name in sorted(made)]

    def build(
        self,
        context: IO[bytes],
        tag: str,
        *,
        labels: Mapping[str, str] | None = None,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        """Build an image from an archive with a `Dockerfile` at its top; an older one of that name goes.

        A Dockerfile is trusted like any installer: it runs as root and, in an engine without a bridge, on the network
        of this machine.

        Raises:
            SandboxError: with the end of the builder's output.
        """
        _logger.info("Building image %s.", tag)
        said: list[str] = []
        with _engine_errors(), self._replacing(tag):
            events = self._client.api.build(
                fileobj=context,
                custom_context=True,
                tag=tag,
                rm=True,
                forcerm=True,
                labels=dict(labels or {}),
                buildargs={**self.inputs.proxies, **(arguments or {})},
                network_mode="host" if self._lacks_bridge() else None,
                decode=True,
            )
            for event in events:
                said.append(str(event.get("stream") or event.get("error") or ""))
                if "error" in event:
                    output = "\n".join("".join(said).strip().splitlines()[-15:])
                    raise SandboxError(f"Expected the image {tag} to build, got:\n{output}")

    def skeleton(self) -> str:
        """Return the tag of the image without a /usr; made where it is missing."""
        with tempfile.TemporaryFile() as archive:
            image_files.skeleton(archive)
            tag = f"{REPOSITORY}/host:{image_files.digest(archive)}"
            if not self.has(tag):
                self.import_archive(archive, tag, labels={HOST_USR: "1"})
        return tag

    def import_archive(self, archive: IO[bytes], tag: str, *, labels: Mapping[str, str] | None = None) -> None:
        """Make an image of one layer out of the archive of a file system."""
        changes = [f"LABEL {name}={value}" for name, value in (labels or {}).items()]
        with _engine_errors():
            # Despite its name it takes a file as well; the one for streams declares chunks that it then does not send.
            # Podman (4.3) forgets a tag that is given apart from its name.
            said = self._client.api.import_image_from_data(archive, repository=tag, changes=changes)
        if '"error"' in str(said):
            raise SandboxError(f"Expected the Docker engine to make {tag} of an archive, got: {said}")

    def _resolve(self, image: Image | None) -> ResolvedImage:
        if image is None:
            tag = self.skeleton()
        elif image.build is not None:
            tag = self._built(image.build)
        else:
            tag = self._present_or_pulled(str(image.name))
        found = self._client.images.get(tag)
        labels = found.labels
        holds = _holds(labels)
        environment = dict(line.split("=", 1) for line in found.attrs["Config"].get("Env") or () if "=" in line)
        if HOST_USR not in labels:
            python, mounts = lent_python.lend_python()
            return ResolvedImage(tag, mounts, python, environment, holds)
        inside, mounts = find_python()
        folders = (Path("/usr"), *image_files.merged_folders())
        shown = tuple(Mount(source=path, target=str(path)) for path in folders)
        return ResolvedImage(tag, (*shown, *mounts), (inside,), environment, holds)

    def _built(self, folder: Path) -> str:
        """Return the tag of the image that a folder's `Dockerfile` makes; built where it is missing."""
        dockerfile = folder / "Dockerfile"
        if not dockerfile.is_file():
            raise SandboxError(f"Expected a Dockerfile in {folder}, got none.")
        names = _context(folder)
        with tempfile.TemporaryFile() as archive:
            image_files.folder(archive, folder, names=names)
            tag = f"{REPOSITORY}/build:{image_files.digest(archive)}"
            if self.has(tag):
                return tag
            if instead := self.inputs.files(dockerfile):
                archive.truncate()
                image_files.folder(archive, folder, names=names, instead=instead)
                archive.seek(0)
            self.build(archive, tag)
        return tag

    def _present_or_pulled(self, name: str) -> str:
        if not self.has(name):
            _logger.info("Pulling image %s.", name)
            try:
                self._client.images.pull(name)
            except DockerException as error:
                raise SandboxError(
                    f"Expected the image {name!r} in this engine or in a registry, got: {error}. Without a registry: "
                    "docker load, docker import, or an image of ours: clawgym image build base"
                ) from error
        return name

    @contextmanager
    def _replacing(self, tag: str) -> Iterator[None]:
        """Remove what a tag named before and no longer does, unless it is in use."""
        before = self._client.images.get(tag).id if self.has(tag) else None
        yield
        if before is not None and before != self._client.images.get(tag).id:
            with suppress(APIError):
                self._client.images.remove(str(before))

    def _lacks_bridge(self) -> bool:
        """Whether containers of this engine have no network but the host's; see `scripts/docker-up`."""
        return all(network.name != "bridge" for network in self._client.networks.list(names=["bridge"]))


@contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except (DockerException, OSError) as error:  # of a lost connection, or of a file that cannot be read
        raise SandboxError(f"Expected the Docker engine to find or make an image, got: {error}") from error


def _holds(labels: Mapping[str, str]) -> frozenset[str]:
    return frozenset(labels.get(HOLDS, "").split())


def _context(folder: Path) -> list[str]:
    """Return the names of what a build sees of a folder."""
    ignored = folder / ".dockerignore"
    lines = [line.strip() for line in ignored.read_text().splitlines()] if ignored.is_file() else []
    return sorted(exclude_paths(str(folder), [line for line in lines if line and not line.startswith("#")]))
