"""What holds for the whole suite."""

from __future__ import annotations

import gc
import os
import signal
import warnings

import hypothesis
import pytest

# An example's time says how busy the machine is, nothing of the code; a slow draw says no more.
hypothesis.settings.register_profile("clawgym", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("clawgym")


def pytest_configure(config: pytest.Config) -> None:
    """Listen to Ctrl-C even where the suite was started in the background: shells make such jobs deaf to it, children
    inherit that, and the tests of clean ends would wait for ever."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def docker_host() -> str:
    """Return the address of a Docker engine; without one the test is skipped, or fails where one is required."""
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    fault = _docker_fault(host)
    if fault:
        required = os.environ.get("CLAWGYM_REQUIRE_DOCKER", "0") not in ("", "0")
        (pytest.fail if required else pytest.skip)(f"No Docker engine at {host} (see scripts/with-docker): {fault}")
    return host


def _docker_fault(host: str) -> str:
    """Return why there is no engine; empty where one answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the client leaves a socket that could not connect
        try:
            import docker

            client = docker.DockerClient(host, timeout=30)
            client.close()
            fault = ""
        except Exception as error:
            fault = str(error)
        gc.collect()
    return fault
