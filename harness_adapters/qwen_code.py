"""Adapter of Qwen Code (npm `@qwen-code/qwen-code`), on the chat dialect.

Append-only history. Sub-agents work in the background with a system prompt and tools of their own, by which the
generic rules know them. Compaction keeps system prompt and tools and asks in the last user message; afterwards the
last tool call stands in a message that no model wrote, and the reminders of the first message come back one call late.
The first request costs about 19k tokens, and holds today's date.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from clawgym_env.harness import HarnessContext, HarnessExit, McpServer
from clawgym_env.messages import ChatRequest, Dialect, Json, Message
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME, no_command, session_id
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PRODUCT = NpmProduct(
    name="qwen-code",
    version="0.24.4",
    package="@qwen-code/qwen-code",
    program="node_modules/@qwen-code/qwen-code/cli-entry.js",
)
SETTINGS = f"{HOME}/.qwen/settings.json"
SETTINGS_VERSION = 4
COMPACTION_WORDS = "Then, produce the <state_snapshot> XML."
DATE_REMINDER = re.compile(r"<system-reminder>\nThe current date is: [^<]*</system-reminder>\n")
"""Before what the user says, but no more once the session is resumed; the first message names the date anyway."""
SUMMARY_ROOM = 33_000
"""Tokens it keeps free for a summary in any window larger than this; in a smaller one it keeps 15 % free."""


class QwenCodeHarness(InstalledHarness):
    """Qwen Code, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    dialect: Dialect = "chat"
    supports_mcp = True
    supports_resume = True

    def __init__(self, *, bare: bool = False) -> None:
        """Choose how much the product brings.

        Args:
            bare: its minimal mode, with six tools (write_file is none of them), no skills and half the prompt.
        """
        self.bare = bare

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(SETTINGS, json.dumps(settings(context)).encode())
        argv = [*PRODUCT.argv, "--yolo", "--auth-type", "openai", "--output-format", "json"]
        argv += ["--resume" if context.resume else "--session-id", session_id(context.session)]
        if self.bare:
            argv.append("--bare")
        env = {
            "OPENAI_API_KEY": context.api_key,
            "OPENAI_BASE_URL": f"{context.base_url}/v1",
            "OPENAI_MODEL": context.model,
            # Given a limit, it does not ask again with a larger one for a reply that was cut.
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(context.max_tokens),
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            # As the system's settings they come before a workspace's own, which could name another server.
            "QWEN_CODE_SYSTEM_SETTINGS_PATH": SETTINGS,
            "QWEN_SANDBOX": "false",
            "NO_PROXY": "127.0.0.1",
        }
        stdin = no_command(context.instruction).encode()
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=stdin)
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        last = request.messages[-1] if request.messages else None
        if last is not None and last.role == "user" and last.content.endswith(COMPACTION_WORDS):
            return "compaction"
        return None

    def rewrite(self, request: ChatRequest) -> ChatRequest:
        """Leave out the reminders of the date."""
        return replace(request, messages=tuple(map(_without_date, request.messages)))


def _without_date(message: Message) -> Message:
    if message.role != "user" or "<system-reminder>\nThe current date" not in message.content:
        return message
    return replace(message, content=DATE_REMINDER.sub("", message.content))


def settings(context: HarnessContext) -> dict[str, Json]:
    """Return `settings.json`: the true window, patience, and no call that the task did not ask for."""
    generation: dict[str, Json] = {
        "contextWindowSize": told_window(context.context_length),
        "timeout": int(context.wall_clock_s * 1000),
        "streamIdleTimeoutMs": 0,
        "maxRetries": 3,
    }
    return {
        "$version": SETTINGS_VERSION,
        "security": {"auth": {"selectedType": "openai", "baseUrl": f"{context.base_url}/v1"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        # Both spend model calls on what outlives the session.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "model": {"name": context.model, "generationConfig": generation},
        "mcpServers": {server.name: mcp_entry(server) for server in context.mcp_servers},
    }


def told_window(window: int) -> int:
    """Return the window to tell it, in tokens: the true one, or less where it would compact before every turn."""
    if window - SUMMARY_ROOM < 0.85 * SUMMARY_ROOM:
        return min(window, SUMMARY_ROOM)
    return window


def mcp_entry(server: McpServer) -> dict[str, Json]:
    """Return one entry of `mcpServers`; its tools are offered at once instead of behind a tool search."""
    entry: dict[str, Json] = {"command": server.command[0], "args": [*server.command[1:]], "env": dict(server.env)}
    return {**entry, "alwaysLoadTools": True}


def final_answer(stdout: bytes) -> str:
    """Return the text of the last event, the result; empty where it reports a failure."""
    try:
        events = json.loads(stdout)
    except ValueError:
        return ""
    match events:
        case [*_, {"type": "result", "is_error": False, "result": str(text)}]:
            return text
    return ""
