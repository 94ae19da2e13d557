"""Mini, the bundled harness: a small tool-using agent in one stdlib-only file, run as a process inside the sandbox.

`python3 -I -S agent.py CONFIG.json` talks to a model over HTTP (OpenAI chat or Anthropic messages, streaming), runs
the tools it asks for in the current folder and ends when a reply asks for none. Like any real harness it knows nothing
of tokens or training. `Conversation` and `run_tool` are also played in-process to make demonstrations.
Invariant: a request is the request before it plus the reply and the tool results, byte for byte.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

SYSTEM_PROMPT = "You work in a folder with tools. Do the task, then answer in one line."


class Tool(TypedDict):
    """A tool as the model sees it; `parameters` is a JSON schema."""

    name: str
    description: str
    parameters: dict[str, Any]


TOOLS: list[Tool] = [
    {
        "name": "write",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
            "required": ["path", "content"],
        },
    },
    {
        "name": "read",
        "description": "Read a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    },
    {
        "name": "bash",
        "description": "Run a shell command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
]

MAX_TOOL_OUTPUT = 4000
BASH_TIMEOUT_S = 60
REQUEST_TIMEOUT_S = 900
RETRY_WAITS_S = (0.5, 1.0, 2.0)


class ToolCall(NamedTuple):
    """One tool call of a reply; `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


class Reply(NamedTuple):
    """One turn of the model."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""
    signature: str = ""
    """Opaque, goes back with the reasoning (messages dialect only)."""


class ModelError(Exception):
    """The model refused the request; asking again would not help."""


class LostReply(Exception):
    """The reply did not arrive whole; the same request may be sent again."""


def run_tool(name: str, arguments: object, folder: str) -> str:
    """Run one tool call and return what the model is told; a bad call is an answer, not a crash."""
    if not isinstance(arguments, dict):
        return "error: arguments must be a JSON object"
    try:
        if name == "write":
            path = os.path.join(folder, str(arguments["path"]))
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(str(arguments["content"]))
            return "ok"
        if name == "read":
            with open(os.path.join(folder, str(arguments["path"])), encoding="utf-8", errors="replace") as file:
                return file.read(MAX_TOOL_OUTPUT)
        if name == "bash":
            return run_bash(str(arguments["command"]), folder)
        return f"error: no tool named {name}"
    except KeyError as missing:
        return f"error: missing argument {missing}"
    except OSError as error:
        return f"error: {error.strerror or error}"
    except ValueError as error:
        return f"error: {error}"


def run_bash(command: str, folder: str) -> str:
    """Run a shell command and return its output, or its exit code where it printed nothing."""
    import signal
    import subprocess
    import tempfile

    # A file, not a pipe: a background process that keeps it open holds nobody up, and /tmp bounds its size.
    with tempfile.TemporaryFile() as output:
        shell = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ending = f"exit {shell.wait(BASH_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            shell.wait()
            ending = f"error: stopped after {BASH_TIMEOUT_S} s"
        output.seek(0)
        return output.read(MAX_TOOL_OUTPUT).decode("utf-8", "replace") or ending


def parse_arguments(text: str) -> object:
    """Return the value of a call's JSON text ({} when empty), or None when it is not JSON."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return None


class Conversation:
    """The growing history of one run, as the messages of one wire dialect ("chat" or "messages")."""

    def __init__(self, instruction: str, dialect: str = "chat") -> None:
        if dialect not in ("chat", "messages"):
            raise ValueError(f'Expected dialect "chat" or "messages", got {dialect!r}.')
        self.dialect = dialect
        self.messages: list[dict[str, object]] = [{"role": "user", "content": instruction}]
        if dialect == "chat":
            self.messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})

    def add_instruction(self, instruction: str) -> None:
        """Append what the user says next."""
        self.messages.append({"role": "user", "content": instruction})

    def add_reply(
        self, text: str, tool_calls: Sequence[ToolCall] = (), reasoning: str = "", signature: str = ""
    ) -> None:
        """Append what the model said."""
        if self.dialect == "chat":
            message: dict[str, object] = {"role": "assistant", "content": text}
            if reasoning:
                message["reasoning_content"] = reasoning
            if tool_calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in tool_calls
                ]
            self.messages.append(message)
            return
        blocks: list[dict[str, object]] = []
        if reasoning:
            blocks.append({"type": "thinking", "thinking": reasoning, "signature": signature})
        if text or not tool_calls:
            blocks.append({"type": "text", "text": text})
        for call in tool_calls:
            # This dialect has no room for arguments that are no object; the result tells the model.
            arguments = parse_arguments(call.arguments)
            value = arguments if isinstance(arguments, dict) else {}
            blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": value})
        self.messages.append({"role": "assistant", "content": blocks})

    def add_tool_results(self, results: Iterable[tuple[str, str]]) -> None:
        """Append the outcome of every call of the last reply: pairs of call id and text."""
        if self.dialect == "chat":
            self.messages.extend({"role": "tool", "tool_call_id": id, "content": text} for id, text in results)
            return
        blocks = [{"type": "tool_result", "tool_use_id": id, "content": text} for id, text in results]
        self.messages.append({"role": "user", "content": blocks})

    def request(self, model: str, max_tokens: int) -> dict[str, object]:
        """Return the body of the next request."""
        body: dict[str, object] = {"model": model, "max_tokens": max_tokens, "stream": True, "messages": self.messages}
        if self.dialect == "chat":
            body["tools"] = [{"type": "function", "function": tool} for tool in TOOLS]
        else:
            body["system"] = SYSTEM_PROMPT
            body["tools"] = [
                {"name": tool["name"], "description": tool["description"], "input_schema": tool["parameters"]}
                for tool in TOOLS
            ]
        return body


def sse_data(lines: Iterable[bytes]) -> Iterator[str]:
    """Yield the data of each server-sent event; comments and event names are skipped."""
    data: list[str] = []
    for raw in lines:
        line = raw.decode("utf-8").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield "\n".join(data)
            data = []
    # Data without its closing blank line is a cut stream, so it is not yielded.


class _Call:
    """A tool call while its pieces arrive."""

    def __init__(self) -> None:
        self.id = self.name = self.arguments = ""


def read_reply(dialect: str, lines: Iterable[bytes]) -> Reply:
    """Assemble a streamed reply.

    Raises:
        LostReply: the stream ended before its last event, or held an error.
    """
    text: list[str] = []
    reasoning: list[str] = []
    signature: list[str] = []
    calls: dict[int, _Call] = {}
    for data in sse_data(lines):
        if data == "[DONE]":
            break
        event = json.loads(data)
        if event.get("error"):
            raise LostReply(f"error in the stream: {event['error']}")
        kind = event.get("type")
        if dialect == "chat":
            for choice in event.get("choices") or ():
                delta = choice.get("delta") or {}
                text.append(delta.get("content") or "")
                reasoning.append(delta.get("reasoning_content") or "")
                for part in delta.get("tool_calls") or ():
                    call = calls.setdefault(part.get("index", 0), _Call())
                    function = part.get("function") or {}
                    call.id = part.get("id") or call.id
                    call.name = function.get("name") or call.name
                    call.arguments += function.get("arguments") or ""
        elif kind == "message_stop":
            break
        elif kind == "content_block_start" and event["content_block"].get("type") == "tool_use":
            call = calls.setdefault(event["index"], _Call())
            call.id, call.name = event["content_block"]["id"], event["content_block"]["name"]
        elif kind == "content_block_delta":
            delta = event["delta"]
            text.append(delta.get("text", ""))
            reasoning.append(delta.get("thinking", ""))
            signature.append(delta.get("signature", ""))
            if "partial_json" in delta:
                calls[event["index"]].arguments += delta["partial_json"]
    else:
        raise LostReply("the stream ended before its last event")
    made = tuple(ToolCall(call.id, call.name, call.arguments) for _, call in sorted(calls.items()))
    return Reply("".join(text), made, "".join(reasoning), "".join(signature))


def post(base_url: str, dialect: str, api_key: str, body: Mapping[str, object]) -> Reply:
    """Send one request and read its reply.

    Raises:
        ModelError: refused (4xx).
        LostReply: connection lost or 5xx.
    """
    from http.client import HTTPConnection, HTTPException

    host, _, path = base_url.removeprefix("http://").partition("/")
    route = "chat/completions" if dialect == "chat" else "messages"
    headers = {"content-type": "application/json", "accept": "text/event-stream", "connection": "close"}
    if dialect == "chat":
        headers["authorization"] = f"Bearer {api_key}"
    else:
        headers.update({"x-api-key": api_key, "anthropic-version": "2023-06-01"})
    connection = HTTPConnection(host, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", f"/{path}/v1/{route}", json.dumps(body).encode(), headers)
        response = connection.getresponse()
        if response.status == 200:
            return read_reply(dialect, response)
        reason = f"HTTP {response.status}: {response.read(2000).decode('utf-8', 'replace')}"
    except (OSError, HTTPException, ValueError) as error:
        raise LostReply(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    raise LostReply(reason) if response.status >= 500 else ModelError(reason)


def ask(base_url: str, dialect: str, api_key: str, body: Mapping[str, object]) -> Reply:
    """Send one request, again after a short wait where the reply was lost; raises like `post`."""
    import time

    for wait_s in RETRY_WAITS_S:
        try:
            return post(base_url, dialect, api_key, body)
        except LostReply:
            time.sleep(wait_s)
    return post(base_url, dialect, api_key, body)


def begin(config: Mapping[str, str]) -> Conversation:
    """Return a conversation that ends with the instruction; one kept in the `resume` file comes before it."""
    conversation = Conversation(config["instruction"], config["dialect"])
    if config.get("resume"):
        with open(config["resume"], encoding="utf-8") as file:
            conversation.messages = json.load(file)
        conversation.add_instruction(config["instruction"])
    return conversation


def keep(conversation: Conversation, path: str) -> None:
    """Write a conversation where a later run may go on with it."""
    with open(path, "w", encoding="utf-8") as file:
        json.dump(conversation.messages, file)


def run(config: Mapping[str, str], folder: str) -> str:
    """Work on one instruction until the model answers without a tool call; return that answer.

    The conversation is then kept in the `session` file, where the config names one.
    """
    dialect = config["dialect"]
    conversation = begin(config)
    while True:
        body = conversation.request(config["model"], int(config["max_tokens"]))
        reply = ask(config["base_url"], dialect, config["api_key"], body)
        conversation.add_reply(*reply)
        if not reply.tool_calls:
            if config.get("session"):
                keep(conversation, config["session"])
            return reply.text
        conversation.add_tool_results(
            [(call.id, run_tool(call.name, parse_arguments(call.arguments), folder)) for call in reply.tool_calls]
        )


def main(argv: Sequence[str]) -> int:
    """Run the agent on the config file named by the only argument; return the exit code.

    The file holds the key of the model's API and is removed once read, so that the commands the model runs cannot
    simply read it. Real harnesses keep their key where their agent can find it.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace")
    with open(argv[1], encoding="utf-8") as file:
        config = json.load(file)
    with contextlib.suppress(OSError):  # in a folder that is read-only it stays
        os.unlink(argv[1])
    try:
        print(run(config, os.getcwd()))
    except (ModelError, LostReply) as error:
        print(f"mini: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
