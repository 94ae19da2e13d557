"""The Claude Code adapter: command, switches and kinds of both versions; then the product on the real proxy."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fake_sandbox import CONTEXT, FakeSandbox
from real_run import RealRun, assert_one_trajectory, real_run

from clawgym_env.engine.scripted import tool_call
from clawgym_env.errors import HarnessError, HarnessNotInstalled
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Message, ToolSpec
from clawgym_env.registry import adapter
from clawgym_env.sandbox.base import WORKDIR, ExecResult
from clawgym_env.tasks.task import McpServer
from harness_adapters import claude_code
from harness_adapters.claude_code import ClaudeCodeHarness

OLD = "claude-code?version=2.0.76"
TOOL = ToolSpec("read", "", {})


def play(spec: str, context: HarnessContext = CONTEXT, stdout: bytes = b"") -> tuple[HarnessExit, FakeSandbox]:
    sandbox = FakeSandbox([ExecResult(0, stdout, b"")])
    return asyncio.run(adapter(spec).run(sandbox, context)), sandbox


def test_claude_code_gets_its_switches_and_the_instruction_on_stdin() -> None:
    done, sandbox = play("claude-code", stdout=b'{"is_error": false, "result": "Done."}\n')
    (run,) = sandbox.execs
    assert run.argv[:-2] == (
        "/opt/clawgym/claude-code-2.1.332/program",
        *("--print", "--model", "policy", "--output-format", "json"),
        *("--session-id", "c1a76000-0000-4000-8000-000000000001", "--dangerously-skip-permissions"),
        "--strict-mcp-config",
    )
    assert run.argv[-2] == "--settings"
    assert json.loads(run.argv[-1]) == {"env": run.env}
    assert run.env == {
        "ANTHROPIC_API_KEY": "sk-dummy",
        "ANTHROPIC_BASE_URL": "http://127.0.0.1:8080/r/k3y",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "41672",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2048",
        "CLAUDE_CODE_MAX_RETRIES": "4",
        "DISABLE_AUTOUPDATER": "1",
        "IS_SANDBOX": "1",
        "NO_PROXY": "127.0.0.1",
    }
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    assert done.response == "Done."


@pytest.mark.parametrize(
    ("spec", "flags"),
    [
        ("claude-code?bare", ("--bare",)),
        ("claude-code?tools=Bash", ("--tools", "Bash")),
        ("claude-code?tools=Bash,Edit&bare", ("--bare", "--tools", "Bash,Edit")),
    ],
)
def test_claude_code_can_be_made_smaller(spec: str, flags: tuple[str, ...]) -> None:
    _, sandbox = play(spec)
    assert sandbox.execs[0].argv[-len(flags) - 2 : -2] == flags


def test_a_task_that_begins_with_a_slash_is_no_command_of_claude_code() -> None:
    _, sandbox = play("claude-code", replace(CONTEXT, instruction="/new is a word. Write it."))
    assert sandbox.execs[0].stdin == b"\n/new is a word. Write it."


def test_claude_code_can_be_told_to_wait_for_its_sub_agents() -> None:
    _, sandbox = play("claude-code?background=false")
    assert sandbox.execs[0].env["CLAUDE_CODE_DISABLE_BACKGROUND_TASKS"] == "1"


def test_the_old_claude_code_is_a_script_for_node_that_calls_no_other_model(tmp_path: Path) -> None:
    _, sandbox = play(OLD)
    (run,) = sandbox.execs
    assert run.argv[1:3] == ("/opt/clawgym/claude-code-2.0.76/program", "--print")
    assert run.env["CLAUDE_CODE_SUBAGENT_MODEL"] == run.env["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == "policy"
    assert run.env["DISABLE_PROMPT_CACHING"] == "1"
    assert adapter(OLD).version == "2.0.76"
    with pytest.raises(HarnessNotInstalled, match=r"clawgym install 'claude-code\?version=2\.0\.76'"):
        adapter(OLD).mounts(tmp_path)


@pytest.mark.parametrize(("window", "reply"), [(16_384, 1024), (32_768, 2048), (200_000, 8192), (400_000, 8192)])
def test_the_old_claude_code_compacts_at_three_quarters_of_the_true_window(window: int, reply: int) -> None:
    made = claude_code.old_switches(replace(CONTEXT, context_length=window, max_tokens=reply))
    at = float(made["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"]) / 100 * (200_000 - reply)
    assert at + reply == pytest.approx(min(window * 3 / 4, 200_000), abs=20)


@pytest.mark.parametrize("reply", [32_000, 200_000, 300_000])
def test_the_old_claude_code_is_told_some_share_whatever_the_reply(reply: int) -> None:
    made = claude_code.old_switches(replace(CONTEXT, context_length=32_768, max_tokens=reply))
    assert 0 < float(made["CLAUDE_AUTOCOMPACT_PCT_OVERRIDE"]) <= 100


@pytest.mark.parametrize(
    ("options", "words"), [({"version": "1.0"}, "2.1.332, 2.0.76"), ({"version": "2.0.76", "bare": True}, "bare")]
)
def test_what_claude_code_has_not_is_refused(options: Mapping[str, object], words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        ClaudeCodeHarness(**options)  # type: ignore[arg-type]


def test_claude_code_is_given_the_tasks_tool_servers_and_no_others() -> None:
    server = McpServer(name="docs", command=("python3", "-m", "docs"), env={"A": "b"})
    _, sandbox = play("claude-code?bare", replace(CONTEXT, mcp_servers=(server,)))
    argv = sandbox.execs[0].argv
    assert "--strict-mcp-config" in argv
    file = argv[argv.index("--mcp-config") + 1]
    assert json.loads(sandbox.files[file]) == {
        "mcpServers": {"docs": {"command": "python3", "args": ["-m", "docs"], "env": {"A": "b"}, "alwaysLoad": True}}
    }


@pytest.mark.parametrize("stdout", [b"", b"not json", b"[]", b'{"is_error": true, "result": "API Error"}', b"{}"])
def test_claude_code_without_a_good_result_has_no_answer(stdout: bytes) -> None:
    assert claude_code.final_answer(stdout) == ""


@pytest.mark.parametrize(
    ("last", "headers", "kind"),
    [
        ("do it", {}, None),
        ("do it", {"X-Claude-Code-Agent-Id": "a1"}, "subagent"),
        (f"do it\n\n{claude_code.COMPACTION_WORDS} Write <analysis>.", {}, "compaction"),
    ],
)
def test_claude_code_calls_are_told_apart(last: str, headers: Mapping[str, str], kind: str | None) -> None:
    request = ChatRequest("messages", "policy", (Message("system", "s"), Message("user", last)), (TOOL,))
    assert ClaudeCodeHarness().classify(request, headers) == kind


@pytest.mark.parametrize(
    ("system", "tools", "kind"),
    [
        ("You are an interactive CLI tool that helps.", (TOOL,), None),
        ("You are a helpful AI assistant tasked with summarizing conversations.", (TOOL,), "compaction"),
        ("You are an agent for Claude Code.", (TOOL,), "subagent"),
        ("Your task is to process Bash commands.", (), "auxiliary"),
    ],
)
def test_calls_of_the_old_claude_code_are_told_apart(
    system: str, tools: tuple[ToolSpec, ...], kind: str | None
) -> None:
    request = ChatRequest("messages", "policy", (Message("system", system), Message("user", "do it")), tools)
    assert adapter(OLD).classify(request, {}) == kind
    assert ClaudeCodeHarness().classify(request, {}) is None


def bash(command: str, text: str = "") -> str:
    return f"{text}\n{tool_call('Bash', command=command, description='x')}"


def assert_only_the_main_agent_is_trained(run: RealRun) -> None:
    """Check that its tokens, and no other agent's, are trained, and that each prompt goes on from the one before."""
    buckets = run.tree.buckets()
    assert buckets["trained"] == sum(len(call.token_ids) for call in run.calls()), run.tree.outline()
    assert sum(buckets.values()) == run.tree.num_completion_tokens
    for call in run.calls():
        assert call.state == "live", run.tree.outline()
        if call.lineage_parent is not None:
            assert (call.prefix_parent, call.drift_reason) == (call.lineage_parent, None), run.tree.outline()


@pytest.mark.harness
def test_twenty_turns_of_claude_code_with_parallel_calls_are_one_trajectory() -> None:
    steps = [bash(f"echo {i}", f"Step {i}.") + bash(f"seq {i}") for i in range(18)]
    replies = [bash("printf hi > a.txt", "Writing."), *steps, "Done."]
    run = real_run("claude-code", replies)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done.", b"hi"), run.exit
    assert_one_trajectory(run, replies)


@pytest.mark.harness
def test_side_calls_of_the_old_claude_code_are_auxiliary() -> None:
    steps = (bash("printf hi > a.txt", "Writing."), bash("cat a.txt", "Checking."), "Done: a.txt says hi.")

    def script(prompt: str, turn: int) -> str:
        if "You are an interactive CLI tool" in prompt:
            return steps[turn]
        return "cat" if "Bash command prefix" in prompt else "<is_displaying_contents>false</is_displaying_contents>"

    run = real_run(OLD, script)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done: a.txt says hi.", b"hi"), run.exit
    assert run.said() == list(steps)
    assert len(run.calls("auxiliary")) >= 2
    assert len(run.tree) == len(run.calls()) + len(run.calls("auxiliary")), run.tree.outline()
    assert_only_the_main_agent_is_trained(run)


@pytest.mark.harness
@pytest.mark.parametrize("background", [True, False])
def test_a_sub_agent_of_claude_code_is_a_tree_of_its_own(background: bool) -> None:
    delegate = tool_call("Agent", description="count", prompt="Count for me.", subagent_type="general-purpose")
    steps = (f"I delegate.\n{delegate}", bash("printf hi > a.txt", "Writing."), "Done.")

    def script(prompt: str, turn: int) -> str:
        if "Count for me." in prompt and "I delegate." not in prompt:
            return (bash("echo 1", "One."), "Counted one.")[min(turn, 1)]
        return steps[min(turn, 2)]  # of one in the background it is told once more

    run = real_run(ClaudeCodeHarness(tools=("Bash", "Agent"), background=background), script)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done.", b"hi"), run.exit
    assert run.said()[:3] == list(steps)
    assert set(run.said()[3:]) <= {"Done."}
    assert run.said("subagent") == [bash("echo 1", "One."), "Counted one."]
    assert "Counted one." in run.prompt(run.calls()[-1 if background else 1])
    assert_only_the_main_agent_is_trained(run)


@pytest.mark.harness
@pytest.mark.parametrize(
    ("spec", "window"), [("claude-code?bare", 24_576), ("claude-code?version=2.0.76&tools=Bash", 45_000)]
)
def test_a_compaction_of_claude_code_ends_one_segment_and_begins_another(spec: str, window: int) -> None:
    def script(prompt: str, turn: int) -> str:
        if "Do NOT call any tools" in prompt or "tasked with summarizing" in prompt:
            return "<analysis>a</analysis>\n<summary>PRINTED MUCH.</summary>"
        if "Bash command prefix" in prompt:
            return "head"
        if "Extract any file paths" in prompt:
            return "<is_displaying_contents>false</is_displaying_contents>"
        if "PRINTED MUCH." in prompt:
            return (bash("printf hi > a.txt", "After."), "Done.")[min(prompt.count("After."), 1)]
        return bash("head -c 3000 /dev/zero | tr '\\0' x", f"Printing {turn}.")

    run = real_run(spec, script, context_length=window)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done.", b"hi"), run.exit
    (compaction,) = run.calls("compaction")
    segments = [list(part) for _, part in itertools.groupby(run.calls(), lambda call: call.index > compaction.index)]
    assert [len(part) for part in segments][1:] == [2], run.tree.outline()
    assert [part[0].lineage_parent for part in segments] == [None, None]
    assert segments[0][-1].prompt_len > window // 2
    assert all(call.prompt_len + 2048 <= window for call in run.tree.calls)
    assert len(run.tree.trajectories()) == 2
    assert_only_the_main_agent_is_trained(run)


@pytest.mark.harness
@pytest.mark.parametrize("spec", ["claude-code", "claude-code?bare", "claude-code?version=2.0.76&tools=Bash"])
def test_claude_code_calls_a_tool_of_the_tasks_server(spec: str) -> None:
    echo = Path(__file__).with_name("mcp_echo.py").read_bytes()
    server = McpServer(name="echo", command=("python3", "echo.py"), env={"READER": "me"})
    replies = [tool_call("mcp__echo__search", query="cats"), "Done."]
    run = real_run(spec, replies, files={"echo.py": echo}, mcp_servers=(server,))
    assert run.exit.response == "Done.", run.exit
    assert f"cats in {WORKDIR} for me" in run.prompt(run.calls()[1])
    assert_only_the_main_agent_is_trained(run)
