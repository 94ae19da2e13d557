"""Which of the tools a harness offers does what, found by name and schema.

The scripted turns of `scenarios` say "run this command" or "ask a sub-agent"; this module finds the tool for it in the
request at hand and fills in arguments its schema accepts. Everything known about the tools of particular harnesses
(nine of them at the time of writing) is in the tables below, as patterns that an unknown harness has a fair chance to
match. Invariant: a call made here names an offered tool and gives every argument that the tool requires.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from clawgym_env.messages import ChatRequest, Json, ToolSpec

Purpose = Literal["shell", "write", "subagent", "wait", "finish"]

_TOOL_NAMES: Mapping[Purpose, tuple[str, ...]] = {
    # Claude Code, pi, opencode, mini: bash. Codex: exec_command. OpenClaw: exec. Qwen, Gemini: run_shell_command.
    "shell": (
        r"bash",
        r"exec_command",
        r"run_shell_command",
        r"exec",
        r"shell",
        r"(local_|unified_)?(shell|exec|terminal).*",
        r"(run|execute)_(command|terminal|bash|shell).*",
    ),
    "write": (r"write", r"write_?(to_)?file", r"create_?file", r"(write|create).*file.*"),
    # Claude Code: Agent (2.0: Task). Qwen: agent. opencode: task. Codex: spawn_agent. Gemini: invoke_agent or one tool
    # an agent, of which `generalist` takes any task.
    "subagent": (
        r"agent",
        r"task",
        r"spawn_agent",
        r"(invoke|delegate|launch|run)_?(to_)?(sub)?(agent|task).*",
        r"sessions_spawn",
        r"generalist.*",
    ),
    # Codex alone makes a parent ask for its child's end.
    "wait": (r"wait_agent", r"wait"),
    # Of Gemini's sub-agents and OpenHands: they go on until this is called.
    "finish": (r"complete_task", r"finish", r"attempt_completion", r"submit(_(final_)?(answer|output|result))?"),
}
"""Patterns of whole names in lower case, the likeliest first."""

_TEXT_ARGUMENT: Mapping[Purpose, tuple[str, ...]] = {
    "shell": (r"command", r"cmd", r"commands", r"script"),
    "write": (r"content", r"contents", r"file_?text", r"text", r"data"),
    "subagent": (r"prompt", r"message", r"task", r"query", r"objective", r"instructions?", r"request"),
    "wait": (r"targets?", r"ids?", r"agent_ids?"),
    "finish": (r"result", r"response", r"answer", r"message", r"output", r".*"),
}
_PATH_ARGUMENT = (r"(abs(olute)?_?)?file_?path", r"path", r"file_?name", r"file", r"target.*")
_KNOWN_VALUES: Mapping[str, Json] = {
    "subagent_type": "general-purpose",
    "agent_name": "generalist",
    "agent": "general",
    "description": "a small job",
    "run_in_background": False,
    "is_background": False,
}
"""For arguments that are required; a choice listed in the schema comes first."""
_AGENT_KINDS = (r"general.*", r".*general.*", r"default", r"worker")
"""The sub-agents that take any task, where a tool wants one by name."""
_LISTED_AGENT = re.compile(r"""^\s*[-*]\s+[`"*]*([A-Za-z][\w-]*)[`"*]*\s*:""", re.MULTILINE)
"""Agents are named in the tool's description, one a line."""
_AGENT_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_ENDING_COMMAND = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""How mini-swe-agent wants to be told that the work is done; its prompt says so."""


class Unsayable(Exception):
    """A scripted turn cannot be said here: the harness offers no tool for it, or the template cannot write it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a scripted turn."""

    name: str
    arguments: Mapping[str, Json]


class Toolbox:
    """The tools of one request."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._tools = [tool for tool in request.tools if tool.kind == "function"]

    def shell(self, command: str) -> Call:
        """Return a call that runs a command.

        Raises:
            Unsayable: as every method here does where no tool fits.
        """
        return self._call("shell", command)

    def write(self, path: str, content: str) -> Call:
        """Return a call that writes a file; by the shell where there is no tool for it.

        Args:
            path: absolute: some harnesses take no other.
            content: of plain letters, digits and spaces.
        """
        try:
            tool = self._find("write")
            target = _argument(tool, _PATH_ARGUMENT)
            return self._call("write", content, {target: path})
        except Unsayable:
            return self.shell(f"printf '%s' '{content}' > '{path}'")

    def spawn(self, task: str) -> Call:
        """Return a call that hands a task to a sub-agent."""
        return self._call("subagent", task)

    def wait(self) -> Call | None:
        """Return a call that waits for the sub-agents named in the latest tool result; None where none is needed."""
        try:
            tool = self._find("wait")
        except Unsayable:
            return None
        results = [message.content for message in self._request.messages if message.role == "tool"]
        names: list[Json] = list(dict.fromkeys(_AGENT_ID.findall(results[-1]))) if results else []
        if not names:
            return None
        argument = _argument(tool, _TEXT_ARGUMENT["wait"])
        one = _schema(tool, argument).get("type") == "string"
        return Call(tool.name, {**_required(tool), argument: names[0] if one else names})

    def ending(self, answer: str) -> Call | None:
        """Return the call that ends this agent's work where a plain answer does not."""
        try:
            return self._call("finish", answer)
        except Unsayable:
            pass
        if any(_ENDING_COMMAND.split()[1] in message.content for message in self._request.messages[:2]):
            return self.shell(_ENDING_COMMAND)
        return None

    def unknown(self) -> Call:
        """Return a call of a tool that is not offered."""
        name = "no_such_tool"
        assert all(tool.name != name for tool in self._request.tools)
        return Call(name, {"value": 1})

    def _find(self, purpose: Purpose) -> ToolSpec:
        for pattern in _TOOL_NAMES[purpose]:
            for tool in self._tools:
                if re.fullmatch(pattern, _plain(tool.name)) and _has_argument(tool, _TEXT_ARGUMENT[purpose]):
                    return tool
        raise Unsayable(f"no {purpose} tool among {', '.join(tool.name for tool in self._tools) or 'none'}")

    def _call(self, purpose: Purpose, text: str, more: Mapping[str, Json] | None = None) -> Call:
        tool = self._find(purpose)
        argument = _argument(tool, _TEXT_ARGUMENT[purpose])
        value = _shaped(_schema(tool, argument), text, as_list=["bash", "-c", text] if purpose == "shell" else [text])
        return Call(tool.name, {**_required(tool), **(more or {}), argument: value})


def _shaped(schema: Mapping[str, Json], text: str, *, as_list: list[Json]) -> Json:
    """Return a text in the form an argument wants: as it is, in a list, or in the fields that an object requires."""
    if schema.get("type") == "array":
        return as_list
    if schema.get("type") == "object":
        required = schema.get("required")
        return {name: text for name in required if isinstance(name, str)} if isinstance(required, list) else {}
    return text


def _plain(name: str) -> str:
    """Return a name in lower case without the prefix of a namespace or tool server."""
    return re.split(r"__|\.|/", name)[-1].lower()


def _properties(tool: ToolSpec) -> Mapping[str, Json]:
    properties = tool.parameters.get("properties")
    return properties if isinstance(properties, dict) else {}


def _schema(tool: ToolSpec, argument: str) -> Mapping[str, Json]:
    schema = _properties(tool).get(argument)
    return schema if isinstance(schema, dict) else {}


def _has_argument(tool: ToolSpec, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(pattern, name.lower()) for pattern in patterns for name in _properties(tool))


def _argument(tool: ToolSpec, patterns: Sequence[str]) -> str:
    for pattern in patterns:
        for name in _properties(tool):
            if re.fullmatch(pattern, name.lower()):
                return name
    raise Unsayable(f"no argument like {patterns[0]} in tool {tool.name}")


def _required(tool: ToolSpec) -> dict[str, Json]:
    """Return a value for every argument the tool requires."""
    required = tool.parameters.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return {name: _filler(tool, name) for name in names}


def _filler(tool: ToolSpec, argument: str) -> Json:
    schema = _schema(tool, argument)
    choices = schema.get("enum")
    listed = choices if isinstance(choices, list) else []
    if argument in ("subagent_type", "agent_name", "agent", "agent_type"):
        listed = listed or list(_LISTED_AGENT.findall(tool.description))
        names = [name for name in listed if isinstance(name, str)]
        for pattern in _AGENT_KINDS:
            for name in names:
                if re.fullmatch(pattern, name.lower()):
                    return name
    if listed:
        return listed[0]
    if argument in _KNOWN_VALUES:
        return _KNOWN_VALUES[argument]
    kind = schema.get("type")
    fillers: Mapping[str, Json] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    return fillers.get(kind, "x") if isinstance(kind, str) else "x"
