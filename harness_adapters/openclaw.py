"""Adapter of OpenClaw (npm `openclaw`), run as one isolated `agent exec`, on the responses dialect or on another.

It starts slowly (18 to 85 s) and wants 1.4 GB. On responses history is append-only while it works on one message; on
chat and messages every request ends with a message that the next one lacks, as `transient_suffix` says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clawgym_env.errors import HarnessOptionError
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Json, Message
from clawgym_env.sandbox.base import Sandbox
from clawgym_env.trace.calls import CallKind
from harness_adapters.launch import HOME, session_id
from harness_adapters.npm import NpmProduct
from harness_adapters.product import InstalledHarness

PRODUCT = NpmProduct(
    name="openclaw", version="2026.9.6", package="openclaw", program="node_modules/openclaw/openclaw.mjs"
)
PROVIDER = "clawgym"
STATE = f"{HOME}/.openclaw"
CONFIG = f"{STATE}/openclaw.json"
APIS: Mapping[Dialect, str] = {
    "responses": "openai-responses",
    "chat": "openai-completions",
    "messages": "anthropic-messages",
}
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
MEMORY_FLUSH = re.compile(r"(\[[^\]]+\] )?Pre-compaction memory flush")
SUBAGENT = re.compile(r"(\[[^\]]+\] )?\[Subagent Context\]")
MINUTE_STAMP = re.compile(r"^\[(\w{3} \d{4}-\d\d-\d\d) \d\d:\d\d ([^\]]+)\]")
SESSION_ID = re.compile(r"(session=agent:main:explicit:|sessionId=)[0-9a-f-]{36}")
SAME_ID = "00000000-0000-4000-8000-000000000000"
TIMEOUT_MARGIN_S = 60
"""Its own deadline lies behind the runner's, which is the one that counts."""


class OpenClawHarness(InstalledHarness):
    """OpenClaw, headless."""

    product = PRODUCT
    name = PRODUCT.name
    version = PRODUCT.version
    supports_mcp = True
    supports_resume = True
    memory_mb = 3072

    def __init__(self, *, api: Dialect = "responses") -> None:
        """Choose what it speaks: "responses", "chat" or "messages".

        Raises:
            HarnessOptionError: it does not speak that.
        """
        if api not in APIS:
            raise HarnessOptionError(f"Expected api to be one of {', '.join(APIS)}, got {api!r}.")
        self.dialect = api

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        await sandbox.write_file(CONFIG, json.dumps(config(context, self.dialect)).encode())
        isolated = ["exec", "--message-file", "-", "--config", CONFIG, "--cwd", context.workdir]  # keeps no session
        lasting = ["--local", "--message-file", "/dev/stdin", "--agent", "main", "--session-id"]
        argv = [*PRODUCT.argv, "agent", *([*lasting, session_id(context.session)] if context.resumable else isolated)]
        argv += ["--model", f"{PROVIDER}/{context.model}", "--json"]
        argv += ["--timeout", str(int(context.wall_clock_s) + TIMEOUT_MARGIN_S)]
        env = {"OPENCLAW_STATE_DIR": STATE, "OPENCLAW_CONFIG_PATH": CONFIG, "DO_NOT_TRACK": "1"}
        done = await sandbox.exec(argv, env=env, cwd=context.workdir, stdin=context.instruction.encode())
        return HarnessExit(done.exit_code, done.stdout, done.stderr, final_answer(done.stdout), done.timed_out)

    def classify(self, request: ChatRequest, headers: Mapping[str, str]) -> CallKind | None:
        system = request.messages[0].content if request.messages else ""
        if not request.tools and system.startswith("You are a context summarization assistant"):
            return "compaction"
        said = [it.content for it in request.messages if it.role == "user" and not _is_transient(it)]
        if said and MEMORY_FLUSH.match(said[-1]):
            return "auxiliary"
        return "subagent" if said and SUBAGENT.match(said[0]) else None

    def transient_suffix(self, messages: Sequence[Message]) -> int:
        return int(self.dialect != "responses" and bool(messages) and _is_transient(messages[-1]))

    def rewrite(self, request: ChatRequest) -> ChatRequest:
        """Put midnight for the minute and zeros for the session id, which no switch turns off."""
        return replace(request, messages=tuple(map(_without_nonces, request.messages)))


def _is_transient(message: Message) -> bool:
    return message.role == "user" and message.content.lstrip().startswith(TRANSIENT)


def _without_nonces(message: Message) -> Message:
    if message.role != "user" or not message.content.startswith("["):
        return message
    content = MINUTE_STAMP.sub(r"[\1 00:00 \2]", message.content)
    return replace(message, content=SESSION_ID.sub(rf"\g<1>{SAME_ID}", content))


def config(context: HarnessContext, api: Dialect) -> dict[str, Json]:
    """Return `openclaw.json`: one provider, which is the proxy, and the task's tool servers."""
    model: dict[str, Json] = {
        "id": context.model,
        "name": context.model,
        "reasoning": False,
        "input": ["text"],
        "contextWindow": context.context_length,
        "maxTokens": context.max_tokens,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider: dict[str, Json] = {
        "baseUrl": context.base_url if api == "messages" else f"{context.base_url}/v1",
        "api": APIS[api],
        "apiKey": context.api_key,
        "timeoutSeconds": int(context.wall_clock_s) + TIMEOUT_MARGIN_S,
        "models": [model],
    }
    servers: dict[str, Json] = {
        it.name: {"command": it.command[0], "args": [*it.command[1:]], "env": dict(it.env), "cwd": context.workdir}
        for it in context.mcp_servers
    }
    defaults: dict[str, Json] = {
        "model": {"primary": f"{PROVIDER}/{context.model}"},
        "compaction": {"keepRecentTokens": min(20_000, context.context_length // 3)},
        "workspace": context.workdir,
        "skipBootstrap": True,  # `agent --local` would fill the workspace with files about itself
    }
    return {
        "models": {"mode": "replace", "providers": {PROVIDER: provider}},
        "agents": {"defaults": defaults},
        # Tidying a store that is thrown away costs 8 s of CPU at start and 180 MB.
        "session": {"maintenance": {"mode": "warn"}},
        "update": {"checkOnStart": False},
        "mcp": {"servers": servers},
    }


def final_answer(stdout: bytes) -> str:
    """Return the answer in the JSON envelope, empty where there is none."""
    try:
        envelope = json.loads(stdout)
    except ValueError:
        return ""
    match envelope:
        case {"final": str(text)} | {"meta": {"finalAssistantVisibleText": str(text)}}:
            return text
    return ""
