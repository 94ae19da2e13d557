"""One rollout of a harness by hand: in the local sandbox, over a real socket, on the real proxy, with a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from fake_sandbox import CONTEXT

from clawgym_env.cache import cache_dir
from clawgym_env.engine.scripted import Script, ScriptedEngine
from clawgym_env.harness import HarnessAdapter, HarnessExit
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.registry import adapter
from clawgym_env.sandbox.base import WORKDIR, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks.task import McpServer
from clawgym_env.trace.calls import CallKind, ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree

PORT = 8080
TIMEOUT_S = 420
"""Generous: many products start ten times slower on a busy machine."""


@dataclass(frozen=True)
class RealRun:
    """What came of it."""

    exit: HarnessExit
    tree: PrefixTree
    engine: ScriptedEngine
    written: bytes
    """What is in `a.txt`; empty where there is none."""

    def calls(self, kind: CallKind = "main") -> list[ModelCall]:
        return [call for call in self.tree.calls if call.kind == kind]

    def prompt(self, call: ModelCall) -> str:
        return self.engine.tokenizer.decode(self.tree.prompt(call.index).tolist())

    def said(self, kind: CallKind = "main") -> list[str]:
        """Return the texts that were sampled."""
        texts = [self.engine.tokenizer.decode(call.token_ids.tolist()) for call in self.calls(kind)]
        return [text.split("<|im_end|>")[0] for text in texts]


def real_run(
    harness: HarnessAdapter | str,
    script: Script,
    *,
    instruction: str = "Write hi into a.txt.",
    context_length: int = 200_000,
    files: Mapping[str, bytes] | None = None,
    mcp_servers: tuple[McpServer, ...] = (),
) -> RealRun:
    """Install the harness where it is missing, and run it once.

    Args:
        files: what is in the workspace, by name.
    """
    chosen = adapter(harness)
    chosen.install(cache_dir())

    async def run() -> RealRun:
        engine = ScriptedEngine(script, context_length=context_length)
        proxy = ProxyServer()
        await proxy.start()
        spec = SandboxSpec(memory_mb=chosen.memory_mb, mounts=chosen.mounts(cache_dir()))
        sandbox = await LocalBackend().open(spec)
        try:
            for name, data in (files or {}).items():
                await sandbox.write_file(f"{WORKDIR}/{name}", data)
            session = proxy.open_session(engine, adapter=chosen)
            listener = await proxy.serve(await sandbox.listen(PORT), session)
            context = replace(
                CONTEXT,
                instruction=instruction,
                base_url=f"http://127.0.0.1:{PORT}/r/{session.key}",
                context_length=context_length,
                mcp_servers=mcp_servers,
            )
            async with asyncio.timeout(TIMEOUT_S):
                done = await chosen.run(sandbox, context)
            tree = await session.settle()
            await listener.close()
            try:
                written = await sandbox.read_file(f"{WORKDIR}/a.txt")
            except OSError:
                written = b""
            return RealRun(done, tree, engine, written)
        finally:
            await sandbox.close()
            await proxy.close()

    return asyncio.run(run())


def assert_one_trajectory(run: RealRun, replies: list[str]) -> None:
    """Check that the main agent said exactly `replies`, on one path where every sampled token is trained.

    Token for token: each prompt begins with the one before it and the reply to that.
    """
    calls, tree = run.calls(), run.tree
    assert run.said() == replies, tree.outline()
    assert all(call.state == "live" and call.drift_reason is None and not call.starved for call in calls)
    for before, after in itertools.pairwise(calls):
        assert (after.lineage_parent, after.prefix_parent) == (before.index, before.index), tree.outline()
        history = [*tree.prompt(before.index), *before.token_ids]
        assert tree.prompt(after.index).tolist()[: len(history)] == history
    assert len(tree.trajectories()) == 1
    assert tree.buckets()["trained"] == sum(len(call.token_ids) for call in calls)
