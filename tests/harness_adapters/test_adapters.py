"""What each adapter does to a sandbox: command, environment, files, and how it reads what comes back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fake_sandbox import CONTEXT, FakeSandbox

from clawgym_env.errors import HarnessError, HarnessNotInstalled, HarnessUnsuitable
from clawgym_env.harness import HarnessAdapter, HarnessExit
from clawgym_env.messages import ChatRequest, Dialect, Message, ToolSpec
from clawgym_env.registry import HARNESSES, NEEDS_OPTIONS, adapter
from clawgym_env.sandbox.base import WORKDIR, ExecResult
from clawgym_env.tasks.task import McpServer
from harness_adapters import openclaw, pi
from harness_adapters.claude_code import ClaudeCodeHarness
from harness_adapters.codex import CodexHarness
from harness_adapters.mini.adapter import MiniHarness
from harness_adapters.noop import NoopHarness
from harness_adapters.openclaw import OpenClawHarness
from harness_adapters.oracle import OracleHarness
from harness_adapters.pi import PiHarness

NODE = "/opt/clawgym/node-24.19.0/bin/node"
INSTALLED = (PiHarness, ClaudeCodeHarness, CodexHarness, OpenClawHarness)
TOOL = ToolSpec("read", "", {})


def play(harness: HarnessAdapter, *results: ExecResult) -> tuple[HarnessExit, FakeSandbox]:
    sandbox = FakeSandbox(list(results))
    return asyncio.run(harness.run(sandbox, CONTEXT)), sandbox


def request(*messages: Message, tools: tuple[ToolSpec, ...] = (TOOL,)) -> ChatRequest:
    return ChatRequest("chat", "policy", messages, tools)


def test_every_registered_adapter_goes_by_its_name() -> None:
    for name in sorted(set(HARNESSES) - NEEDS_OPTIONS):
        assert adapter(name).name == name


@pytest.mark.parametrize("made", INSTALLED)
def test_mounts_name_the_install_command_while_the_product_is_missing(
    made: type[HarnessAdapter], tmp_path: Path
) -> None:
    with pytest.raises(HarnessNotInstalled, match=f"clawgym install {made.name}"):
        made().mounts(tmp_path)


@pytest.mark.parametrize("made", INSTALLED)
def test_products_are_shown_at_the_same_place_wherever_the_cache_is(made: type[HarnessAdapter], tmp_path: Path) -> None:
    (tmp_path / "node-24.19.0").mkdir()
    (tmp_path / f"harnesses/{made.name}-{made.version}").mkdir(parents=True)
    assert [mount.target for mount in made().mounts(tmp_path)] == [
        "/opt/clawgym/node-24.19.0",
        f"/opt/clawgym/{made.name}-{made.version}",
    ]


@pytest.mark.parametrize("dialect", ["chat", "messages"])
def test_mini_is_run_isolated_on_its_config(dialect: str, tmp_path: Path) -> None:
    harness = adapter(f"mini?dialect={dialect}")
    done, sandbox = play(harness, ExecResult(0, b" Done.\n", b""))
    (mount,) = harness.mounts(tmp_path)
    assert mount.source.read_bytes().startswith(b'"""Mini')
    assert sandbox.execs[0].argv == ("python3", "-I", "-S", mount.target, "/root/.mini/config.json")
    assert json.loads(sandbox.files["/root/.mini/config.json"]) == {
        "dialect": dialect,
        "base_url": CONTEXT.base_url,
        "api_key": "sk-dummy",
        "model": "policy",
        "max_tokens": 2048,
        "instruction": CONTEXT.instruction,
        "session": "/root/.mini/session.json",
        "resume": "",
    }
    assert done.response == "Done."


def test_mini_refuses_a_dialect_it_does_not_speak() -> None:
    with pytest.raises(HarnessError, match="got 'gemini'"):
        MiniHarness(dialect="gemini")


def test_pi_is_pointed_at_the_proxy_and_gets_the_instruction_on_stdin() -> None:
    done, sandbox = play(PiHarness(), ExecResult(0, b"Done.\n", b""))
    (run,) = sandbox.execs
    assert run.argv == (
        *(NODE, "/opt/clawgym/pi-1.6.0/program", "--print", "--provider", "clawgym", "--model", "policy"),
        *("--session-id", "c1a76000-0000-4000-8000-000000000001"),
    )
    assert run.env == {"PI_OFFLINE": "1", "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    (provider,) = json.loads(sandbox.files["/root/.pi/agent/models.json"])["providers"].values()
    assert provider["baseUrl"] == "http://127.0.0.1:8080/r/k3y/v1"
    assert provider["api"] == "openai-completions"
    (model,) = provider["models"]
    assert (model["contextWindow"] - pi.UNUSED_TAIL, model["maxTokens"]) == (32_768, 2048)
    assert done.response == "Done."


@pytest.mark.parametrize(("window", "reply"), [(4096, 512), (32_768, 2048), (200_000, 4096)])
def test_pi_compacts_inside_any_window_but_not_before_every_turn(window: int, reply: int) -> None:
    made = pi.settings(replace(CONTEXT, context_length=window, max_tokens=reply))["compaction"]
    assert isinstance(made, dict)
    reserve, keep = made["reserveTokens"], made["keepRecentTokens"]
    assert isinstance(reserve, int)
    assert isinstance(keep, int)
    assert reply <= reserve - pi.UNUSED_TAIL <= window // 4, "of the true window"
    assert keep + reserve < window + pi.UNUSED_TAIL


def test_openclaw_runs_one_isolated_turn_on_the_responses_dialect() -> None:
    done, sandbox = play(OpenClawHarness(), ExecResult(0, b'{"ok": true, "final": "Done."}\n', b"noise"))
    (run,) = sandbox.execs
    assert run.argv == (
        *(NODE, "/opt/clawgym/openclaw-2026.9.6/program", "agent", "exec", "--message-file", "-"),
        *("--config", "/root/.openclaw/openclaw.json", "--cwd", WORKDIR, "--model", "clawgym/policy", "--json"),
        *("--timeout", "360"),
    )
    assert run.env["DO_NOT_TRACK"] == "1"
    assert run.stdin.decode() == CONTEXT.instruction
    made = json.loads(sandbox.files["/root/.openclaw/openclaw.json"])
    (provider,) = made["models"]["providers"].values()
    assert (provider["baseUrl"], provider["api"]) == ("http://127.0.0.1:8080/r/k3y/v1", "openai-responses")
    assert provider["models"][0]["contextWindow"] == 32_768
    assert provider["timeoutSeconds"] > CONTEXT.wall_clock_s
    assert made["update"] == {"checkOnStart": False}
    assert done.response == "Done."
    assert OpenClawHarness.memory_mb >= 3072


@pytest.mark.parametrize(
    ("spec", "api", "base"),
    [
        ("openclaw", "openai-responses", "/v1"),
        ("openclaw?api=chat", "openai-completions", "/v1"),
        ("openclaw?api=messages", "anthropic-messages", ""),
    ],
)
def test_openclaw_speaks_three_dialects(spec: str, api: str, base: str) -> None:
    harness = adapter(spec)
    _, sandbox = play(harness)
    (provider,) = json.loads(sandbox.files["/root/.openclaw/openclaw.json"])["models"]["providers"].values()
    assert (provider["api"], provider["baseUrl"]) == (api, f"{CONTEXT.base_url}{base}")
    assert harness.dialect == spec.partition("=")[2] or harness.dialect == "responses"


def test_openclaw_refuses_a_dialect_it_does_not_speak() -> None:
    with pytest.raises(HarnessError, match="one of responses, chat, messages, got 'gemini'"):
        adapter("openclaw?api=gemini")


def test_openclaw_is_given_the_tasks_tool_servers() -> None:
    server = McpServer(name="docs", command=("python3", "-m", "docs"), env={"A": "b"})
    made = openclaw.config(replace(CONTEXT, mcp_servers=(server,)), "responses")
    assert made["mcp"] == {
        "servers": {"docs": {"command": "python3", "args": ["-m", "docs"], "env": {"A": "b"}, "cwd": WORKDIR}}
    }


@pytest.mark.parametrize("stdout", [b"", b"oops", b"[]", b'{"ok": false, "final": null}'])
def test_openclaw_without_a_good_envelope_has_no_answer(stdout: bytes) -> None:
    assert openclaw.final_answer(stdout) == ""


CTX = Message("user", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nnone\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>")


@pytest.mark.parametrize("api", ["chat", "messages"])
def test_openclaw_declares_its_closing_message_transient(api: Dialect) -> None:
    harness = OpenClawHarness(api=api)
    system, task = Message("system", "s"), Message("user", "t")
    assert harness.transient_suffix([system, task, CTX]) == 1
    assert harness.transient_suffix([system, task]) == 0
    assert harness.transient_suffix([system, CTX, Message("assistant", "a")]) == 0
    assert harness.transient_suffix([]) == 0
    assert harness.transient_suffix([system, Message("tool", CTX.content)]) == 0


def test_openclaw_keeps_that_message_on_the_responses_dialect() -> None:
    assert OpenClawHarness().transient_suffix([Message("system", "s"), Message("user", "t"), CTX]) == 0


@pytest.mark.parametrize(
    ("first", "last", "kind"),
    [
        ("[Sun 2026-11-29 20:27 UTC] [Subagent Context] You are one.", "go on", "subagent"),
        ("[Subagent Context] You are one.", "go on", "subagent"),
        ("Explain [Subagent Context].", "go on", None),
        ("do it", "[Sun 2026-11-29 20:27 UTC] Pre-compaction memory flush. Store what lasts.", "auxiliary"),
        ("do it", "What is a Pre-compaction memory flush?", None),
    ],
)
def test_openclaw_calls_are_told_apart(first: str, last: str, kind: str | None) -> None:
    said = (Message("user", first), Message("assistant", "a"), Message("user", last))
    assert OpenClawHarness().classify(request(Message("system", "s"), *said), {}) == kind
    assert OpenClawHarness(api="chat").classify(request(Message("system", "s"), *said, CTX), {}) == kind


def test_openclaw_requests_of_two_runs_become_equal() -> None:
    def sent(minute: str, session: str) -> ChatRequest:
        runtime = f"Runtime: agent=main | session=agent:main:explicit:{session} | sessionId={session} | host=sandbox"
        task = Message("user", f"[Sun 2026-11-29 {minute} UTC] Call {session} at {minute}.\n\n{runtime}")
        return request(Message("system", "s"), task, Message("tool", f"[Sun 2026-11-29 {minute} UTC] x"))

    harness = OpenClawHarness()
    one = sent("23:06", "79af95cc-97db-4b78-a2f7-2b1c5bffee67")
    rewritten = harness.rewrite(one).messages
    assert rewritten[1].content == (
        "[Sun 2026-11-29 00:00 UTC] Call 79af95cc-97db-4b78-a2f7-2b1c5bffee67 at 23:06.\n\n"
        "Runtime: agent=main | session=agent:main:explicit:00000000-0000-4000-8000-000000000000 | "
        "sessionId=00000000-0000-4000-8000-000000000000 | host=sandbox"
    )
    assert rewritten[2] == one.messages[2]
    assert harness.rewrite(harness.rewrite(one)) == harness.rewrite(one)


SUMMARIZER = Message("system", "You are a context summarization assistant. Read on.")


@pytest.mark.parametrize("harness", [PiHarness(), OpenClawHarness()])
def test_a_summarizer_call_is_compaction(harness: HarnessAdapter) -> None:
    assert harness.classify(request(SUMMARIZER, Message("user", "u"), tools=()), {}) == "compaction"
    assert harness.classify(request(SUMMARIZER, Message("user", "u")), {}) is None
    assert harness.classify(request(Message("system", "s"), Message("user", "u")), {}) is None


@dataclass(frozen=True)
class Step:
    tool: str
    arguments: Mapping[str, str]


def test_the_oracle_plays_the_steps_of_the_instruction() -> None:
    steps = [
        Step("read", {"path": "in"}),
        Step("write", {"path": "a/b", "content": "ü"}),
        Step("bash", {"command": "ls"}),
    ]
    done, sandbox = play(OracleHarness(steps={CONTEXT.instruction: steps}.__getitem__), ExecResult(0, b"b\n", b""))
    assert sandbox.files == {f"{WORKDIR}/a/b": "ü".encode()}
    assert [(run.argv, run.cwd) for run in sandbox.execs] == [(("bash", "-c", "ls"), WORKDIR)]
    assert (done.exit_code, done.stdout) == (0, b"b\n")


def test_an_oracle_command_that_fails_ends_the_run() -> None:
    steps = [Step("bash", {"command": "false"}), Step("write", {"path": "a", "content": ""})]
    done, sandbox = play(OracleHarness(steps=lambda _: steps), ExecResult(3, b"", b"no\n"))
    assert (done.exit_code, done.stdout, sandbox.files) == (3, b"no\n", {})


def test_an_oracle_without_steps_takes_those_of_each_task() -> None:
    steps = [Step("answer", {"text": "42"})]
    assert play(OracleHarness().knowing(steps))[0].response == "42"
    own = OracleHarness(steps=lambda _: steps)
    assert own.knowing(None) is own
    with pytest.raises(HarnessUnsuitable, match="known solutions"):
        OracleHarness().knowing(None)


def test_an_oracle_that_knows_no_steps_says_what_it_expects() -> None:
    with pytest.raises(HarnessError, match="Expected an oracle for"):
        play(OracleHarness())
    with pytest.raises(HarnessError, match="Expected an oracle for"):
        play(OracleHarness(steps={}.__getitem__))
    with pytest.raises(HarnessError, match="got 'fly'"):
        play(OracleHarness(steps=lambda _: [Step("fly", {})]))


def test_noop_does_nothing() -> None:
    done, sandbox = play(NoopHarness())
    assert done == HarnessExit(0, b"", b"", "")
    assert (sandbox.execs, sandbox.files) == ([], {})
