"""What holds for the whole suite."""

from __future__ import annotations

import os
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Listen to Ctrl-C even where the suite was started in the background: shells make such jobs deaf to it, children
    inherit that, and the tests of clean ends would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def docker_host() -> str:
    """Return the address of a Docker engine; without one the test is skipped, or fails where one is required."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    required = os.environ.get("CLAWGYM_REQUIRE_DOCKER", "0") not in ("", "0")
    try:
        import docker

        client = docker.DockerClient(host, timeout=10)
        client.ping()
        client.close()
    except Exception as error:
        (pytest.fail if required else pytest.skip)(f"No Docker engine at {host} (scripts/with-docker): {error}")
    return host
