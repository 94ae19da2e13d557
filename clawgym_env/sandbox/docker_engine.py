"""A Docker engine on this machine, or Podman behind Docker's API: the few requests that sandboxes need.

Methods block, and may be called from many threads. Invariant: whatever the engine or its library raises arrives as a
`SandboxError`, but for what was asked to go and is gone.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from docker import DockerClient
from docker.errors import APIError, DockerException, NotFound
from docker.utils import kwargs_from_env, parse_host
from requests.exceptions import RequestException

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.docker_spec import DEADLINE, OWNER

_logger = logging.getLogger(__name__)

_TIMEOUT_S = 120
_REMOVE_TIMEOUT_S = 30.0
_UNIX = "http+unix://"


@dataclass(frozen=True, slots=True)
class Container:
    """A container of ours, whoever made it."""

    name: str
    owner: str
    deadline: float


class DockerEngine:
    """One engine.

    Args:
        url: of its unix socket; None for `DOCKER_HOST`, else the usual place.
        max_starts: how many containers are started at once; more only wait for each other in the engine.
    """

    def __init__(self, url: str | None = None, *, max_starts: int = 6) -> None:
        self.client = _connect(url)
        parts = self.client.version().get("Components", ())
        self.is_podman = any("podman" in part["Name"].lower() for part in parts)
        """It takes the path of a seccomp profile where Docker takes its text (4.3)."""
        self._starts = threading.BoundedSemaphore(max_starts)

    def close(self) -> None:
        """Let go of the connections."""
        self.client.close()

    def start(self, name: str, config: Mapping[str, object], *, wanted: Callable[[], bool]) -> None:
        """Create a container and start it, once its turn has come and it is still wanted."""
        with self._starts, _errors("start a container"):
            if wanted():
                self.client.api.create_container_from_config(config, name)  # type: ignore[no-untyped-call]
                self.client.api.start(name)

    def is_running(self, name: str) -> bool:
        """Whether a container is there and its first process has not ended."""
        with _errors("look at a container"):
            try:
                return bool(self.client.api.inspect_container(name)["State"]["Running"])
            except NotFound:
                return False

    def remove(self, name: str) -> None:
        """Kill a container and remove it with its volumes; return once the engine knows it no more, if it ever did.

        The engine reaps the first process before it forgets a container, and the kernel ends that one last.
        """
        deadline = time.monotonic() + _REMOVE_TIMEOUT_S
        with _errors(f"remove {name}"):
            while True:
                try:
                    self.client.api.remove_container(name, v=True, force=True)
                except NotFound:
                    return
                except APIError as error:
                    # Of one that ends at this moment Docker says 409 and Podman 500: it is not gone yet.
                    if time.monotonic() > deadline:
                        raise
                    _logger.debug("Asking again: %s", error)
                time.sleep(0.01)

    def containers(self) -> list[Container]:
        """Return the containers with our labels, in whatever state they are."""
        with _errors("list containers"):
            found = self.client.api.containers(all=True, filters={"label": [OWNER, DEADLINE]})
        listed = []
        for entry in found:
            marks = entry["Labels"]
            # One that is being removed may have lost its name already.
            name, deadline = (entry["Names"] or [entry["Id"]])[0].lstrip("/"), marks[DEADLINE]
            listed.append(Container(name, marks[OWNER], float(deadline) if deadline.isdigit() else float("inf")))
        return listed


def _connect(url: str | None) -> DockerClient:
    address = str(parse_host(url or kwargs_from_env().get("base_url")))
    path = address.removeprefix(_UNIX)
    if path == address:
        raise SandboxError(f"Expected an engine on this machine (unix://...), got {address}.")
    try:
        with socket.socket(socket.AF_UNIX) as probe:  # the library leaks the socket of a connection that fails
            probe.connect(path)
        client = DockerClient(address, version="auto", timeout=_TIMEOUT_S)
    except (OSError, DockerException) as error:
        raise SandboxError(
            f"Expected a Docker engine at {path}, got: {error}. With root and apt a private one starts with: "
            "export DOCKER_HOST=$(scripts/docker-up). Or use sandbox='local'."
        ) from error
    # The library keeps connections by a request's whole path (7.2): they are hoarded, and never used again.
    client.api.headers["Connection"] = "close"
    return client


@contextmanager
def _errors(what: str) -> Iterator[None]:
    try:
        yield
    except (DockerException, RequestException) as error:
        raise SandboxError(f"Expected the Docker engine to {what}, got: {error}") from error
