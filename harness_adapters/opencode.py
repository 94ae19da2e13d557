"""Adapter of opencode (npm `opencode-ai`, a native program), on the chat dialect.

Append-only history, but a call of an unknown tool or with broken arguments comes back as one of `invalid`. Sub-agents
are sessions of their own, told apart by a header; the title of a session and summaries are asked for without tools.
Exit code 1 covers an overflow that it has compacted and gone on from, so it says little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from clawgym_env.harness import HarnessContext, HarnessExit, McpServer
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PRODUCT = NpmProduct(
    name="opencode",
    version="1.18.33",
    package="opencode-ai",
    program="node_modules/opencode-linux-*/bin/opencode",
    native=True,
)
PROVIDER = "clawgym"
OFF_SWITCHES = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "NO_PROXY": "127.0.0.1",
}
TITLE_WORDS = "You are a title generator"
COMPACTION_WORDS = "You are a context summarization agent"


class OpenCodeHarness(InstalledHarness):
    """opencode, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "chat"
    supports_mcp = True
    supports_resume = True
    memory_mb = 1024

    def __init__(self, *, title: bool = True) -> None:
        """Choose whether the policy is asked for the session's title, too: one call of 500 tokens per rollout."""
        self.title = title

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        argv = [*PRODUCT.argv, "run", "--model", f"{PROVIDER}/{context.model}", "--format", "json", "--auto"]
        if context.resume:
            argv.append("--continue")
        elif not self.title:
            argv += ["--title", "Task"]
        # As a file it would come before a workspace's own opencode.json, which could name another server.
        env = {**OFF_SWITCHES, "OPENCODE_CONFIG_CONTENT": json.dumps(config(context))}
        # The instruction goes through stdin: as an argument it would be put in quotes.
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        if any(name.lower() == "x-parent-session-id" for name in headers):
            return "subagent"
        system = request.messages[0].content if request.messages and not request.tools else ""
        if system.startswith(TITLE_WORDS):
            return "auxiliary"
        return "compaction" if system.startswith(COMPACTION_WORDS) else None


def config(context: HarnessContext) -> dict[str, Json]:
    """Return `opencode.json`: one provider, which is the proxy, and the true window.

    It compacts when the last reply's usage passes `input`: one more reply must fit beyond it.
    """
    window, model = context.context_length, f"{PROVIDER}/{context.model}"
    room = min(window // 2, max(context.max_tokens, window // 8))
    limit: dict[str, Json] = {"context": window, "input": window - room, "output": context.max_tokens}
    options: dict[str, Json] = {
        "baseURL": f"{context.base_url}/v1",
        "apiKey": context.api_key,
        "headerTimeout": False,
        "chunkTimeout": False,
    }
    return {
        "provider": {
            PROVIDER: {
                "npm": "@ai-sdk/openai-compatible",
                "options": options,
                "models": {context.model: {"name": context.model, "limit": limit}},
            }
        },
        "enabled_providers": [PROVIDER],
        "model": model,
        "small_model": model,
        "compaction": {"reserved": 0},
        "autoupdate": False,
        "share": "disabled",
        "mcp": {server.name: mcp_entry(server) for server in context.mcp_servers},
    }


def mcp_entry(server: McpServer) -> dict[str, Json]:
    """Return one entry of `mcp`."""
    return {"type": "local", "command": list(server.command), "environment": dict(server.env), "enabled": True}


def final_answer(stdout: bytes) -> str:
    """Return what the model said in its last step, out of the event lines."""
    answer = ""
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        match event:
            case {"type": "step_start"}:
                answer = ""
            case {"type": "text", "part": {"text": str(text)}}:
                answer += text
    return answer
