"""Demonstrations: a list of tool calls played through mini's own conversation, as canonical messages.

Used by the cold start of the `tiny` policy and by whoever needs a conversation as mini would have it. Invariant: what
`play` returns is what the proxy would see of a mini run whose model made exactly these calls.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from clawgym_env.messages import Message, ToolCall, ToolSpec
from harness_adapters.mini.agent import SYSTEM_PROMPT, TOOLS, run_tool

Step = tuple[str, Mapping[str, str]]
"""Tool name and arguments."""


def mini_tools() -> tuple[ToolSpec, ...]:
    """Return the tools mini offers."""
    return tuple(ToolSpec(tool["name"], tool["description"], tool["parameters"]) for tool in TOOLS)


def opening(instruction: str) -> list[Message]:
    """Return the messages of mini's first request."""
    return [Message("system", SYSTEM_PROMPT), Message("user", instruction)]


def play(instruction: str, files: Mapping[str, bytes], steps: Sequence[Step], answer: str) -> list[Message]:
    """Run the steps in a scratch folder, one call a turn, and return the whole conversation.

    Args:
        files: the task's starting files by relative path.
        answer: the closing line.
    """
    messages = opening(instruction)
    # In memory where the system has such a folder: removing one from a busy disk costs 10 ms, a thousand times over.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="clawgym-demo-", dir=memory) as folder:
        for path, data in files.items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        for index, (tool, arguments) in enumerate(steps):
            call = ToolCall(f"call{index}", tool, json.dumps(dict(arguments), ensure_ascii=False))
            result = run_tool(tool, dict(arguments), folder)
            messages += [
                Message("assistant", tool_calls=(call,)),
                Message("tool", result, tool_call_id=call.id),
            ]
    messages.append(Message("assistant", answer))
    return messages
