"""Adapter of opencode (npm `opencode-ai`, a native program), on the chat dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Mount, Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME, log_line
from harness_adapters.npm import NpmProduct

PRODUCT = NpmProduct(
    name="opencode",
    version="1.18.33",
    package="opencode-ai",
    program="node_modules/opencode-linux-*/bin/opencode",
    native=True,
)
PROVIDER = "clawgym"
CONFIG = f"{HOME}/.config/opencode/opencode.json"
OFF_SWITCHES = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_SHARE": "1",
}


class OpenCodeHarness(HarnessAdapter):
    """opencode, headless."""

    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "chat"
    supports_mcp = True
    memory_mb = 2048

    def install(self, cache: Path) -> None:
        PRODUCT.install(cache, log_line)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return PRODUCT.mounts(cache)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(CONFIG, json.dumps(config(context)).encode())
        argv = [*PRODUCT.argv, "run", "--model", f"{PROVIDER}/{context.model}", "--format", "json", "--auto"]
        done = await sandbox.exec(argv, env=OFF_SWITCHES, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        return None


def config(context: HarnessContext) -> dict[str, Json]:
    """Return `opencode.json`: one provider, which is the proxy."""
    reserve = min(context.max_tokens, context.context_length // 4)
    model: dict[str, Json] = {
        "name": context.model,
        "limit": {
            "context": context.context_length,
            "input": context.context_length - reserve,
            "output": context.max_tokens,
        },
    }
    provider: dict[str, Json] = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {
            "baseURL": f"{context.base_url}/v1",
            "apiKey": context.api_key,
            "headerTimeout": False,
            "chunkTimeout": False,
        },
        "models": {context.model: model},
    }
    servers: dict[str, Json] = {
        server.name: {"type": "local", "command": list(server.command), "environment": dict(server.env), "enabled": True}
        for server in context.mcp_servers
    }
    return {
        "provider": {PROVIDER: provider},
        "enabled_providers": [PROVIDER],
        "model": f"{PROVIDER}/{context.model}",
        "small_model": f"{PROVIDER}/{context.model}",
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "compaction": {"reserved": 0},
        "mcp": servers,
    }


def final_answer(stdout: bytes) -> str:
    """Return the text after the last tool call in the event lines."""
    answer = ""
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        part = event.get("part") if isinstance(event, dict) else None
        if isinstance(part, dict) and part.get("type") == "text":
            answer = str(part.get("text") or "")
    return answer
