"""Adapter of Gemini CLI (npm `@google/gemini-cli`), on the gemini dialect.

Append-only history; thoughts are dropped from it. Sub-agents are known by the tool that ends them, compaction by its
system prompt. The first request costs about 12k tokens; `tools` saves a part of them. It holds today's date, so
rollouts of one task share their prompts on one day only. History is split for compaction before a user message only:
a run on one instruction that outgrows its window ends with exit code 144.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from clawgym_env.harness import HarnessContext, HarnessExit, McpServer
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PRODUCT = NpmProduct(
    name="gemini-cli",
    version="0.61.0",
    package="@google/gemini-cli",
    program="node_modules/@google/gemini-cli/bundle/gemini.js",
)
SETTINGS = f"{HOME}/.gemini/settings.json"
ASSUMED_WINDOW = 1_048_576
"""Tokens that it takes an unknown model to have. No switch changes that, but the threshold is a share of it."""
COMPACT_AT = 0.7
"""Share of the true window. The summary is asked for with the whole history, so it needs room, too."""
COMPACTION_WORDS = "You are a specialized system component responsible for distilling chat history"
SUBAGENT_TOOL = "complete_task"


class GeminiCliHarness(InstalledHarness):
    """Gemini CLI, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "gemini"
    supports_mcp = True
    supports_resume = True

    def __init__(self, *, tools: Sequence[str] | str | None = None) -> None:
        """Choose how much the product brings.

        Args:
            tools: names of built-in tools to offer instead of the default set, e.g.
                `("read_file", "write_file", "replace", "run_shell_command")`.
        """
        self.tools = (tools,) if isinstance(tools, str) else tools if tools is None else tuple(tools)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(SETTINGS, json.dumps(settings(context, self.tools)).encode())
        env = {
            "GEMINI_API_KEY": context.api_key,
            "GOOGLE_GEMINI_BASE_URL": context.base_url,
            # As the system's settings they come before a workspace's own, which could name another server.
            "GEMINI_CLI_SYSTEM_SETTINGS_PATH": SETTINGS,
            "GEMINI_SANDBOX": "false",
            "NO_PROXY": "127.0.0.1",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",  # else it runs without --yolo
        }
        argv = [*PRODUCT.argv, "--yolo", "--model", context.model, "--output-format", "json"]
        if context.resume:
            argv += ["--resume", "latest"]
        # The instruction goes through stdin, where no length and no leading dash matters.
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        if any(tool.name == SUBAGENT_TOOL for tool in request.tools):
            return "subagent"
        first = request.messages[0]
        if first.role == "system" and first.content.lstrip().startswith(COMPACTION_WORDS):
            return "compaction"
        return None


def settings(context: HarnessContext, tools: Sequence[str] | None) -> dict[str, Json]:
    """Return `settings.json`: nothing leaves the sandbox but model calls, and those go to the proxy."""
    chosen: dict[str, Json] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "maxAttempts": 4},
        "model": {
            "compressionThreshold": COMPACT_AT * context.context_length / ASSUMED_WINDOW,
            # From the 30th turn on it asks the policy whether it loops, and waits a minute for JSON that it likes.
            "disableLoopDetection": True,
        },
        "mcpServers": {server.name: mcp_entry(server) for server in context.mcp_servers},
    }
    if tools is not None:
        chosen["tools"] = {"core": list(tools)}
    return chosen


def mcp_entry(server: McpServer) -> dict[str, Json]:
    """Return one entry of `mcpServers`."""
    return {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env), "trust": True}


def final_answer(stdout: bytes) -> str:
    """Return the answer in the JSON result, empty where it reports a failure."""
    try:
        result = json.loads(stdout)
    except ValueError:
        return ""
    return str(result.get("response") or "") if isinstance(result, dict) else ""
