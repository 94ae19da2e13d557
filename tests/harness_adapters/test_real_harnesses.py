"""Every harness for real: in the local sandbox, over a real socket, against the real proxy and a scripted policy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_sandbox import CONTEXT
from real_run import real_run

from clawgym_env.cache import cache_dir
from clawgym_env.engine.scripted import Script, ScriptedEngine, tool_call
from clawgym_env.harness import HarnessAdapter, HarnessExit
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.registry import adapter
from clawgym_env.sandbox.base import WORKDIR, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.trace.prefix_tree import PrefixTree

PORT = 8080


def installed(harness: HarnessAdapter) -> Path:
    """Return the install cache with a harness in it."""
    cache = cache_dir()
    harness.install(cache)
    return cache


async def play(
    harness: HarnessAdapter, replies: Script, cache: Path, *, context_length: int = 200_000
) -> tuple[HarnessExit, PrefixTree, bytes, ScriptedEngine]:
    """Run one rollout by hand and return the exit, the tree and what is in `a.txt`."""
    engine = ScriptedEngine(replies, context_length=context_length)
    proxy = ProxyServer()
    await proxy.start()
    spec = SandboxSpec(memory_mb=harness.memory_mb, mounts=harness.mounts(cache))
    sandbox = await LocalBackend().open(spec)
    try:
        session = proxy.open_session(engine, adapter=harness)
        listener = await proxy.serve(await sandbox.listen(PORT), session)
        context = replace(
            CONTEXT,
            instruction="Write hi into a.txt.",
            base_url=f"http://127.0.0.1:{PORT}/r/{session.key}",
            context_length=engine.context_length,
        )
        done = await asyncio.wait_for(harness.run(sandbox, context), 420)
        tree = await session.settle()
        await listener.close()
        return done, tree, await sandbox.read_file(f"{WORKDIR}/a.txt"), engine
    finally:
        await sandbox.close()
        await proxy.close()


WRITE = "write", {"path": "a.txt", "content": "hi"}
CLAUDE_WRITE = "Write", {"file_path": f"{WORKDIR}/a.txt", "content": "hi"}
CLAUDE_BASH = "Bash", {"command": "printf hi > a.txt"}

CASES = [
    ("mini", *WRITE),
    ("mini?dialect=messages", *WRITE),
    pytest.param("pi", *WRITE, marks=pytest.mark.harness),
    pytest.param("claude-code", *CLAUDE_WRITE, marks=pytest.mark.harness),
    pytest.param("claude-code?bare", *CLAUDE_BASH, marks=pytest.mark.harness),
    pytest.param("claude-code?tools=Bash,Write", *CLAUDE_WRITE, marks=pytest.mark.harness),
    pytest.param("codex", "exec_command", {"cmd": "printf hi > a.txt"}, marks=pytest.mark.harness),
    pytest.param("codex?bare", "exec_command", {"cmd": "printf hi > a.txt"}, marks=pytest.mark.harness),
    pytest.param("openclaw", *WRITE, marks=pytest.mark.harness),
]


@pytest.mark.parametrize(("spec", "tool", "arguments"), CASES)
def test_it_does_the_task_and_every_sampled_token_is_trained(spec: str, tool: str, arguments: dict[str, str]) -> None:
    replies = [f"On it.\n{tool_call(tool, **arguments)}", "Done: a.txt says hi."]
    harness = adapter(spec)
    done, tree, written, engine = asyncio.run(play(harness, replies, installed(harness)))
    assert (done.exit_code, done.response, written) == (0, "Done: a.txt says hi.", b"hi"), done
    assert [call.kind for call in tree.calls] == ["main", "main"], tree.outline()
    assert [call.lineage_parent for call in tree.calls] == [None, 0]
    assert all(call.state == "live" and not call.starved for call in tree.calls)
    said = [engine.tokenizer.decode([int(token) for token in call.token_ids]) for call in tree.calls]
    assert [text.split("<|im_end|>")[0] for text in said] == replies
    assert tree.buckets()["trained"] == tree.num_completion_tokens


ELSEWHERE = "http://127.0.0.1:9"
REDIRECTS = {
    ".env": f"HTTP_PROXY={ELSEWHERE}\nHTTPS_PROXY={ELSEWHERE}\nGEMINI_SANDBOX=docker\n",
    ".claude/settings.json": json.dumps({"env": {"ANTHROPIC_BASE_URL": ELSEWHERE}, "model": "other"}),
    ".codex/config.toml": f'model_provider = "x"\n[model_providers.x]\nname = "x"\nbase_url = "{ELSEWHERE}/v1"\n',
    ".gemini/settings.json": json.dumps({"security": {"auth": {"selectedType": "oauth-personal"}}}),
    ".pi/settings.json": json.dumps({"defaultProvider": "openai", "defaultModel": "other"}),
    ".qwen/settings.json": json.dumps(
        {"$version": 4, "security": {"auth": {"selectedType": "qwen-oauth", "baseUrl": ELSEWHERE}}, "proxy": ELSEWHERE}
    ),
    "opencode.json": json.dumps({"provider": {"clawgym": {"options": {"baseURL": ELSEWHERE}}}, "model": "x/x"}),
}
"""What a task's folder may hold that names another server than the proxy."""


@pytest.mark.harness
@pytest.mark.parametrize("spec", ["claude-code", "codex", "gemini-cli", "opencode?title=false", "pi", "qwen-code"])
def test_settings_in_the_workspace_lead_no_call_elsewhere(spec: str) -> None:
    run = real_run(spec, ["Done."], files={name: text.encode() for name, text in REDIRECTS.items()})
    assert (run.exit.exit_code, run.exit.response, run.said()) == (0, "Done.", ["Done."]), run.exit


@pytest.mark.parametrize(("spec", "tool", "arguments"), [CASES[0], CASES[2], CASES[3]])
def test_two_rollouts_of_a_task_share_their_prompts(spec: str, tool: str, arguments: dict[str, str]) -> None:
    harness = adapter(spec)
    replies = [tool_call(tool, **arguments), "Done."]
    cache = installed(harness)
    one, other = (asyncio.run(play(harness, replies, cache))[1] for _ in range(2))
    assert [one.prompt(i).tolist() for i in range(2)] == [other.prompt(i).tolist() for i in range(2)]
