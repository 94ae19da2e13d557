"""The Docker backend: one sandbox is one container, which runs our supervisor and nothing of its own.

Opened by the runner, twice per rollout (harness, grader), on any engine of this machine that speaks Docker's API. The
supervisor opens a socket that is shown to its container only, and for a moment; everything after that is as in the
local sandbox. Invariants: no route out but the sockets made by `listen`; `close` returns only when the engine has
forgotten the container; when this process dies the supervisor is hung up on, its container ends and removes itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import resource
import shutil
import socket
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from clawgym_env.errors import MissingPackage, SandboxError
from clawgym_env.extras import require_package
from clawgym_env.ownership import owner_alive, owner_tag
from clawgym_env.sandbox import docker_spec
from clawgym_env.sandbox.base import Capabilities, Image, SandboxSpec
from clawgym_env.sandbox.boot import SOCKET_NAME
from clawgym_env.sandbox.build_inputs import BuildInputs
from clawgym_env.sandbox.limits import rlimits
from clawgym_env.sandbox.seccomp import docker_profile
from clawgym_env.sandbox.supervised import SupervisedSandbox
from clawgym_env.sandbox.threads import in_thread

if TYPE_CHECKING:
    from clawgym_env.sandbox.docker_engine import DockerEngine
    from clawgym_env.sandbox.images import ImageStore

_logger = logging.getLogger(__name__)

_FOLDER_PREFIX = "clawgym-docker-"
_FIRST_CONTACT_S = 60.0
_LOOK_AGAIN_S = 0.5


class DockerBackend:
    """Opens sandboxes as containers.

    Args:
        url: of the engine's socket (`unix:///run/podman/podman.sock`); None for `DOCKER_HOST`, else the usual place.
        image: for tasks that bring none, also by name; None for this machine's own /usr.
        runtime: of the engine (`runsc`, `kata`); None for its own choice.
        max_starts: how many containers are started at once.
        inputs: what builds of images need on this machine.
    """

    name = "docker"

    def __init__(
        self,
        *,
        url: str | None = None,
        image: Image | str | None = None,
        runtime: str | None = None,
        max_starts: int = 6,
        inputs: BuildInputs | None = None,
    ) -> None:
        self._url = url
        self._image = Image(name=image) if isinstance(image, str) else image
        self._runtime = runtime
        self._max_starts = max_starts
        self._inputs = inputs
        self._connected: tuple[DockerEngine, ImageStore] | None = None
        self._connecting = threading.Lock()

    @property
    def capabilities(self) -> Capabilities:
        """How strong the limits are here."""
        return Capabilities(memory="tree", processes="tree", cpus="tree", images=True)

    async def open(self, spec: SandboxSpec) -> DockerSandbox:
        """Open a sandbox; see `SandboxBackend.open`."""
        if spec.image is None and self._image is not None:
            spec = spec.model_copy(update={"image": self._image})
        engine, images = await in_thread(self._connect)
        return await DockerSandbox(spec, engine=engine, images=images, runtime=self._runtime).start()

    def images(self) -> ImageStore:
        """Return the engine's images; blocks until the engine answers.

        Raises:
            SandboxError: there is no engine, or no library to talk to it.
        """
        return self._connect()[1]

    async def reap(self, *, dry_run: bool = False) -> Sequence[str]:
        """Remove containers whose controller is dead or whose lifetime is over; see `SandboxBackend.reap`."""
        return await in_thread(lambda: [*self._reap_containers(dry_run), *_reap_folders(dry_run)])

    def _reap_containers(self, dry_run: bool) -> list[str]:
        try:
            engine, _ = self._connect()
        except SandboxError as error:
            _logger.debug("No containers to look for: %s", error)
            return []
        removed = []
        for container in engine.containers():
            if not owner_alive(container.owner) or container.deadline < time.time():
                try:
                    if not dry_run:
                        engine.remove(container.name)
                    removed.append(container.name)
                except SandboxError as error:
                    _logger.warning("%s", error)
        return removed

    def _connect(self) -> tuple[DockerEngine, ImageStore]:
        with self._connecting:
            if self._connected is None:
                try:
                    require_package("docker")
                except MissingPackage as error:
                    raise SandboxError(str(error)) from error
                from clawgym_env.sandbox.docker_engine import DockerEngine
                from clawgym_env.sandbox.images import ImageStore

                engine = DockerEngine(self._url, max_starts=self._max_starts)
                weakref.finalize(self, engine.close)
                self._connected = engine, ImageStore(engine.client, inputs=self._inputs)
            return self._connected


class DockerSandbox(SupervisedSandbox):
    """One open container. Made by `DockerBackend.open`."""

    def __init__(self, spec: SandboxSpec, *, engine: DockerEngine, images: ImageStore, runtime: str | None) -> None:
        super().__init__(spec)
        self._engine = engine
        self._images = images
        self._runtime = runtime
        self._run_id = uuid.uuid4().hex[:12]
        self.container = f"clawgym-{self._run_id}"
        """Its name in the engine."""
        self._launching: asyncio.Future[socket.socket] | None = None

    async def _start(self) -> None:
        self._launching = in_thread(self._launch)
        self._control.attach(await asyncio.shield(self._launching))
        limits = rlimits(self._spec, with_groups=True)
        if self._spec.image is not None and self._spec.image.writable:
            # Few engines can bound a container's own disk; a file that grows for ever is how one is filled by mistake.
            limits[resource.RLIMIT_FSIZE] = self._spec.disk_mb << 20
        try:
            async with asyncio.timeout(_FIRST_CONTACT_S):
                await asyncio.shield(self._control.ready)
                await self._control.request("limits", limits)
        except TimeoutError as error:
            raise SandboxError(
                f"Expected an answer from {self.container}, got none in {_FIRST_CONTACT_S} s."
            ) from error

    async def _end(self) -> None:
        if self._launching is None:
            return
        # A thread cannot be cancelled: until it is over, a container may still come into being.
        (outcome,) = await asyncio.gather(self._launching, return_exceptions=True)
        if isinstance(outcome, socket.socket) and not self._control.attached:
            outcome.close()
        self._control.close()  # hung up on, the supervisor ends sooner than the engine kills it
        try:
            await in_thread(lambda: self._engine.remove(self.container))
        except SandboxError as error:
            _logger.error("Left %s to the reaper: %s", self.container, error)

    def _launch(self) -> socket.socket:
        """Start the container and return the socket to its supervisor. Runs in a thread."""
        image = self._images.resolve(self._spec.image)
        self._environment = docker_spec.environment(self._spec, image)
        with _Door() as door:
            config = docker_spec.container_config(
                self._spec,
                image,
                run=self._run_id,
                socket_folder=door.folder,
                seccomp=door.write(docker_profile()) if self._engine.is_podman else docker_profile(),
                runtime=self._runtime,
            )
            self._engine.start(self.container, config, wanted=self._wanted)
            deadline = time.monotonic() + _FIRST_CONTACT_S
            while self._wanted() and time.monotonic() < deadline:
                if connected := door.answer(_LOOK_AGAIN_S):
                    return connected
                if not self._engine.is_running(self.container):
                    raise SandboxError(
                        f"Expected the supervisor to start in a container of {image.tag}, got its end before a word. "
                        f"Is the image for this machine's processor, {platform.machine()}?"
                    )
        raise SandboxError(
            f"Expected a container of {image.tag} to answer within {_FIRST_CONTACT_S:.0f} s, got none. Does the engine "
            f"run on this machine and see its {tempfile.gettempdir()}?"
        )

    def _wanted(self) -> bool:
        return self._closing is None


class _Door:
    """A socket in a folder that is shown to one container, until one process has come through."""

    def __init__(self) -> None:
        # The outer folder keeps other users of this machine out; the inner one is shown, and open to any user inside.
        self._outer = Path(tempfile.mkdtemp(prefix=f"{_FOLDER_PREFIX}{owner_tag()}-"))
        self.folder = self._outer / "host"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.folder.mkdir()
            self.folder.chmod(0o755)
            folder = os.open(self.folder, os.O_PATH)
            try:
                name = f"/proc/self/fd/{folder}/{SOCKET_NAME}"  # the folder's own path may be too long for a socket
                self._listener.bind(name)
                os.chmod(name, 0o666)
            finally:
                os.close(folder)
            self._listener.listen(1)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(self, timeout_s: float) -> socket.socket | None:
        """Return the first connection, or None if nobody comes in time."""
        self._listener.settimeout(timeout_s)
        try:
            return self._listener.accept()[0]
        except TimeoutError:
            return None

    def write(self, text: str) -> str:
        """Write a file that the engine finds, and no container; return its path."""
        path = self._outer / "file"
        path.write_text(text)
        return str(path)

    def close(self) -> None:
        """Remove the socket and its folders; the container keeps an empty one in which nothing can be made."""
        self._listener.close()
        shutil.rmtree(self._outer, ignore_errors=True)


def _reap_folders(dry_run: bool) -> list[str]:
    """Remove what a controller left that died while it opened a sandbox."""
    removed = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER_PREFIX}*"):
        if not owner_alive(folder.name.removeprefix(_FOLDER_PREFIX)):
            if not dry_run:
                shutil.rmtree(folder, ignore_errors=True)
            removed.append(str(folder))
    return removed
