"""Adapter of Claude Code (npm `@anthropic-ai/claude-code`), on the messages dialect.

The default tool set costs 12k prompt tokens a call; `bare` (about 1k) and `tools` are for small windows. Sub-agents are
known by a header, compaction by its words; 2.0.76, with side calls around every command, by its system prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from clawgym_env.errors import HarnessOptionError
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME, no_command, session_id
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PACKAGE = "@anthropic-ai/claude-code"
LATEST = NpmProduct("claude-code", "2.1.332", PACKAGE, f"node_modules/{PACKAGE}-linux-*/claude", native=True)
OLD_SPEC = "claude-code?version=2.0.76"
OLD = NpmProduct("claude-code", "2.0.76", PACKAGE, f"node_modules/{PACKAGE}/cli.js", spec=OLD_SPEC)
PRODUCTS = {product.version: product for product in (LATEST, OLD)}
MCP_CONFIG = f"{HOME}/.claude/mcp.json"
OFF_SWITCHES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else the system prompt begins with a nonce
    "NO_PROXY": "127.0.0.1",
    "IS_SANDBOX": "1",  # else root may not skip permissions
    "CLAUDE_CODE_MAX_RETRIES": "4",
}
RESERVE = 13_000
"""2.1 compacts when a reply and so many tokens more would not fit, so a small window would compact at every turn."""
OTHER_MODELS = ("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
OLD_WINDOW = 200_000
"""What 2.0.76 takes every model's window for; it compacts at a share of that less the reply."""
COMPACTION_WORDS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."


class ClaudeCodeHarness(InstalledHarness):
    """Claude Code, headless."""

    product = LATEST
    name = LATEST.name
    version: str = LATEST.version
    dialect: Dialect = "messages"
    supports_mcp = True
    supports_resume = True

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
            bare: its minimal mode, with three tools and two lines of system prompt.
            tools: names to offer instead of the default set, e.g. `("Bash", "Edit", "Read", "Write")`.
            background: whether sub-agents run beside the main agent, or it waits for each; it always waits in 2.0.76.

        Raises:
            HarnessOptionError: no such version, or it has no bare mode.
        """
        if version not in PRODUCTS or (bare and version == OLD.version):
            known = f"{LATEST.version} for its bare mode" if bare else f"a version out of {', '.join(PRODUCTS)}"
            raise HarnessOptionError(f"Expected {known}, got {version!r}.")
        self.product, self.version, self.bare, self.background = PRODUCTS[version], version, bare, background
        self.tools = (tools,) if isinstance(tools, str) else tools if tools is None else tuple(tools)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        argv = [*self.product.argv, "--print", "--model", context.model, "--output-format", "json"]
        argv += ["--resume" if context.resume else "--session-id", session_id(context.session)]
        argv += ["--dangerously-skip-permissions", "--strict-mcp-config"]
        if context.mcp_servers:
            await sandbox.write_file(MCP_CONFIG, json.dumps(mcp_config(context)).encode())
            argv += ["--mcp-config", MCP_CONFIG]
        if self.bare:
            argv.append("--bare")
        if self.tools is not None:
            argv += ["--tools", ",".join(self.tools)]
        env = {
            **OFF_SWITCHES,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.api_key,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            # 2.1 takes a model that it does not know to have a window of a million tokens.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_length * 7 // 8 + RESERVE),
            **({} if self.background else {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1"}),
            **(old_switches(context) if self.product is OLD else {}),
        }
        argv += ["--settings", json.dumps({"env": env})]  # else a workspace's own settings could name another server
        stdin = no_command(context.instruction).encode()
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=stdin)
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        if any(name.lower() == "x-claude-code-agent-id" for name in headers):
            return "subagent"
        last = request.messages[-1] if request.messages else None
        if last is not None and last.role == "user" and COMPACTION_WORDS in last.content:
            return "compaction"
        return old_kind(request) if self.product is OLD else None


def old_switches(context: HarnessContext) -> dict[str, str]:
    """Return what 2.0.76 is told. Its summary call holds the whole history, so it must compact early."""
    share = (context.context_length * 3 / 4 - context.max_tokens) / max(OLD_WINDOW - context.max_tokens, 1)
    return {
        **dict.fromkeys(OTHER_MODELS, context.model),
        "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": f"{100 * min(max(share, 0.01), 1):.2f}",
        "DISABLE_PROMPT_CACHING": "1",  # else two sub-agents are called at start, to warm a cache that we have not
    }


def old_kind(request: ChatRequest) -> CallKind | None:
    """Tell the calls of 2.0.76 apart by their system prompts."""
    system = "\n".join(message.content for message in request.messages if message.role == "system")
    if "tasked with summarizing conversations" in system:
        return "compaction"
    if "You are an interactive CLI tool" in system:
        return None
    return "subagent" if request.tools else "auxiliary"


def mcp_config(context: HarnessContext) -> dict[str, Json]:
    """Return what `--mcp-config` reads. 2.1 would hide the tools behind its search, were they not always loaded."""
    servers: dict[str, Json] = {
        it.name: {"command": it.command[0], "args": [*it.command[1:]], "env": dict(it.env), "alwaysLoad": True}
        for it in context.mcp_servers
    }
    return {"mcpServers": servers}


def final_answer(stdout: bytes) -> str:
    """Return the text of the JSON result, empty where it reports a failure."""
    try:
        result = json.loads(stdout)
    except ValueError:
        return ""
    return str(result.get("result") or "") if isinstance(result, dict) and not result.get("is_error") else ""
