"""Adapter of Claude Code (npm `@anthropic-ai/claude-code`), on the messages dialect.

Version 2.1 is a native program, 2.0.76 a script for node with side calls of its own around every command. The default
tool set costs 12k prompt tokens a call; `bare` (about 1k) and `tools` are for small windows. Sub-agents are told apart
by a header (2.1) or by their system prompt (2.0), compaction by its words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.errors import HarnessError
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Mount, Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME, log_line
from harness_adapters.npm import NpmProduct

PACKAGE = "@anthropic-ai/claude-code"
LATEST = NpmProduct("claude-code", "2.1.332", PACKAGE, f"node_modules/{PACKAGE}-linux-*/claude", native=True)
OLD = NpmProduct("claude-code", "2.0.76", PACKAGE, f"node_modules/{PACKAGE}/cli.js", spec="claude-code?version=2.0.76")
PRODUCTS = {product.version: product for product in (LATEST, OLD)}
SESSION_ID = "c1a76000-0000-4000-8000-000000000001"
"""The same in every rollout: it gets into prompts through the transcript's path, and HOME is private anyway."""
MCP_CONFIG = f"{HOME}/.claude/mcp.json"
OFF_SWITCHES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else the system prompt begins with a nonce
    "IS_SANDBOX": "1",  # else root may not skip permissions
}
OLD_WINDOW = 168_000
"""2.0.76 takes every model's window for 200k tokens, of which 32k are for the reply."""
COMPACTION_WORDS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."
OLD_COMPACTION_WORDS = "tasked with summarizing conversations"
OLD_MAIN_WORDS = "You are an interactive CLI tool"


class ClaudeCodeHarness(HarnessAdapter):
    """Claude Code, headless."""

    name = LATEST.name
    version: str = LATEST.version
    dialect: Dialect = "messages"
    supports_mcp = True

    def __init__(
        self,
        *,
        version: str = LATEST.version,
        bare: bool = False,
        tools: Sequence[str] | str | None = None,
        background: bool = True,
    ) -> None:
        """Choose how much the product brings.

        Args:
            version: 2.1.332 or 2.0.76.
            bare: its minimal mode, with three tools and two lines of system prompt; not in 2.0.76.
            tools: names to offer instead of the default set, e.g. `("Bash", "Edit", "Read", "Write")`.
            background: whether sub-agents run beside the main agent, or it waits for each; it always waits in 2.0.76.

        Raises:
            HarnessError: another version, or one without a bare mode.
        """
        if version not in PRODUCTS:
            raise HarnessError(f"Expected a version of Claude Code out of {', '.join(PRODUCTS)}, got {version!r}.")
        if bare and version == OLD.version:
            raise HarnessError(f"Expected a version with a bare mode, got {version!r}. Use tools=… to make it smaller.")
        self.product = PRODUCTS[version]
        self.version = version
        self.bare = bare
        self.tools = (tools,) if isinstance(tools, str) else tools if tools is None else tuple(tools)
        self.background = background

    def install(self, cache: Path) -> None:
        self.product.install(cache, log_line)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return self.product.mounts(cache)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        argv = [*self.product.argv, "--print", "--model", context.model, "--output-format", "json"]
        argv += ["--session-id", SESSION_ID, "--dangerously-skip-permissions"]
        if context.mcp_servers:
            await sandbox.write_file(MCP_CONFIG, json.dumps(mcp_config(context)).encode())
            argv += ["--mcp-config", MCP_CONFIG, "--strict-mcp-config"]
        if self.bare:
            argv.append("--bare")
        if self.tools is not None:
            argv += ["--tools", ",".join(self.tools)]
        env = {
            **OFF_SWITCHES,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            "CLAUDE_CODE_MAX_RETRIES": "4",
            **(self._old_switches(context) if self.product is OLD else self._switches(context)),
        }
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def _switches(self, context: HarnessContext) -> dict[str, str]:
        # An unknown model name is taken to have a window of a million tokens.
        switches = {"CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_length)}
        return switches if self.background else {**switches, "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}

    def _old_switches(self, context: HarnessContext) -> dict[str, str]:
        threshold = 0.8 * (context.context_length - context.max_tokens)
        models = ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
        return {
            **dict.fromkeys(models, context.model),
            "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": f"{100 * min(threshold / OLD_WINDOW, 1):.2f}",
            "DISABLE_PROMPT_CACHING": "1",  # else two sub-agents are called at start to warm a cache that we have not
        }

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        if any(name.lower() == "x-claude-code-agent-id" for name in headers):
            return "subagent"
        system = "\n".join(message.content for message in request.messages if message.role == "system")
        last = request.messages[-1] if request.messages else None
        if OLD_COMPACTION_WORDS in system:
            return "compaction"
        if last is not None and last.role == "user" and COMPACTION_WORDS in last.content:
            return "compaction"
        if self.product is OLD and OLD_MAIN_WORDS not in system:
            return "subagent" if request.tools else "auxiliary"
        return None


def mcp_config(context: HarnessContext) -> dict[str, Json]:
    """Return the file that `--mcp-config` reads."""
    servers: dict[str, Json] = {
        server.name: {"command": server.command[0], "args": list(server.command[1:]), "env": dict(server.env)}
        for server in context.mcp_servers
    }
    return {"mcpServers": servers}


def final_answer(stdout: bytes) -> str:
    """Return the text of the JSON result, empty where it reports a failure."""
    try:
        result = json.loads(stdout)
    except ValueError:
        return ""
    if not isinstance(result, dict) or result.get("is_error"):
        return ""
    return str(result.get("result") or "")
