"""Every test of the contract runs against every backend: see `contract.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from contract import LOCAL, WALLED
from ordinary_user import pytest_pyfunc_call

from clawgym_env.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from clawgym_env.sandbox.docker import DockerBackend

__all__ = ["pytest_pyfunc_call"]

T = TypeVar("T")


@pytest.fixture(params=WALLED)
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    """A backend by its name. The fake is tried where a file asks for it (`contract.every_backend`): it has no walls,
    so a file that does must hold nothing that could harm the host."""
    if request.param == "docker":
        return DockerBackend(url=request.getfixturevalue("docker_host"))
    return LOCAL[request.param]()


@pytest.fixture
def in_sandbox(backend: SandboxBackend) -> Callable[..., object]:
    """Return a function that runs a coroutine function in an open sandbox and gives back its result."""

    def run(body: Callable[[Sandbox], Awaitable[T]], **spec: object) -> T:
        async def main() -> T:
            sandbox = await backend.open(SandboxSpec.model_validate(spec))
            try:
                return await body(sandbox)
            finally:
                await sandbox.close()

        return asyncio.run(main())

    return run
