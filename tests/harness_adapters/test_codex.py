"""The Codex adapter: configuration, answer and kinds; then Codex itself against the real proxy."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from fake_sandbox import CONTEXT, FakeSandbox
from hypothesis import given
from hypothesis import strategies as st
from test_real_harnesses import installed, play

from clawgym_env.engine.scripted import Script, tool_call
from clawgym_env.messages import ChatRequest, Json, Message
from clawgym_env.registry import adapter
from clawgym_env.sandbox.base import WORKDIR, ExecResult
from clawgym_env.tasks.task import McpServer
from clawgym_env.trace.prefix_tree import PrefixTree
from harness_adapters import codex
from harness_adapters.codex import CodexHarness

EVENTS = b"""{"type":"thread.started","thread_id":"t"}
noise
{"type":"item.completed","item":{"id":"item_1","type":"agent_message","text":"On it."}}
{"type":"item.completed","item":{"id":"item_2","type":"command_execution","command":"ls"}}
{"type":"item.completed","item":{"id":"item_3","type":"agent_message","text":"Done."}}
{"type":"turn.completed","usage":{}}
"""


def test_codex_is_pointed_at_the_proxy_and_gets_the_instruction_on_stdin() -> None:
    sandbox = FakeSandbox([ExecResult(0, EVENTS, b"")])
    done = asyncio.run(CodexHarness().run(sandbox, CONTEXT))
    (run,) = sandbox.execs
    assert run.argv == ("/opt/clawgym/codex-0.171.0/program", "exec", "--skip-git-repo-check", "--json", "-")
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    made = tomllib.loads(sandbox.files["/root/.codex/config.toml"].decode())
    provider = made["model_providers"][made["model_provider"]]
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:8080/r/k3y/v1", "responses")
    assert run.env == {provider["env_key"]: "sk-dummy"}
    assert made["features"] == {"plugins": False, "apps": False}
    assert made["analytics"] == {"enabled": False}
    assert done.response == "Done."


def test_bare_codex_brings_a_line_of_instructions_and_a_shell() -> None:
    sandbox = FakeSandbox()
    asyncio.run(adapter("codex?bare").run(sandbox, CONTEXT))
    made = tomllib.loads(sandbox.files["/root/.codex/config.toml"].decode())
    assert made["model_instructions_file"] in sandbox.files
    assert made["agents"] == {"enabled": False}
    assert made["features"] == {"plugins": False, "apps": False, "goals": False, "view_image": False}


@pytest.mark.parametrize("stdout", [b"", b"[]\n3\n", EVENTS.replace(b"turn.completed", b"turn.failed")])
def test_codex_without_a_completed_turn_has_no_answer(stdout: bytes) -> None:
    assert codex.final_answer(stdout) == ""


@pytest.mark.parametrize(("window", "reply"), [(4096, 512), (32_768, 2048), (200_000, 4096)])
def test_codex_compacts_while_a_result_and_a_reply_still_fit(window: int, reply: int) -> None:
    made: dict[str, Any] = codex.config(replace(CONTEXT, context_length=window, max_tokens=reply))
    limit, result = made["model_auto_compact_token_limit"], made["tool_output_token_limit"]
    assert made["model_context_window"] == window
    assert window // 2 <= limit
    assert limit + 3 * result + reply <= window


def test_codex_is_given_the_tasks_tool_servers() -> None:
    server = McpServer(name="docs", command=("python3", "-m", "docs"), env={"A": "b"})
    made: dict[str, Any] = codex.config(replace(CONTEXT, mcp_servers=(server,)))
    docs = made["mcp_servers"]["docs"]
    assert (docs["command"], docs["args"], docs["env"]) == ("python3", ["-m", "docs"], {"A": "b"})


_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(
    st.recursive(
        st.booleans() | st.integers(-(2**53), 2**53) | _TEXT, lambda x: st.lists(x) | st.dictionaries(_TEXT, x)
    )
)
def test_what_is_written_as_toml_reads_back_the_same(value: Json) -> None:
    assert tomllib.loads(f"key = {codex.toml(value)}") == {"key": value}


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({}, None),
        ({"x-codex-turn-metadata": "no json"}, None),
        ({"x-codex-turn-metadata": "[]"}, None),
        ({"X-Codex-Turn-Metadata": '{"request_kind": "turn"}'}, "main"),
        ({"x-codex-turn-metadata": '{"request_kind": "compaction"}'}, "compaction"),
        ({"x-codex-turn-metadata": '{"request_kind": "turn"}', "x-openai-subagent": "collab_spawn"}, "subagent"),
        ({"x-codex-parent-thread-id": "t"}, "subagent"),
    ],
)
def test_codex_calls_are_told_apart_by_their_headers(headers: Mapping[str, str], kind: str | None) -> None:
    assert CodexHarness().classify(ChatRequest("responses", "m", (Message("user", "u"),)), headers) == kind


def shell(*commands: str) -> str:
    return "".join(tool_call("exec_command", cmd=command) for command in commands)


def spawn(prompt: str, turn: int) -> str:
    """Delegate to a sub-agent, wait for it, answer; the sub-agent runs one command."""
    if "user\nCount for me." in prompt:
        return ("One.\n" + shell("echo 1"), "Counted.")[min(turn, 1)]
    if turn == 0:
        return "I delegate.\n" + tool_call("multi_agent_v1__spawn_agent", message="Count for me.")
    if turn == 1:
        (agent,) = re.findall(r'\{"agent_id":"([0-9a-f-]+)"', prompt)
        return "Waiting.\n" + tool_call("multi_agent_v1__wait_agent", targets=[agent], timeout_ms=20_000)
    return ("Writing.\n" + shell("printf hi > a.txt"), "Done.")[min(turn - 2, 1)]


def compact(prompt: str, turn: int) -> str:
    """Print until it compacts, then answer."""
    if "CONTEXT CHECKPOINT COMPACTION" in prompt[-3000:]:
        return "SUMMARY: printed much."
    if "SUMMARY: printed much." not in prompt:
        return f"Printing {turn}.\n" + shell("printf hi > a.txt; seq 1 2000")
    return "After.\n" + shell("echo on") if "After." not in prompt else "Done."


@pytest.fixture(scope="module")
def trees() -> dict[str, PrefixTree]:
    """Runs of the installed product: long, with parallel and broken calls; with a sub-agent; with a compaction."""
    harness = CodexHarness()
    cache = installed(harness)
    broken = '<tool_call>{"name": "exec_command", "arguments": {"cmd": "ls}</tool_call>'
    steps = [f"Step {i}.\n" + shell(f"echo {i}", f"printf hi > a.txt; seq {i}") for i in range(18)]
    scripts: dict[str, Script] = {"long": [*steps, broken, "Done."], "spawn": spawn, "compact": compact}
    made = {}
    for name, script in scripts.items():
        window = 65_536 if name == "compact" else 200_000
        done, tree, written, _ = asyncio.run(play(harness, script, cache, context_length=window))
        assert (done.exit_code, done.response, written) == (0, "Done.", b"hi"), done
        made[name] = tree
    return made


@pytest.mark.harness
def test_twenty_turns_of_codex_are_one_trajectory_without_a_fork(trees: dict[str, PrefixTree]) -> None:
    tree = trees["long"]
    assert [call.lineage_parent for call in tree.calls] == [None, *range(19)]
    assert [call.drift_reason for call in tree.calls] == [None] * 20
    assert tree.buckets()["trained"] == tree.num_completion_tokens


@pytest.mark.harness
def test_a_sub_agent_of_codex_is_a_tree_of_its_own(trees: dict[str, PrefixTree]) -> None:
    tree = trees["spawn"]
    kinds = [call.kind for call in tree.calls]
    assert (kinds.count("main"), kinds.count("subagent")) == (4, 2)
    parents = [None if p is None else kinds[p] for p in (call.lineage_parent for call in tree.calls)]
    assert all(parent in (None, kind) for parent, kind in zip(parents, kinds, strict=True))
    assert all(call.drift_reason is None for call in tree.calls)
    trained = sum(len(call.token_ids) for call in tree.calls if call.kind == "main")
    assert tree.buckets()["trained"] == trained


@pytest.mark.harness
def test_a_compaction_of_codex_ends_one_segment_and_begins_another(trees: dict[str, PrefixTree]) -> None:
    tree = trees["compact"]
    at = [call.kind for call in tree.calls].index("compaction")
    assert [call.kind for call in tree.calls if call.index != at] == ["main"] * (len(tree.calls) - 1)
    assert (tree[at].lineage_parent, tree[at].drift_reason) == (at - 1, "tools_changed")
    assert tree[at + 1].lineage_parent is None
    assert tree[at + 2].lineage_parent == at + 1
    assert all(call.state == "live" for call in tree.calls)


@pytest.mark.harness
def test_no_session_id_gets_into_the_first_prompt_of_codex(trees: dict[str, PrefixTree]) -> None:
    long, spawned = (trees[name].prompt(0).tolist() for name in ("long", "spawn"))
    assert long == spawned
