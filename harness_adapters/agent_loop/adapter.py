"""The white-box agent loop: the plainest agent there is, for the control experiment of real harnesses.

No product and no agent process: the loop runs here, its tools act on the sandbox (`tools`), and the model is asked
through the proxy from inside the sandbox, as any client does. Invariant: a request is the request before it plus the
reply and its results, so a rollout is one linear trajectory.
"""

from __future__ import annotations

import asyncio
import json

from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect, Json, ToolCall
from clawgym_env.sandbox.base import Sandbox
from harness_adapters.agent_loop.tools import TOOLS, Toolbox
from harness_adapters.launch import HOME

SYSTEM_PROMPT = (
    "You are an agent in a sandbox. Work on the user's task with your tools, in the current folder, until it is done. "
    "Then answer without a tool call, in one line."
)
RETRY_WAITS_S = (0.5, 1.0, 2.0)
COURIER = """
import http.client, sys
host, path, key = sys.argv[1:]
headers = {"content-type": "application/json", "authorization": "Bearer " + key}
connection = http.client.HTTPConnection(host)
connection.request("POST", path, sys.stdin.buffer.read(), headers)
reply = connection.getresponse()
sys.stdout.buffer.write(b"%d\\n" % reply.status + reply.read())
"""
"""The proxy listens inside the sandbox only, so each request is sent from there."""


class ModelRefused(Exception):
    """The request was refused, and would be again: a history too long for the window, say."""


class AgentLoop(HarnessAdapter):
    """The loop. Needs bash, grep and python3 in the sandbox."""

    name = "agent-loop"
    version = "1.0"
    dialect: Dialect = "chat"
    supports_resume = True
    memory_mb = 256

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        session = f"{HOME}/.agent-loop/session-{context.session}.json"
        messages: list[Json] = [{"role": "system", "content": SYSTEM_PROMPT}]
        if context.resume:
            messages = json.loads(await sandbox.read_file(session))
        messages.append({"role": "user", "content": context.instruction})
        toolbox = Toolbox(sandbox, context.workdir)
        try:
            while calls := _tool_calls(reply := await _ask(sandbox, context, messages)):
                messages.append(reply)
                for call in calls:
                    result = await toolbox.run(call.name, call.parsed_arguments())
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        except ModelRefused as error:
            return HarnessExit(1, b"", str(error).encode(), "")
        if context.resumable:
            await sandbox.write_file(session, json.dumps([*messages, reply]).encode())
        response = str(reply.get("content") or "").strip()
        return HarnessExit(0, response.encode(), b"", response)


async def _ask(sandbox: Sandbox, context: HarnessContext, messages: list[Json]) -> dict[str, Json]:
    """Return the model's next message, asking again where the reply was lost.

    Raises:
        ModelRefused: the request was refused, or no reply could be had.
    """
    tools: list[Json] = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)},
        }
        for tool in TOOLS
    ]
    body = {"model": context.model, "max_tokens": context.max_tokens, "messages": messages, "tools": tools}
    host, _, path = context.base_url.removeprefix("http://").partition("/")
    courier = ["python3", "-I", "-S", "-c", COURIER, host, f"/{path}/v1/chat/completions", context.api_key]
    failure = ""
    for wait_s in (0.0, *RETRY_WAITS_S):
        await asyncio.sleep(wait_s)
        done = await sandbox.exec(courier, stdin=json.dumps(body).encode(), max_output=64 << 20)
        status, _, answer = done.stdout.partition(b"\n")
        if done.exit_code == 0 and status == b"200":
            message: dict[str, Json] = json.loads(answer)["choices"][0]["message"]
            return message
        failure = f"HTTP {status.decode()}: {answer[:2000].decode('utf-8', 'replace')}{done.stderr.decode()[-2000:]}"
        if status.startswith(b"4"):
            break
    raise ModelRefused(failure)


def _tool_calls(reply: dict[str, Json]) -> list[ToolCall]:
    found = reply.get("tool_calls")
    calls = [call for call in found if isinstance(call, dict)] if isinstance(found, list) else []
    return [_tool_call(call) for call in calls]


def _tool_call(call: dict[str, Json]) -> ToolCall:
    function = call["function"]
    assert isinstance(function, dict)  # the proxy's own words
    return ToolCall(str(call["id"]), str(function["name"]), str(function["arguments"]))
