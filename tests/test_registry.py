"""Names to things."""

from __future__ import annotations

from pathlib import Path

import pytest

from clawgym_env import registry
from clawgym_env.errors import ClawGymError, PolicyNotBuilt, UsageError
from clawgym_env.registry import HARNESSES, NEEDS_OPTIONS, UnknownName
from clawgym_env.testing import FakeBackend, InProcessHarness


@pytest.mark.parametrize("name", sorted(set(HARNESSES) - NEEDS_OPTIONS))
def test_every_name_of_the_table_makes_an_adapter_of_that_name(name: str) -> None:
    assert registry.adapter(name).name == name


def test_instances_and_import_paths_are_accepted() -> None:
    harness, backend = InProcessHarness(), FakeBackend()
    assert registry.adapter(harness) is harness
    assert registry.backend(backend) is backend
    assert isinstance(registry.backend("clawgym_env.testing:FakeBackend"), FakeBackend)


def test_options_follow_a_question_mark() -> None:
    assert registry.adapter("mini?dialect=messages").dialect == "messages"


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ClawGymError, match=r"\['dialect'\].*got colour"):
        registry.adapter("mini?colour=red")


def test_a_sandbox_takes_options_too() -> None:
    assert registry.backend("docker?image=clawgym/pi:1.6.0&max_starts=3").name == "docker"
    with pytest.raises(ClawGymError, match=r"options of sandbox 'local' out of .*'use_cgroups'.*got image"):
        registry.backend("local?image=clawgym/pi:1.6.0")
    with pytest.raises(ClawGymError, match="option max_starts of sandbox 'docker' to be int, got 'many'"):
        registry.backend("docker?max_starts=many")


def test_an_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'claude-code'"):
        registry.adapter("claudecode")


def test_an_import_path_that_leads_nowhere_says_how_far_it_leads() -> None:
    with pytest.raises(UsageError, match=r"Expected a module 'no_such\.module', got none"):
        registry.load("no_such.module:thing")
    with pytest.raises(UsageError, match="Expected 'nothing' in json"):
        registry.load("json:nothing")
    with pytest.raises(UsageError, match="got 'json'"):
        registry.load("json")


def test_an_import_path_to_something_else_is_refused() -> None:
    with pytest.raises(ClawGymError, match="to make a HarnessAdapter, got dict"):
        registry.adapter("builtins:dict")


def test_an_engine_over_a_policy_is_made_from_its_cache(tmp_path: Path) -> None:
    with pytest.raises(PolicyNotBuilt, match="clawgym policy build tiny"):
        registry.engine("torch:tiny", tmp_path)


@pytest.mark.parametrize(
    ("spec", "bare"),
    [("codex?bare", True), ("codex?bare=1", True), ("codex?bare=no", False), ("codex?bare=0", False)],
)
def test_a_switch_is_read_as_one(spec: str, bare: bool) -> None:
    assert registry.adapter(spec).bare is bare  # type: ignore[attr-defined]


@pytest.mark.parametrize("spec", ["codex?bare=maybe", "claude-code?tools", "gemini-cli?tools=", "command?file"])
def test_an_option_of_another_type_is_refused(spec: str) -> None:
    with pytest.raises(ClawGymError, match=r"Expected option \w+ of harness '[\w-]+' to be .*, got '\w*'"):
        registry.adapter(spec)


def test_an_import_path_without_its_attribute_is_refused() -> None:
    with pytest.raises(ClawGymError, match=r"Expected .Nothing. in clawgym_env\.testing"):
        registry.adapter("clawgym_env.testing:Nothing")


def test_what_can_be_installed_is_a_harness_or_a_bundled_server() -> None:
    assert registry.installable("documents").argv
    assert registry.installable("claude-code?bare").name == "claude-code"
    with pytest.raises(registry.UnknownName, match=r"documents.*got 'documnets'\. Did you mean 'documents'"):
        registry.installable("documnets")
