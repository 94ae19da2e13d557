"""Adapter of any command-line agent, by template: nothing of ours knows the product.

Its arguments, environment, files and standard input are texts with placeholders such as `{instruction}`, filled in for
each rollout. From Python it is an instance, `harness=CommandHarness(argv=[…])`; by name, `"command?file=my_cli.toml"`,
a TOML file of the same options. Invariant: what cannot be filled in is refused when the harness is made.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pydantic

from clawgym_env.errors import HarnessOptionError
from clawgym_env.harness import HarnessAdapter, HarnessContext, HarnessExit
from clawgym_env.messages import Dialect
from clawgym_env.sandbox.base import Mount, Sandbox
from harness_adapters.launch import HOME, OPT
from harness_adapters.template import fill, placeholders

PROGRAM = f"{OPT}/command"
"""Where the sandbox shows the program."""
FROM_CONTEXT = (
    "instruction",
    "base_url",
    "api_key",
    "model",
    "workdir",
    "context_length",
    "max_tokens",
    "seed",
)
PLACEHOLDERS = (*FROM_CONTEXT, "home", "program")


class CommandHarness(HarnessAdapter):
    """A command line of the user's own.

    The placeholders: instruction, base_url (`http://127.0.0.1:PORT/r/KEY`, to which most clients want `/v1` added),
    api_key, model, workdir, context_length, max_tokens, seed, home and program. `{name:json}` is the value as JSON,
    for configuration files; `{{name}}` is the text `{name}` itself. Arguments see no shell, so nothing needs quoting.
    """

    version = "1.0"

    @pydantic.validate_call
    def __init__(
        self,
        *,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        response: str | None = None,
        program: Path | None = None,
        dialect: Dialect = "chat",
        memory_mb: int = 2048,
        name: str = "command",
    ) -> None:
        """Make the harness from its templates.

        Args:
            argv: program, searched in the sandbox's PATH, and arguments. It runs in the workspace.
            env: variables beside the sandbox's own.
            files: what is written before the start, executable, by path.
            stdin: what it reads on standard input.
            response: path of the file that holds the answer; it is on standard output where not given.
            program: file or folder of this machine, shown read-only at `{program}`.
            dialect: what the program speaks to the proxy.
            name: what its rollouts are called.

        Raises:
            HarnessOptionError: an unknown placeholder, a program that is not there, or a command that is never told its
                task or its model.
        """
        self.argv, self.env, self.files = tuple(argv), dict(env or {}), dict(files or {})
        self.stdin, self.response, self.dialect = stdin, response, dialect
        self.memory_mb, self.name = memory_mb, name
        self.program = program and program.expanduser().absolute()
        texts = (*self.argv, *self.env.values(), *self.files, *self.files.values(), stdin)
        told: set[str] = set().union(*map(placeholders, texts))
        used = told | placeholders(response or "")
        if unknown := sorted(used - set(PLACEHOLDERS)):
            raise HarnessOptionError(
                f"Expected placeholders out of {', '.join(PLACEHOLDERS)}, got {', '.join(unknown)}. "
                f"Write {{{{{unknown[0]}}}}} for the text itself."
            )
        for needed in ("instruction", "base_url"):
            if needed not in told:
                raise HarnessOptionError(
                    f"Expected {{{needed}}} in argv, env, files or stdin, got a command without it."
                )
        if "program" in used and (self.program is None or not self.program.exists()):
            raise HarnessOptionError(f"Expected program= to be what {{program}} stands for, got {self.program}.")

    def mounts(self, cache: Path) -> tuple[Mount, ...]:
        return () if self.program is None else (Mount(source=self.program, target=PROGRAM),)

    async def run(self, sandbox: Sandbox, context: HarnessContext) -> HarnessExit:
        values = {name: getattr(context, name) for name in FROM_CONTEXT} | {"home": HOME, "program": PROGRAM}
        for path, text in self.files.items():
            await sandbox.write_file(fill(path, values), fill(text, values).encode(), mode=0o755)
        done = await sandbox.exec(
            [fill(argument, values) for argument in self.argv],
            env={key: fill(text, values) for key, text in self.env.items()},
            cwd=context.workdir,
            stdin=fill(self.stdin, values).encode(),
        )
        answer = done.stdout
        if self.response is not None:
            try:
                answer = await sandbox.read_file(fill(self.response, values))
            except OSError:
                answer = b""  # the program gave none
        response = answer.decode("utf-8", "replace").strip()
        return HarnessExit(done.exit_code, done.stdout, done.stderr, response, done.timed_out)


def command_harness(*, file: str | None = None) -> CommandHarness:
    """Return the harness that a TOML file describes: options of `CommandHarness`, `program` relative to the file.

    Raises:
        HarnessOptionError: no file, or not of that form.
    """
    if file is None:
        raise HarnessOptionError(
            "Expected a command line for the command harness, got none. Pass harness=CommandHarness(argv=[…]) of "
            "harness_adapters.command, or harness='command?file=my_cli.toml'."
        )
    try:
        options = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        if isinstance(options.get("program"), str):
            options["program"] = Path(file).parent / Path(options["program"]).expanduser()
        return CommandHarness(**options)
    except (OSError, ValueError) as error:  # pydantic's and tomllib's errors are ValueErrors
        raise HarnessOptionError(f"Expected the options of CommandHarness in {file!r}, got: {error}") from error
