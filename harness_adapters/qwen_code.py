"""Adapter of Qwen Code (npm `@qwen-code/qwen-code`), on the chat dialect.

Append-only history. Sub-agents run in the background with a system prompt and tools of their own, by which the generic
rules tell them apart; a summary is asked for in the words of `COMPACTION_WORDS`.
"""

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
    name="qwen-code",
    version="0.24.4",
    package="@qwen-code/qwen-code",
    program="node_modules/@qwen-code/qwen-code/cli-entry.js",
)
SETTINGS = f"{HOME}/.qwen/settings.json"
SETTINGS_VERSION = 4
SESSION_ID = "c1a76000-0000-4000-8000-000000000002"
COMPACTION_WORDS = "Then, produce the <state_snapshot> XML."


class QwenCodeHarness(HarnessAdapter):
    """Qwen Code, headless."""

    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "chat"
    supports_mcp = True
    memory_mb = 3072

    def __init__(self, *, bare: bool = False) -> None:
        self.bare = bare

    def install(self, cache: Path) -> None:
        PRODUCT.install(cache, log_line)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return PRODUCT.mounts(cache)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(SETTINGS, json.dumps(settings(context)).encode())
        argv = [*PRODUCT.argv, "--yolo", "--auth-type", "openai", "--output-format", "json", "--session-id", SESSION_ID]
        if self.bare:
            argv.append("--bare")
        env = {
            "OPENAI_API_KEY": context.api_key,
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_MODEL": context.model,
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
        }
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        last = request.messages[-1] if request.messages else None
        if last is not None and last.role == "user" and last.content.rstrip().endswith(COMPACTION_WORDS):
            return "compaction"
        return None


def settings(context: HarnessContext) -> dict[str, Json]:
    """Return `settings.json`."""
    generation: dict[str, Json] = {
        "contextWindowSize": context.context_length,
        "timeout": int(context.wall_clock_s * 1000),
        "streamIdleTimeoutMs": 0,
        "maxRetries": 2,
    }
    servers: dict[str, Json] = {
        server.name: {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env)}
        for server in context.mcp_servers
    }
    return {
        "$version": SETTINGS_VERSION,
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "model": {"name": context.model, "generationConfig": generation},
        "mcpServers": servers,
    }


def final_answer(stdout: bytes) -> str:
    """Return the text of the result event, empty where it reports a failure."""
    try:
        events = json.loads(stdout)
    except ValueError:
        return ""
    result = events[-1] if isinstance(events, list) and events else None
    if not isinstance(result, dict) or result.get("is_error"):
        return ""
    return str(result.get("result") or "")
