"""Names to things: the one place where `clawgym_env` reaches harness adapters, sandbox backends and engines.

A name, an import path `"package.module:attribute"` or an instance is accepted wherever the built-in ones are.
Invariant: nothing is imported until its name is asked for, so `import clawgym_env` stays light and the import arrows
point one way.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import pydantic

from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Engine
from clawgym_env.errors import MissingPackage, UsageError
from clawgym_env.extras import EXTRA_OF
from clawgym_env.harness import BundledServer, HarnessAdapter
from clawgym_env.sandbox.base import SandboxBackend

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

HARNESSES: Mapping[str, str] = MappingProxyType(
    {
        "mini": "harness_adapters.mini.adapter:MiniHarness",
        "pi": "harness_adapters.pi:PiHarness",
        "claude-code": "harness_adapters.claude_code:ClaudeCodeHarness",
        "codex": "harness_adapters.codex:CodexHarness",
        "openclaw": "harness_adapters.openclaw:OpenClawHarness",
        "mini-swe-agent": "harness_adapters.mini_swe:MiniSweHarness",
        "qwen-code": "harness_adapters.qwen_code:QwenCodeHarness",
        "opencode": "harness_adapters.opencode:OpenCodeHarness",
        "gemini-cli": "harness_adapters.gemini_cli:GeminiCliHarness",
        "agent-loop": "harness_adapters.agent_loop.adapter:AgentLoop",
        "command": "harness_adapters.command:command_harness",
        "noop": "harness_adapters.noop:NoopHarness",
        "oracle": "harness_adapters.oracle:OracleHarness",
    }
)
NEEDS_OPTIONS = frozenset({"command"})
"""Harnesses that a name alone does not make."""
MCP_SERVERS: Mapping[str, str] = MappingProxyType({"documents": "harness_adapters.mcp.documents:DocumentSearch"})
BUNDLED = "clawgym:"
"""Before the name of a bundled server, as the program of a task's `McpServer`."""
BACKENDS: Mapping[str, str] = MappingProxyType(
    {
        "local": "clawgym_env.sandbox.local:LocalBackend",
        "docker": "clawgym_env.sandbox.docker:DockerBackend",
    }
)


RELAY_API_KEY = "CLAWGYM_RELAY_API_KEY"
"""Environment variable with the key of an `"openai:"` engine."""


class UnknownName(UsageError):
    """A name that is in no table; the message lists the known ones and the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(
            f"Expected a {kind} out of {', '.join(names)} or an import path 'module:attribute', got {name!r}.{hint}"
        )


def load(import_path: str) -> Any:
    """Import `"package.module:attribute"`.

    Raises:
        UsageError: there is no such module or attribute.
        MissingPackage: the module needs a package of an extra; with the command to run.
    """
    module, _, attribute = import_path.partition(":")
    if not attribute:
        raise UsageError(f"Expected an import path 'package.module:attribute', got {import_path!r}.")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing in EXTRA_OF:
            raise MissingPackage(missing, EXTRA_OF[missing]) from error
        if f"{module}.".startswith(f"{missing}."):
            raise UsageError(f"Expected a module {module!r}, got none. Is its folder in PYTHONPATH?") from error
        raise
    except AttributeError as error:
        raise UsageError(f"Expected {attribute!r} in {module}, got: {error}.") from error


def adapter(spec: str | HarnessAdapter) -> HarnessAdapter:
    """Return a harness adapter by name, import path or as it is.

    Options follow a question mark: `"claude-code?bare"`, `"claude-code?tools=Bash,Edit"`, `"mini?dialect=messages"`.
    """
    if isinstance(spec, HarnessAdapter):
        return spec
    name, _, query = spec.partition("?")
    made = _resolve("harness", name, HARNESSES)
    harness = made(**_options(f"harness {name!r}", made, query)) if query else made()
    if not isinstance(harness, HarnessAdapter):
        raise UsageError(f"Expected {name!r} to make a HarnessAdapter, got {type(harness).__name__}.")
    return harness


def installable(spec: str) -> HarnessAdapter | BundledServer:
    """Return what `clawgym install SPEC` installs: a harness, or a bundled MCP server."""
    name = spec.partition("?")[0]
    if name in MCP_SERVERS:
        return bundled_server(name)
    if name not in HARNESSES and ":" not in name:
        raise UnknownName("harness or bundled MCP server", name, (*HARNESSES, *MCP_SERVERS))
    return adapter(spec)


def bundled_server(name: str) -> BundledServer:
    """Return a bundled MCP server by name."""
    made: BundledServer = _resolve("bundled MCP server", name, MCP_SERVERS)()
    return made


def backend(spec: str | SandboxBackend) -> SandboxBackend:
    """Return a sandbox backend by name, import path or as it is.

    Options follow a question mark: `"docker?image=clawgym/pi:1.6.0"`, `"docker?runtime=runsc"`.
    """
    if not isinstance(spec, str):
        return spec
    name, _, query = spec.partition("?")
    made = _resolve("sandbox", name, BACKENDS)
    opened: SandboxBackend = made(**_options(f"sandbox {name!r}", made, query)) if query else made()
    return opened


def engine(spec: str | Engine, cache: Path | None = None, *, policy: Policy | None = None) -> Engine:
    """Return an engine: `"scripted:FILE"`, `"torch:POLICY"`, `"vllm:URL"`, `"openai:URL#MODEL"`, an import path of a
    factory, or as it is.

    A running vLLM server is asked for its policy's folder; `"vllm:URL#FOLDER"` names it where it lies elsewhere here.
    `"vllm:URL,URL"` are servers of one policy; options as of `VllmSettings`: `"vllm:URL?max_concurrency=64"`.
    A model behind an API is for evaluation only; its key is taken from `CLAWGYM_RELAY_API_KEY`, options follow a
    question mark: `"openai:https://host/v1#some-model?context_length=200000"`.

    Args:
        cache: where built policies are kept; the user's own cache by default.
        policy: under training: what is sampled from is this one, and `update_weights` reaches it (torch and vllm).
    """
    if not isinstance(spec, str):
        return spec
    kind, _, rest = spec.partition(":")
    if kind == "scripted":
        scripted: Engine = load("clawgym_env.engine.scripted:scripted_from_file")(Path(rest))
        return scripted
    if kind == "torch":
        return policy_engine(policy or rest, cache or cache_dir())
    if kind == "vllm":
        return _vllm_engine(rest, cache or cache_dir(), policy)
    if kind == "openai":
        return _relay(rest)
    known = dict.fromkeys(("scripted:FILE", "torch:POLICY", "vllm:URL", "openai:URL#MODEL"), "")
    made: Engine = _resolve("engine", spec, known)()
    return made


def _vllm_engine(spec: str, cache: Path, policy: Policy | None) -> Engine:
    """Return the engine over servers: URL[,URL...][?option=value&...][#FOLDER]."""
    servers, _, folder = spec.partition("#")
    urls, _, query = servers.partition("?")
    settings = load("clawgym_env.engine.vllm:VllmSettings")
    options = settings(**_options("engine 'vllm'", settings, query))
    made: Engine = load("clawgym_env.engine.vllm:VllmEngine").connect(
        urls, cache=cache, policy=policy or folder or None, settings=options
    )
    return made


def policy_engine(policy: str | Path | Policy, cache: Path) -> Engine:
    """Return the embedded engine over a policy: "tiny", "smollm2", a Hugging Face folder, or a loaded `Policy`.

    Raises:
        PolicyNotBuilt: with the command that builds it.
    """
    loaded = policy
    if isinstance(policy, str | Path):
        loaded = load("clawgym_env.policy:load_policy")(policy, cache=cache)
    made: Engine = load("clawgym_env.engine.torch_engine:TorchEngine")(loaded)
    return made


def _relay(spec: str) -> Engine:
    url, _, rest = spec.partition("#")
    model, _, query = rest.partition("?")
    made = load("clawgym_env.engine.relay:RelaySettings")
    settings = made(**_options(f"engine 'openai:{url}#{model}'", made, query))
    relay: Engine = load("clawgym_env.engine.relay:RelayEngine").connect(
        url, model, api_key=os.environ.get(RELAY_API_KEY, ""), settings=settings
    )
    return relay


def _resolve(kind: str, name: str, table: Mapping[str, str]) -> Any:
    if target := table.get(name):
        return load(target)
    if ":" in name:
        return load(name)
    raise UnknownName(kind, name, table)


def _options(what: str, made: Callable[..., object], query: str) -> dict[str, object]:
    """Read the text behind the question mark as what the parameters of `made` are annotated to be.

    Raises:
        UsageError: an unknown option, or a value that its parameter does not take.
    """
    try:
        known = inspect.signature(made, eval_str=True).parameters
    except NameError:  # annotations that only a type checker can read
        known = inspect.signature(made).parameters
    given = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(given.keys() - known):
        raise UsageError(f"Expected options of {what} out of {sorted(known) or 'none'}, got {', '.join(unknown)}.")
    options = {}
    for key, text in given.items():
        wanted = known[key].annotation
        listed = tuple(filter(None, text.split(","))) if "," in text else text
        try:
            checked = Any if wanted is inspect.Parameter.empty or isinstance(wanted, str) else wanted
            options[key] = pydantic.TypeAdapter(checked).validate_python(listed or True)
        except pydantic.ValidationError as error:
            raise UsageError(
                f"Expected option {key} of {what} to be {inspect.formatannotation(wanted)}, got {text!r}."
            ) from error
    return options
