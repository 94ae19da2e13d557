"""Every attack is tried on every isolated backend of this machine."""

from __future__ import annotations

import pytest

from clawgym_env.sandbox.base import SandboxBackend
from clawgym_env.sandbox.docker import DockerBackend
from clawgym_env.sandbox.local import LocalBackend


@pytest.fixture(params=["local", "docker"], scope="session")
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    if request.param == "docker":
        return DockerBackend(url=request.getfixturevalue("docker_host"))
    return LocalBackend()
