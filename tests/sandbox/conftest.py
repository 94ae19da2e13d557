"""Every test of the contract runs against every backend that this machine has."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from clawgym_env.sandbox.base import Sandbox, SandboxBackend, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend

T = TypeVar("T")


@pytest.fixture(params=["local"])
def backend(request: pytest.FixtureRequest) -> SandboxBackend:
    assert request.param == "local"
    return LocalBackend()


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
