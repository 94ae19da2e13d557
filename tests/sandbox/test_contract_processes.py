"""Contract of every backend: who lives how long. Timeouts and cancellations kill trees, daemons and all."""

from __future__ import annotations

import asyncio

import pytest
from contract import DAEMON, InSandbox, count, every_backend, python, unique, until

from clawgym_env.sandbox.base import Sandbox

pytestmark = every_backend


def test_at_a_timeout_the_whole_tree_dies_daemons_included(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        word, other = unique(), unique()
        bystander = asyncio.create_task(sandbox.exec(["sleep", other]))
        script = 'python3 -c "$1" $2; nohup sleep $2 & (setsid sleep $2 &); echo out; sleep $2'
        result = await sandbox.exec(["sh", "-c", script, "sh", DAEMON, word], timeout_s=2)
        assert (result.exit_code, result.timed_out, result.stdout) == (124, True, b"out\n")
        await sandbox.read_file("daemon-started")
        assert await count(sandbox, word) == 0
        assert await count(sandbox, other) == 1
        await sandbox.kill_all()
        assert (await bystander).exit_code == -9

    in_sandbox(body)


def test_a_timeout_that_is_over_at_once_leaves_nothing(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        word = unique()
        results = await asyncio.gather(*(sandbox.exec(["sleep", word], timeout_s=0.001) for _ in range(8)))
        assert all(result.timed_out for result in results)
        assert await count(sandbox, word) == 0

    in_sandbox(body)


def test_a_command_that_ignores_polite_signals_dies_too(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        word = unique()
        script = "trap '' TERM INT HUP; while true; do sleep $0; done"
        assert (await sandbox.exec(["sh", "-c", script, word], timeout_s=0.5)).timed_out
        assert await count(sandbox, word) == 0

    in_sandbox(body)


def test_a_cancelled_command_is_killed(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        word = unique()
        running = asyncio.create_task(sandbox.exec(["sh", "-c", "(setsid sleep $0 &); sleep $0", word]))

        async def started() -> bool:
            return await count(sandbox, word) >= 2

        await until(started)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        async def gone() -> bool:
            return await count(sandbox, word) == 0

        await until(gone)

    in_sandbox(body)


def test_a_daemon_outlives_its_command_until_kill_all(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        word = unique()
        # It holds the command's stdout and goes on writing to it: neither waited for nor killed by SIGPIPE.
        code = ": > ticks; (while true; do echo tick; echo x >> ticks; sleep 0.01; done) & echo started"
        result = await sandbox.exec(["sh", "-c", code, word], timeout_s=20)
        assert result.exit_code == 0
        assert not result.timed_out
        before = len(await sandbox.read_file("ticks"))

        async def grown() -> bool:
            return len(await sandbox.read_file("ticks")) > before + 5

        await until(grown)
        await sandbox.kill_all()
        assert await count(sandbox, word) == 0
        assert await sandbox.read_file("ticks")

    in_sandbox(body)


def test_a_daemon_of_one_command_lives_on_when_another_times_out(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        word = unique()
        await sandbox.exec(["python3", "-c", DAEMON, word])
        assert (await sandbox.exec(["sleep", "1000"], timeout_s=0.2)).timed_out
        assert await count(sandbox, word) == 1
        await sandbox.kill_all()
        assert await count(sandbox, word) == 0

    in_sandbox(body)


def test_orphans_are_reaped(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        code = "import os, time\npid = os.fork()\nif pid: print(pid)\nelse: os.setsid(); time.sleep(0.2)"
        orphans = [int(pid) for _ in range(5) for pid in (await python(sandbox, code)).split()]
        assert len(orphans) == 5

        async def reaped() -> bool:
            look = "import os, sys; print(*(pid for pid in sys.argv[1:] if os.path.exists(f'/proc/{pid}')))"
            return not (await python(sandbox, look, *map(str, orphans))).split()

        await until(reaped)

    in_sandbox(body)


def test_commands_of_one_sandbox_run_side_by_side(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        # Each waits for the next: they end only if all run at once.
        script = "mkdir -p $0; while [ ! -e $1 ]; do sleep 0.02; done"
        waits = [sandbox.exec(["sh", "-c", script, str(i), str((i + 1) % 10)], timeout_s=30) for i in range(10)]
        assert [result.exit_code for result in await asyncio.gather(*waits)] == [0] * 10

    in_sandbox(body)
