"""What every engine and every sandbox backend keeps, as checks for those of one's own.

`clawgym_env.testing` is where to import them from. The other pieces have theirs elsewhere: a learner
`learners.testing.check_learner`, a harness `clawgym fidelity`, tasks and graders `clawgym tasks check --run`.
Invariant: a check asserts what the contract's docstrings say and nothing that only our own implementations do.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np

from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.errors import SandboxError
from clawgym_env.messages import Message
from clawgym_env.sandbox.base import Sandbox, SandboxBackend, SandboxSpec

_CONNECT = "import socket, sys; socket.create_connection(('127.0.0.1', int(sys.argv[1])), 20).sendall(b'inside')"


def check_engine(engine: Engine, *, max_tokens: int = 8) -> None:
    """Assert the contract of `engine.base.Engine`; the engine is closed then. Not to be called on an event loop.

    Args:
        max_tokens: sampled by each call, at most.

    Raises:
        AssertionError: with what is wrong.
    """
    asyncio.run(_check_engine(engine, max_tokens))


async def _check_engine(engine: Engine, max_tokens: int) -> None:
    from clawgym_env.rendering import message_dicts

    assert isinstance(engine, Engine), "an engine has every member of engine.base.Engine"
    prompt = engine.renderer.render_ids(message_dicts([Message("user", "Say something.")]), add_generation_prompt=True)
    version = engine.policy_version
    asked = (engine.generate(prompt, SamplingParams(max_tokens=max_tokens, seed=seed)) for seed in range(4))
    for generation in await asyncio.gather(*asked):
        _check_generation(generation, engine, max_tokens, version)

    abandoned = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=max_tokens, seed=4)))
    await asyncio.sleep(0)
    abandoned.cancel()
    with suppress(asyncio.CancelledError):
        await abandoned

    applied: list[int] = []
    now = await asyncio.to_thread(engine.update_weights, lambda: applied.append(1))
    assert applied == [1], "update_weights runs what it is given, once, before it returns"
    assert version < now == engine.policy_version, "update_weights counts policy_version up and returns it"
    await engine.pause()
    later = asyncio.create_task(engine.generate(prompt, SamplingParams(max_tokens=max_tokens, seed=5)))
    await engine.resume()
    _check_generation(await later, engine, max_tokens, now)
    for _ in range(2):
        await engine.close()  # idempotent


def _check_generation(generation: Generation, engine: Engine, max_tokens: int, version: int) -> None:
    ids, logprobs, spans = generation.token_ids, generation.logprobs, generation.policy_versions
    stops = set(engine.renderer.get_stop_token_ids())
    assert ids.ndim == 1, "token_ids are a vector"
    assert ids.dtype == np.int32, "token_ids are int32"
    assert logprobs.shape == ids.shape, "a log-probability per id"
    assert logprobs.dtype == np.float32, "log-probabilities are float32"
    assert (np.isfinite(logprobs) & (logprobs <= 0)).all(), "log-probabilities are finite, in nats"
    assert len(ids) <= max_tokens, "no more than max_tokens are sampled"
    assert not stops & set(ids[:-1].tolist()), "generation ends at the first stop id"
    ended = bool(len(ids)) and int(ids[-1]) in stops
    assert ended == (generation.finish_reason == "stop"), 'the finish reason is "stop" where a stop id is the last'
    starts = [span.start for span in spans]
    assert starts == [0, *(span.end for span in spans)][: len(spans)], "version spans are contiguous"
    assert (spans[-1].end if spans else 0) == len(ids), "version spans cover all ids"
    assert {span.version for span in spans} <= {version}, "tokens are dated by the version that sampled them"


def check_backend(backend: SandboxBackend) -> None:
    """Assert the contract of `sandbox.base.SandboxBackend` on one sandbox. Not to be called on an event loop.

    Raises:
        AssertionError: with what is wrong.
        SandboxError: the backend cannot open one here.
    """
    asyncio.run(_check_backend(backend))


async def _check_backend(backend: SandboxBackend) -> None:
    assert isinstance(backend, SandboxBackend), "a backend has every member of sandbox.base.SandboxBackend"
    sandbox = await backend.open(SandboxSpec(memory_mb=256, env={"COLOUR": "green"}))
    try:
        assert isinstance(sandbox, Sandbox), "a sandbox has every member of sandbox.base.Sandbox"
        await _check_commands(sandbox)
        await _check_files(sandbox)
        if backend.capabilities.isolated:
            await _check_listener(sandbox)
        await sandbox.kill_all()
        assert await sandbox.read_file("kept") == b"kept\x00", "kill_all keeps the files"
    finally:
        for _ in range(2):
            await sandbox.close()  # idempotent
    try:
        await sandbox.exec(["true"])
    except SandboxError:
        pass
    else:
        raise AssertionError("a closed sandbox refuses commands with a SandboxError")
    assert all(isinstance(name, str) for name in await backend.reap(dry_run=True)), "reap returns names"


async def _check_commands(sandbox: Sandbox) -> None:
    script = 'printf "%s|%s|" "$COLOUR" "$SHAPE"; cat; pwd >&2; exit 3'
    done = await sandbox.exec(["sh", "-c", script], env={"SHAPE": "round"}, stdin=b"said")
    assert done.exit_code == 3, "exit codes are those of commands"
    assert done.stdout == b"green|round|said", "commands get the spec's variables, their own, and stdin"
    assert Path(done.stderr.decode().strip()).name == Path(sandbox.spec.workdir).name, "commands run in the workspace"
    slow = await sandbox.exec(["sh", "-c", "sleep 100"], timeout_s=0.2)
    assert slow.timed_out, "a command that takes too long is killed"
    long = await sandbox.exec(["sh", "-c", "printf 12345"], max_output=3)
    assert (long.stdout, long.dropped_bytes) == (b"123", 2), "the head of an output is kept, the rest is counted"


async def _check_files(sandbox: Sandbox) -> None:
    await sandbox.write_file("kept", b"kept\x00", mode=0o600)
    assert await sandbox.read_file("kept") == b"kept\x00", "files hold what was written"
    with suppress(OSError):
        await sandbox.read_file("missing")
        raise AssertionError("reading what is not there is an OSError")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in"), Path(folder, "out")
        (source / "deep").mkdir(parents=True)
        (source / "deep" / "file").write_bytes(b"deep")
        await sandbox.copy_in(source, f"{sandbox.spec.workdir}/copied")
        await sandbox.copy_out(f"{sandbox.spec.workdir}/copied", target)
        assert (target / "deep" / "file").read_bytes() == b"deep", "folders come in and out whole"
        await sandbox.copy_out(f"{sandbox.spec.workdir}/gone", target / "gone")  # no error: it comes out empty
        assert not any((target / "gone").glob("*")), "a folder that is gone comes out empty"


async def _check_listener(sandbox: Sandbox) -> None:
    loop, port = asyncio.get_running_loop(), 8321
    with await sandbox.listen(port) as listener:
        listener.setblocking(False)
        client = asyncio.create_task(sandbox.exec(["python3", "-c", _CONNECT, str(port)], timeout_s=60))
        async with asyncio.timeout(60):
            connection, _ = await loop.sock_accept(listener)
        with connection:
            assert await loop.sock_recv(connection, 16) == b"inside", "listen binds inside the sandbox"
        assert (await client).exit_code == 0, "the sandbox reaches its listener"
