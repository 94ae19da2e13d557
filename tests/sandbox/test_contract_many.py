"""Contract of every backend: many at once, and ends of every kind. Nothing is left of any of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from contract import InSandbox, every_backend, isolated, leftovers

from clawgym_env.errors import SandboxError
from clawgym_env.sandbox.base import WORKDIR, Sandbox, SandboxBackend, SandboxSpec

pytestmark = every_backend


async def _use(backend: SandboxBackend, index: int) -> bytes:
    sandbox = await backend.open(SandboxSpec())
    try:
        await sandbox.write_file("index", str(index).encode())
        results = await asyncio.gather(*(sandbox.exec(["cat", "index"]) for _ in range(3)))
        assert len({result.stdout for result in results}) == 1
        return results[0].stdout
    finally:
        await sandbox.close()


def test_thirty_two_at_once(backend: SandboxBackend) -> None:
    async def main() -> list[bytes]:
        found = await asyncio.gather(*(_use(backend, index) for index in range(32)))
        assert leftovers(backend) == []
        return found

    assert asyncio.run(main()) == [str(index).encode() for index in range(32)]


@pytest.mark.slow
def test_a_hundred_are_open_at_once(backend: SandboxBackend) -> None:
    async def main() -> None:
        sandboxes = await asyncio.gather(*(backend.open(SandboxSpec()) for _ in range(100)))
        try:
            assert {result.exit_code for result in await asyncio.gather(*(s.exec(["true"]) for s in sandboxes))} == {0}
        finally:
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
        assert leftovers(backend) == []

    asyncio.run(main())


def test_a_cancelled_open_leaves_nothing(backend: SandboxBackend) -> None:
    async def main() -> None:
        cancelled = 0
        for delay in (0.0, 0.005, 0.02, 0.04, 0.2):
            opening = asyncio.create_task(backend.open(SandboxSpec(env={"X": "1"})))
            await asyncio.sleep(delay)
            opening.cancel()
            try:
                await (await opening).close()  # it was open by then
            except asyncio.CancelledError:
                cancelled += 1
        assert cancelled > 0 or not isolated(backend)  # the fake is open at once
        assert leftovers(backend) == []

    asyncio.run(main())


def test_a_cancelled_copy_leaves_a_sandbox_that_works(in_sandbox: InSandbox, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with (tmp_path / "source" / "big").open("wb") as file:
        file.truncate(50 << 20)

    async def body(sandbox: Sandbox) -> None:
        copies: list[Callable[[], Awaitable[object]]] = [
            lambda: sandbox.copy_in(tmp_path / "source", WORKDIR),
            lambda: sandbox.copy_out(WORKDIR, tmp_path / "target"),
            lambda: sandbox.write_file("file", bytes(20 << 20)),
            lambda: sandbox.read_file("file"),
        ]
        for copy in copies:
            for delay in (0.0, 0.01, 0.03):
                running = asyncio.ensure_future(copy())
                await asyncio.sleep(delay)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        await sandbox.copy_in(tmp_path / "source", WORKDIR)
        assert (await sandbox.exec(["stat", "-c", "%s", "big"])).stdout == f"{50 << 20}\n".encode()

    in_sandbox(body)


def test_a_cancelled_close_has_closed_when_it_returns(backend: SandboxBackend) -> None:
    async def main() -> None:
        for delay in (0.0, 0.001, 0.02):
            sandbox = await backend.open(SandboxSpec())
            await sandbox.exec(["sh", "-c", "(setsid sleep 1000 &)"])
            closing = asyncio.create_task(sandbox.close())
            await asyncio.sleep(delay)
            closing.cancel()
            await asyncio.sleep(0)
            closing.cancel()  # impatient
            await asyncio.gather(closing, return_exceptions=True)
            assert leftovers(backend) == []

    asyncio.run(main())


def test_close_is_idempotent_and_ends_what_runs(backend: SandboxBackend) -> None:
    async def main() -> None:
        sandbox = await backend.open(SandboxSpec())
        running = asyncio.create_task(sandbox.exec(["sleep", "1000"]))
        await asyncio.sleep(0.1)
        await asyncio.gather(*(sandbox.close() for _ in range(5)))
        await sandbox.close()
        with pytest.raises(SandboxError):
            await running
        assert leftovers(backend) == []

    asyncio.run(main())


def test_a_closed_sandbox_does_nothing_any_more(backend: SandboxBackend, tmp_path: Path) -> None:
    async def main() -> None:
        sandbox = await backend.open(SandboxSpec())
        await sandbox.close()
        for action in (
            sandbox.exec(["true"]),
            sandbox.kill_all(),
            sandbox.read_file("x"),
            sandbox.write_file("x", b""),
            sandbox.copy_in(tmp_path, WORKDIR),
            sandbox.copy_out(WORKDIR, tmp_path / "target"),
            sandbox.listen(8080),
        ):
            with pytest.raises(SandboxError):
                await action

    asyncio.run(main())


def test_a_sandbox_remembers_what_was_asked_for(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert sandbox.spec == SandboxSpec(memory_mb=100, env={"A": "1"})

    in_sandbox(body, memory_mb=100, env={"A": "1"})
