"""Adapter of Claude Code (npm `@anthropic-ai/claude-code`, a native program), on the messages dialect.

The default tool set costs 12k prompt tokens a call; `bare` (about 1k) and `tools` are for small windows. Sub-agents
run beside the main agent and are told apart by a header; compaction only by its words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect
from clawgym_env.sandbox.base import Mount, Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import log_line
from harness_adapters.npm import NpmProduct

PRODUCT = NpmProduct(
    name="claude-code",
    version="2.1.332",
    package="@anthropic-ai/claude-code",
    program="node_modules/@anthropic-ai/claude-code-linux-*/claude",
    native=True,
)
SESSION_ID = "c1a76000-0000-4000-8000-000000000001"
"""The same in every rollout: it gets into prompts through the transcript's path, and HOME is private anyway."""
OFF_SWITCHES = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # else the system prompt begins with a nonce
    "IS_SANDBOX": "1",  # else root may not skip permissions
}
COMPACTION_WORDS = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools."


class ClaudeCodeHarness(HarnessAdapter):
    """Claude Code, headless."""

    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "messages"

    def __init__(self, *, bare: bool = False, tools: Sequence[str] | str | None = None) -> None:
        """Choose how much the product brings.

        Args:
            bare: its minimal mode, with three tools and two lines of system prompt.
            tools: names to offer instead of the default set, e.g. `("Bash", "Edit", "Read", "Write")`.
        """
        self.bare = bare
        self.tools = (tools,) if isinstance(tools, str) else tools if tools is None else tuple(tools)

    def install(self, cache: Path) -> None:
        PRODUCT.install(cache, log_line)

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return PRODUCT.mounts(cache)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        argv = [*PRODUCT.argv, "--print", "--model", context.model, "--output-format", "json"]
        argv += ["--session-id", SESSION_ID, "--dangerously-skip-permissions"]
        if self.bare:
            argv.append("--bare")
        if self.tools is not None:
            argv += ["--tools", ",".join(self.tools)]
        env = {
            **OFF_SWITCHES,
            "ANTHROPIC_BASE_URL": context.base_url,
            "ANTHROPIC_API_KEY": context.api_key,
            # An unknown model name is taken to have a window of a million tokens.
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(context.context_length),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            "CLAUDE_CODE_MAX_RETRIES": "4",
        }
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        if any(name.lower() == "x-claude-code-agent-id" for name in headers):
            return "subagent"
        last = request.messages[-1] if request.messages else None
        if last is not None and last.role == "user" and COMPACTION_WORDS in last.content:
            return "compaction"
        return None


def final_answer(stdout: bytes) -> str:
    """Return the text of the JSON result, empty where it reports a failure."""
    try:
        result = json.loads(stdout)
    except ValueError:
        return ""
    if not isinstance(result, dict) or result.get("is_error"):
        return ""
    return str(result.get("result") or "")
