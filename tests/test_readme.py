"""What the README and docs/ say is so, each against the code: names, versions, links, commands, keywords, messages."""

from __future__ import annotations

import ast
import configparser
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
from markdown_pages import PAGES, README, ROOT, Section, anchors, section, sections

import clawgym_env
from clawgym_env import cli, registry
from clawgym_env.envs.rollout_vector import RolloutVectorEnv
from clawgym_env.harness import HarnessAdapter
from clawgym_env.rollout import failure_table
from clawgym_env.tasks import formats
from clawgym_env.trace.prefix_tree import BUCKETS
from harness_adapters.command import CommandHarness
from harness_adapters.oracle import OracleHarness
from learners.registry import LEARNERS

DOCS = ROOT / "docs"
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
WITHOUT_DEFAULTS: dict[str, type[HarnessAdapter]] = {"command": CommandHarness, "oracle": OracleHarness}
NO_SESSION_WANTED = {"noop", "oracle"}
"""They prove tasks and have nobody to talk to."""


def named(kind: str) -> set[str]:
    """Return every name in backticks of a table's first cells."""
    page, title = {
        "sandbox": (README, "Sandboxes"),
        "dependency": (README, "Dependencies, and why each is here"),
        "format": (DOCS / "tasks.md", "Sets of tasks"),
        "keyword": (DOCS / "environments.md", "Ids"),
        "info": (DOCS / "environments.md", "A step"),
        "bucket": (DOCS / "guarantees.md", "Which calls are trained"),
    }[kind]
    return {name for row in section(page, title).rows() for name in re.findall(r"`([^`]+)`", row[0])}


def python_files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_the_first_screen_has_the_commands_and_the_loop() -> None:
    lines = README.read_text(encoding="utf-8").splitlines()
    assert lines.index("## Two commands") < lines.index("## The loop") < 60


def test_every_command_is_named_and_every_named_command_exists() -> None:
    code = "\n".join("\n".join((*one.spans(), *one.blocks("bash"), *one.blocks("python"))) for one in sections())
    assert set(re.findall(r"(?<![\w./-])clawgym ([a-z]+)", code)) == set(cli.COMMANDS)


def test_every_make_target_that_is_named_exists() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"`make ([a-z-]+)", TEXT)) | set(re.findall(r"^make ([a-z-]+)", TEXT, re.MULTILINE)) <= set(
        targets
    )


def harness_rows() -> dict[str, list[str]]:
    """Return the rows of the harness table by the harness's name with its options."""
    rows = section(README, "Harnesses").rows()
    return {row[1].strip("`"): row for row in rows if row[1].startswith("`")}


def made(name: str) -> HarnessAdapter | type[HarnessAdapter]:
    return WITHOUT_DEFAULTS.get(name.partition("?")[0]) or registry.adapter(name)


def test_the_harness_table_has_every_harness() -> None:
    assert {name.partition("?")[0] for name in harness_rows()} == set(registry.HARNESSES)


@pytest.mark.parametrize("name", sorted(harness_rows()))
def test_a_harness_is_described_as_its_adapter_says(name: str) -> None:
    env_id, _, version, _, dialect, mcp, *_ = harness_rows()[name]
    adapter = made(name)
    assert version == adapter.version
    assert (mcp == "yes") == adapter.supports_mcp
    if adapter.calls_model and name != "command":
        assert dialect.lower().startswith(adapter.dialect)
    if env_id:
        assert env_id == f"`{clawgym_env.env_id(name)}`"


def test_the_harnesses_that_go_on_with_a_session_are_those_said() -> None:
    forgetful = {name for name in registry.HARNESSES if not made(name).supports_resume} - NO_SESSION_WANTED
    assert forgetful == {"mini-swe-agent", "command"}
    assert "several\nturns but mini-swe-agent and `command`" in section(README, "Harnesses").text


def test_every_id_is_named() -> None:
    ids = {name for name in gymnasium.registry if name.startswith("ClawGym-")}
    assert ids - set(re.findall(r"ClawGym-\w+(?:-\w+)?-v\d+", TEXT)) == set()


def test_every_sandbox_is_named() -> None:
    assert named("sandbox") == set(registry.BACKENDS)


def test_every_dependency_and_every_extra_has_its_line() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = dict(setup["options.extras_require"])
    cells = " ".join(row[0] for row in section(README, "Dependencies, and why each is here").rows())
    required = "\n".join([setup["options"]["install_requires"], *(extras[name] for name in extras if name != "dev")])
    packages = {name for line in required.splitlines() for name in re.findall(r"^[A-Za-z][\w-]*", line.strip())}
    packages -= {"clawgym"}
    assert packages - set(re.findall(r"[a-z][\w-]*", cells)) == set()
    assert (
        set(extras)
        - set(re.findall(r"`([a-z][a-z0-9-]*)`", section(README, "Dependencies, and why each is here").text))
        == set()
    )


def test_every_extra_that_is_to_be_installed_exists() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    shown = re.findall(r"pip install '(?:clawgym|\.)\[([^\]]+)\]'", TEXT)
    assert shown
    assert {name for names in shown for name in names.split(",")} <= set(setup["options.extras_require"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        if path.startswith("http"):
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/[\w.-]+)", README.read_text(encoding="utf-8")))
    assert linked == {str(page.relative_to(ROOT)) for page in PAGES[1:]}


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_every_script_is_named_and_every_named_script_exists(folder: str) -> None:
    scripts = {path.name for path in (ROOT / folder).glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    found = set(re.findall(rf"{folder}/(\w+\.py)", TEXT))
    assert scripts <= found
    assert all((ROOT / folder / name).exists() for name in found)


def test_every_format_of_tasks_is_described() -> None:
    assert named("format") == {one.name for one in formats.FORMATS}


def test_every_keyword_of_make_is_described() -> None:
    assert named("keyword") == set(inspect.signature(RolloutVectorEnv).parameters)


def test_every_bucket_is_described() -> None:
    assert named("bucket") == set(BUCKETS)


def test_every_learner_is_described() -> None:
    assert all(path.replace(":", ".") in TEXT for path in LEARNERS.values())


def test_what_becomes_of_a_failed_rollout_is_shown_as_the_code_has_it() -> None:
    assert failure_table() in (DOCS / "guarantees.md").read_text(encoding="utf-8")


def texts(tree: ast.AST) -> Iterator[str]:
    """Yield every string of a module as a message would show it, with "…" where something is filled in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(str(part) for part in parts)


def test_every_message_in_troubleshooting_is_one_that_the_code_says() -> None:
    quoted = [row[0].strip("`") for row in section(README, "Troubleshooting").rows() if row[0].startswith("`")]
    sources = python_files("clawgym_env", "learners", "harness_adapters")
    said = [text for path in sources for text in texts(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(quoted) >= 10
    for message in quoted:
        assert any(holds(text, message.split("…")) for text in said), message


def holds(text: str, pieces: list[str]) -> bool:
    """Whether a text has all pieces in order."""
    position = 0
    for piece in pieces:
        position = text.find(piece, position)
        if position < 0:
            return False
        position += len(piece)
    return True


def commands(one: Section) -> Iterator[str]:
    """Yield the command lines of a section, comments left out."""
    for block in one.blocks("bash"):
        yield from (line.partition("  #")[0].strip() for line in block.splitlines() if not line.startswith("#"))
    yield from (span for span in one.spans() if span.startswith(("clawgym ", "python ")))


def test_every_flag_that_is_shown_exists(capsys: pytest.CaptureFixture[str]) -> None:
    helps: dict[tuple[str, ...], str] = {}
    for line in (line for one in sections() for line in commands(one)):
        flags = set(re.findall(r"(?<!\w)--([a-z][a-z0-9-]*)", line)) - {"help"}
        words = tuple(line.split()[:3])
        if words[0] == "clawgym":
            if words[:2] not in helps:
                with pytest.raises(SystemExit):
                    cli.main([words[1], "--help"])
                helps[words[:2]] = capsys.readouterr().out
            assert flags <= set(re.findall(r"--([a-z][a-z0-9-]*)", helps[words[:2]])), line
        elif words[0] == "python" and words[1].endswith(".py"):
            for script in re.sub(r"\{(.*)\}", lambda names: names[1].split(",")[0], words[1]).split():
                source = (ROOT / script).read_text(encoding="utf-8")
                assert all(re.search(rf"\b{flag.replace('-', '_')}\b", source) for flag in flags), line
