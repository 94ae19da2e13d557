"""Adapter of pi, the small coding agent (npm `@earendil-works/pi-coding-agent`), on the chat dialect.

Append-only history, no sub-agents, no side calls. Exit code 1 covers an API failure and a last reply cut at its
token limit alike, so it says little.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME, session_id
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PRODUCT = NpmProduct(
    name="pi",
    version="1.6.0",
    package="@earendil-works/pi-coding-agent",
    program="node_modules/@earendil-works/pi-coding-agent/dist/bundle/cli.js",
)
PROVIDER = "clawgym"
AGENT_FOLDER = f"{HOME}/.pi/agent"
UNUSED_TAIL = 4096
"""Tokens at the end of what it takes for the window that pi never asks a reply to fill: near it, it asks for a single
token. So it is told of a window that is longer by just these, and compacts that much earlier."""
OFF_SWITCHES = {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}


class PiHarness(InstalledHarness):
    """pi, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "chat"
    supports_resume = True
    memory_mb = 1024

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(f"{AGENT_FOLDER}/models.json", json.dumps(models(context)).encode())
        await sandbox.write_file(f"{AGENT_FOLDER}/settings.json", json.dumps(settings(context)).encode())
        # The instruction goes through stdin: as an argument one that begins with "@" would be read as a file name.
        argv = [*PRODUCT.argv, "--print", "--provider", PROVIDER, "--model", context.model]
        argv += ["--session-id", session_id(context.session)]  # goes on with it where it is there
        done = await sandbox.exec(argv, env=OFF_SWITCHES, cwd=context.workdir, stdin=context.instruction.encode())
        response = done.stdout.decode("utf-8", "replace").strip()
        return HarnessExit(done.exit_code, done.stdout, done.stderr, response, done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        system = request.messages[0].content if request.messages else ""
        if not request.tools and system.startswith("You are a context summarization assistant"):
            return "compaction"
        return None


def models(context: HarnessContext) -> dict[str, Json]:
    """Return `models.json`: one provider, which is the proxy."""
    cost: dict[str, Json] = {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0}
    model: dict[str, Json] = {
        "id": context.model,
        "name": context.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": context.context_length + UNUSED_TAIL,
        "maxTokens": context.max_tokens,
        "cost": cost,
    }
    provider: dict[str, Json] = {
        "baseUrl": f"{context.base_url}/v1",
        "api": "openai-completions",
        "apiKey": context.api_key,
        "models": [model],
    }
    return {"providers": {PROVIDER: provider}}


def settings(context: HarnessContext) -> dict[str, Json]:
    """Return `settings.json`.

    pi compacts when less than `reserveTokens` of the window is left; its default of 16k would compact a small window
    before every turn. What it keeps it counts as four characters a token: a third of the window in that measure can be
    all of the window for a small vocabulary, and then there is nothing to summarise.
    """
    window = context.context_length
    return {
        "defaultThinkingLevel": "off",
        "enableInstallTelemetry": False,
        "compaction": {
            "reserveTokens": min(16_384, max(context.max_tokens, window // 8)) + UNUSED_TAIL,
            "keepRecentTokens": min(20_000, window // 8),
        },
        "retry": {"maxRetries": 3, "baseDelayMs": 1000, "maxAgentDelayMs": 4000},
        "httpIdleTimeoutMs": "disabled",
    }
