"""Mini, the bundled harness: a small tool-using agent in one stdlib-only file, run as a process inside the sandbox.

`python3 agent.py CONFIG.json` talks to a model over HTTP (OpenAI chat or Anthropic messages, streaming), runs the
tools it asks for in the current folder and ends when a reply asks for none. Like any real harness it knows nothing of
tokens or training. The functions below are also played in-process to make demonstrations.
"""

from __future__ import annotations

import os
import subprocess

SYSTEM_PROMPT = "You work in a folder with tools. Do the task, then answer in one line."

TOOLS = [
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
            done = subprocess.run(
                ["bash", "-c", str(arguments["command"])],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=BASH_TIMEOUT_S,
                check=False,
            )
            return done.stdout.decode("utf-8", "replace")[:MAX_TOOL_OUTPUT] or f"exit {done.returncode}"
        return f"error: no tool named {name}"
    except KeyError as missing:
        return f"error: missing argument {missing}"
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"error: {error}"
