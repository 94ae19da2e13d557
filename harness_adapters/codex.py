"""Adapter of Codex CLI (npm `@openai/codex`, a native program), on the responses dialect.

History is append-only to the letter, so nothing is rewritten. The `Chunk ID` and `Wall time` in its tool results are
drawn once per result and then stay: they defeat no prefix of their own rollout, and the policy may read them.
Sub-agents are threads of their own, told apart by headers, as is compaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Json
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PRODUCT = NpmProduct(
    name="codex",
    version="0.171.0",
    package="@openai/codex",
    program="node_modules/@openai/codex-linux-*/vendor/*/bin/codex",
    native=True,
)
PROVIDER = "clawgym"
CONFIG = f"{HOME}/.codex/config.toml"
INSTRUCTIONS = f"{HOME}/.codex/instructions.md"
BARE_INSTRUCTIONS = "You are Codex, a coding agent. Work in the current folder with your tools, then answer briefly."
BARE: Mapping[str, Json] = {
    "model_instructions_file": INSTRUCTIONS,
    "include_permissions_instructions": False,
    "skills": {"include_instructions": False, "bundled": {"enabled": False}},
    "agents": {"enabled": False},
    "tools": {"experimental_request_user_input": {"enabled": False}},
}
KEY_VARIABLE = "CLAWGYM_API_KEY"


class CodexHarness(InstalledHarness):
    """Codex CLI, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "responses"
    supports_mcp = True
    supports_resume = True
    memory_mb = 1024

    def __init__(self, *, bare: bool = False) -> None:
        """Choose how much it brings: `bare` is a shell and a line of instructions, 0.7k tokens of prompt for 10k."""
        self.bare = bare

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        lines = (f"{key} = {toml(value)}\n" for key, value in config(context, bare=self.bare).items())
        await sandbox.write_file(CONFIG, "".join(lines).encode())
        if self.bare:
            await sandbox.write_file(INSTRUCTIONS, BARE_INSTRUCTIONS.encode())
        argv = [*PRODUCT.argv, "exec", *(["resume", "--last"] if context.resume else [])]
        argv += ["--skip-git-repo-check", "--json", "-"]
        env = {KEY_VARIABLE: context.api_key}
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        """Go by the headers; a request without them is not Codex's own."""
        sent = {name.lower(): value for name, value in headers.items()}
        try:
            kind = json.loads(sent.get("x-codex-turn-metadata", "{}"))["request_kind"]
        except (ValueError, TypeError, LookupError):
            kind = None
        if kind == "compaction":
            return "compaction"
        if "x-openai-subagent" in sent or "x-codex-parent-thread-id" in sent:
            return "subagent"
        return "main" if kind == "turn" else None


def config(context: HarnessContext, *, bare: bool = False) -> dict[str, Json]:
    """Return `config.toml`: one provider, which is the proxy, the true window, and nothing that calls home."""
    window = context.context_length
    tool_output = min(10_000, window // 12)
    provider: dict[str, Json] = {
        "name": PROVIDER,
        "base_url": f"{context.base_url}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
        "request_max_retries": 3,
        "stream_max_retries": 3,
        "stream_idle_timeout_ms": int(context.wall_clock_s * 1000),
    }
    return {
        "model": context.model,
        "model_provider": PROVIDER,
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        # It compacts when the last reply's usage passes the limit: results and one more reply must fit beyond it, and
        # what it counts as one token of a result is up to three of a small vocabulary.
        "model_context_window": window,
        "model_auto_compact_token_limit": max(window // 2, window - 3 * tool_output - context.max_tokens),
        "tool_output_token_limit": tool_output,
        "check_for_update_on_startup": False,
        "web_search": "disabled",  # the vendor's server would do it
        "analytics": {"enabled": False},
        "features": {"plugins": False, "apps": False, **({"goals": False, "view_image": False} if bare else {})},
        "model_providers": {PROVIDER: provider},
        "mcp_servers": {
            server.name: {
                "command": server.command[0],
                "args": [*server.command[1:]],
                "env": dict(server.env),
                "required": True,  # else the first turn begins without its tools, and a dead server goes unnoticed
                "startup_timeout_sec": 120,
                "tool_timeout_sec": int(context.wall_clock_s),
            }
            for server in context.mcp_servers
        },
        **(BARE if bare else {}),
    }


def toml(value: Json) -> str:
    """Write a value on one line; JSON's strings, numbers and booleans are TOML's, but for one control character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml(key)} = {toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def final_answer(stdout: bytes) -> str:
    """Return the last message of the JSON events, empty where the turn failed."""
    answer, completed = "", False
    for line in stdout.splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        match event:
            case {"type": "item.completed", "item": {"type": "agent_message", "text": str(text)}}:
                answer = text
            case {"type": "turn.completed"}:
                completed = True
    return answer if completed else ""
