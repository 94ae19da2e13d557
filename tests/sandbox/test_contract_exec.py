"""Contract of every backend: what a command is given, and what comes back of it."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from contract import InSandbox, every_backend, isolated, python

from clawgym_env.sandbox.base import WORKDIR, Sandbox, SandboxBackend

pytestmark = every_backend


def test_a_command_gets_stdin_environment_and_folder(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        script = "cat; echo $A $B; pwd; echo err >&2; exit 3"
        result = await sandbox.exec(["sh", "-c", script], env={"B": "two"}, cwd="/tmp", stdin=b"in\n")
        assert (result.exit_code, result.stderr) == (3, b"err\n")
        assert result.stdout.startswith(b"in\none two\n/")
        assert result.stdout.endswith(b"/tmp\n")
        assert not result.timed_out
        assert result.dropped_bytes == 0
        assert (await sandbox.exec(["pwd"])).stdout.decode().strip().endswith(WORKDIR)

    in_sandbox(body, env={"A": "one"})


def test_a_commands_own_environment_wins_over_the_sandboxs(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "echo $A $B $LANG"], env={"A": "command", "LANG": "C"})
        assert result.stdout == b"command sandbox C\n"

    in_sandbox(body, env={"A": "sandbox", "B": "sandbox"})


def test_a_relative_folder_is_below_the_workspace(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        await sandbox.write_file("a b/ü/file", b"content")
        assert (await sandbox.exec(["cat", "file"], cwd="a b/ü")).stdout == b"content"

    in_sandbox(body)


def test_the_environment_is_clean(
    in_sandbox: InSandbox, backend: SandboxBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")

    async def body(sandbox: Sandbox) -> None:
        lines = (await sandbox.exec(["env"])).stdout.decode().splitlines()
        names = {line.partition("=")[0] for line in lines} - {"PWD", "SHLVL", "_"}
        assert names - {"CLAWGYM_FAKE"} == {"PATH", "HOME", "LANG", "TERM", "TZ"}
        if isolated(backend):
            assert "HOME=/root" in lines
            assert "CLAWGYM_FAKE" not in names

    in_sandbox(body)


def test_a_command_that_cannot_start_answers_as_a_shell_would(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        missing = await sandbox.exec(["no-such-program"])
        assert (missing.exit_code, missing.stderr) == (127, b"no-such-program: No such file or directory\n")
        await sandbox.write_file("plain", b"text")
        assert (await sandbox.exec(["./plain"])).exit_code == 126
        assert (await sandbox.exec(["true"], cwd="/no/such/folder")).exit_code == 127

    in_sandbox(body)


def test_a_command_killed_by_a_signal_has_a_negative_exit_code(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["sh", "-c", "kill -TERM $$"])).exit_code == -15

    in_sandbox(body)


def test_long_arguments_and_much_stdin_pass(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        words = ["x" * 100_000] * 15
        result = await sandbox.exec(["sh", "-c", "echo $#; wc -c", "sh", *words], stdin=bytes(20 << 20))
        assert result.stdout.split() == [b"15", str(20 << 20).encode()]

    in_sandbox(body)


def test_arguments_are_bytes_of_any_kind(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        words = ["", " ", "$HOME", "new\nline", "'\"\\", "ü漢🙂", "\udcff\udc80", "-n"]
        result = await sandbox.exec(["printf", "%s|", *words])
        assert result.stdout == "".join(f"{word}|" for word in words).encode("utf-8", "surrogateescape")

    in_sandbox(body)


def test_unread_stdin_is_no_error(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        assert (await sandbox.exec(["true"], stdin=bytes(5 << 20))).exit_code == 0

    in_sandbox(body)


def test_what_goes_in_comes_out_while_it_goes_in(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        data = bytes(range(256)) * (16 << 10)
        result = await sandbox.exec(["sh", "-c", "tee /dev/stderr"], stdin=data, timeout_s=60)
        assert result.stdout == result.stderr == data

    in_sandbox(body)


def test_output_beyond_the_limit_is_dropped_and_counted_without_using_memory(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        script = "printf head; head -c 100000000 /dev/zero; printf x >&2"
        tracemalloc.start()
        try:
            result = await sandbox.exec(["sh", "-c", script], max_output=1000, timeout_s=120)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert result.exit_code == 0
        assert result.stdout == b"head" + bytes(996)
        assert result.stderr == b"x"
        assert result.dropped_bytes == 100_000_004 - 1000
        assert peak < 16 << 20

    in_sandbox(body)


def test_clocks_are_the_hosts_and_the_time_zone_is_utc(in_sandbox: InSandbox) -> None:
    async def body(sandbox: Sandbox) -> None:
        before = time.time(), time.monotonic()
        clocks = await python(sandbox, "import time; print(time.time(), time.monotonic(), *time.tzname)")
        after = time.time(), time.monotonic()
        wall, monotonic, *zone = clocks.split()
        assert before[0] - 1 <= float(wall) <= after[0] + 1
        assert before[1] - 1 <= float(monotonic) <= after[1] + 1
        assert zone == ["UTC", "UTC"]

    in_sandbox(body)
