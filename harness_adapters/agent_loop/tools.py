"""The tools of the agent loop: a shell, files, and search, carried out in a sandbox from the host.

Invariant: whatever a call asks for, the model is told what came of it; only a broken sandbox is an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from clawgym_env.messages import Json, ToolSpec
from clawgym_env.sandbox.base import Sandbox

MAX_OUTPUT = 16_000
"""Characters of one result; the rest is left out, and said to be."""
MAX_FILE = 4 << 20
COMMAND_TIMEOUT_S = 120.0
SEARCH = ["grep", "-rnIE", "--exclude-dir=.git"]


class BadCall(Exception):
    """A call that cannot be carried out; the model is told why."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools, at work in one sandbox."""

    sandbox: Sandbox
    workdir: str

    async def run(self, name: str, arguments: Mapping[str, Json] | None) -> str:
        """Carry out a call and return what the model is told.

        Args:
            arguments: None where they were no JSON object.

        Raises:
            SandboxError: the sandbox is gone.
        """
        spec = next((tool for tool in TOOLS if tool.name == name), None)
        if spec is None:
            return f"error: expected a tool out of {', '.join(_ACTS)}, got {name!r}"
        if arguments is None:
            return "error: expected the arguments to be a JSON object"
        texts = {key: value for key, value in arguments.items() if isinstance(value, str)}
        if missing := [key for key in _required(spec) if key not in texts]:
            return f"error: expected text for {', '.join(missing)}"
        try:
            return _bounded(await _ACTS[name](self, texts))
        except BadCall as error:
            return f"error: {error}"
        except (OSError, ValueError) as error:  # a path that is none, a folder, a full disk
            return f"error: {error}"

    async def bash(self, arguments: Mapping[str, str]) -> str:
        command = ["bash", "-c", arguments["command"]]
        done = await self.sandbox.exec(command, cwd=self.workdir, timeout_s=COMMAND_TIMEOUT_S)
        output = (done.stdout + done.stderr).decode("utf-8", "replace")
        if done.timed_out:
            return f"{output}\nerror: stopped after {COMMAND_TIMEOUT_S:.0f} s"
        return output if output and done.exit_code == 0 else f"{output}exit {done.exit_code}"

    async def read(self, arguments: Mapping[str, str]) -> str:
        return await self._text(arguments["path"])

    async def write(self, arguments: Mapping[str, str]) -> str:
        await self.sandbox.write_file(self._place(arguments["path"]), arguments["content"].encode())
        return "ok"

    async def edit(self, arguments: Mapping[str, str]) -> str:
        text, old = await self._text(arguments["path"], strict=True), arguments["old"]
        if not old or (found := text.count(old)) != 1:
            raise BadCall(f"expected old to be in the file once, got {found if old else 'empty text'}")
        changed = text.replace(old, arguments["new"])
        await self.sandbox.write_file(self._place(arguments["path"]), changed.encode())
        return "ok"

    async def search(self, arguments: Mapping[str, str]) -> str:
        command = [*SEARCH, "-e", arguments["pattern"], "--", arguments.get("path", ".")]
        done = await self.sandbox.exec(command, cwd=self.workdir, timeout_s=COMMAND_TIMEOUT_S)
        output = (done.stdout or done.stderr).decode("utf-8", "replace")
        return output or "no match"

    def _place(self, path: str) -> str:
        return str(PurePosixPath(self.workdir) / path)

    async def _text(self, path: str, *, strict: bool = False) -> str:
        data = await self.sandbox.read_file(self._place(path), max_bytes=MAX_FILE)
        return data.decode("utf-8", "strict" if strict else "replace")


def _required(spec: ToolSpec) -> list[str]:
    required = spec.parameters["required"]
    return [key for key in required if isinstance(key, str)] if isinstance(required, list) else []


def _spec(name: str, description: str, *required: str, optional: tuple[str, ...] = ()) -> ToolSpec:
    properties: dict[str, Json] = {key: {"type": "string"} for key in (*required, *optional)}
    return ToolSpec(name, description, {"type": "object", "properties": properties, "required": list(required)})


def _bounded(text: str) -> str:
    return text if len(text) <= MAX_OUTPUT else f"{text[:MAX_OUTPUT]}\n[{len(text) - MAX_OUTPUT} characters left out]"


_ACTS: Mapping[str, Callable[[Toolbox, Mapping[str, str]], Awaitable[str]]] = {
    "bash": Toolbox.bash,
    "read": Toolbox.read,
    "write": Toolbox.write,
    "edit": Toolbox.edit,
    "search": Toolbox.search,
}
TOOLS: tuple[ToolSpec, ...] = (
    _spec("bash", "Run a shell command in the working folder.", "command"),
    _spec("read", "Read a text file.", "path"),
    _spec("write", "Write a file, making its folders.", "path", "content"),
    _spec("edit", "Replace a text that is in a file exactly once.", "path", "old", "new"),
    _spec("search", "Find the lines that match a regular expression.", "pattern", optional=("path",)),
)
