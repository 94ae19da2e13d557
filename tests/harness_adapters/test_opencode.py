"""opencode: what the adapter tells it, and the real product in the sandbox against the real proxy."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_sandbox import CONTEXT, FakeSandbox
from real_run import assert_one_trajectory, real_run

from clawgym_env.engine.scripted import tool_call
from clawgym_env.messages import ChatRequest, Message, ToolSpec
from clawgym_env.sandbox.base import WORKDIR, ExecResult
from clawgym_env.tasks.task import McpServer
from harness_adapters import opencode
from harness_adapters.opencode import OpenCodeHarness

TOOL = ToolSpec("read", "", {})
WRITE = tool_call("write", filePath=f"{WORKDIR}/a.txt", content="hi")
READ = tool_call("read", filePath=f"{WORKDIR}/a.txt")
SERVER = McpServer(name="docs", command=("python3", "mcp_echo.py", "--all"), env={"READER": "us"})


def bash(command: str) -> str:
    return tool_call("bash", command=command, description="Look.")


def lines(*events: object) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def text(said: str) -> dict[str, object]:
    return {"type": "text", "part": {"type": "text", "text": said}}


def test_it_gets_the_instruction_on_stdin_and_its_switches() -> None:
    sandbox = FakeSandbox([ExecResult(0, lines({"type": "step_start"}, text("Done.")), b"")])
    done = asyncio.run(OpenCodeHarness().run(sandbox, CONTEXT))
    (run,) = sandbox.execs
    program = "/opt/clawgym/opencode-1.18.33/program"
    assert run.argv == (program, "run", "--model", "clawgym/policy", "--format", "json", "--auto")
    assert json.loads(run.env.pop("OPENCODE_CONFIG_CONTENT"))["model"] == "clawgym/policy"
    assert run.env == {
        "NO_PROXY": "127.0.0.1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    }
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    assert done.response == "Done."


def test_the_proxy_is_its_only_provider_and_it_waits_for_it() -> None:
    sandbox = FakeSandbox()
    asyncio.run(OpenCodeHarness().run(sandbox, CONTEXT))
    made = json.loads(sandbox.execs[0].env["OPENCODE_CONFIG_CONTENT"])
    assert made["enabled_providers"] == ["clawgym"]
    assert (made["model"], made["small_model"]) == ("clawgym/policy", "clawgym/policy")
    assert (made["autoupdate"], made["share"]) == (False, "disabled")
    (provider,) = made["provider"].values()
    assert provider["npm"] == "@ai-sdk/openai-compatible"
    assert provider["options"] == {
        "baseURL": "http://127.0.0.1:8080/r/k3y/v1",
        "apiKey": "sk-dummy",
        "headerTimeout": False,
        "chunkTimeout": False,
    }


@pytest.mark.parametrize(("window", "reply"), [(4096, 512), (8192, 8192), (32_768, 2048), (200_000, 4096)])
def test_it_compacts_inside_any_window_but_not_before_every_turn(window: int, reply: int) -> None:
    made = opencode.config(replace(CONTEXT, context_length=window, max_tokens=reply))
    assert made["compaction"] == {"reserved": 0}
    limit = made["provider"]["clawgym"]["models"]["policy"]["limit"]  # type: ignore[call-overload, index]
    assert (limit["context"], limit["output"]) == (window, reply)
    assert window // 2 <= limit["input"] <= max(window - reply, window // 2)


def test_the_servers_of_a_task_are_its_servers() -> None:
    assert opencode.config(replace(CONTEXT, mcp_servers=(SERVER,)))["mcp"] == {
        "docs": {
            "type": "local",
            "command": ["python3", "mcp_echo.py", "--all"],
            "environment": {"READER": "us"},
            "enabled": True,
        }
    }


@pytest.mark.parametrize(
    ("stdout", "answer"),
    [
        (b"", ""),
        (b"not json\n[]\n", ""),
        (lines({"type": "step_start"}, text("On it."), {"type": "tool_use"}, {"type": "step_start"}), ""),
        (lines({"type": "step_start"}, text("On it."), {"type": "step_start"}, text("Do"), text("ne.")), "Done."),
    ],
)
def test_the_answer_is_what_was_said_in_the_last_step(stdout: bytes, answer: str) -> None:
    assert opencode.final_answer(stdout) == answer


@pytest.mark.parametrize(
    ("system", "tools", "headers", "kind"),
    [
        ("You are opencode.", (TOOL,), {"x-session-id": "s1"}, None),
        ("You are opencode.", (TOOL,), {"X-Parent-Session-Id": "s1"}, "subagent"),
        ("You are a title generator. Begin.", (), {}, "auxiliary"),
        ("You are a title generator. Begin.", (TOOL,), {}, None),
        ("You are a context summarization agent. Begin.", (), {}, "compaction"),
        ("You are a context summarization agent. Begin.", (), {"x-parent-session-id": "s1"}, "subagent"),
    ],
)
def test_calls_are_told_apart(
    system: str, tools: tuple[ToolSpec, ...], headers: dict[str, str], kind: str | None
) -> None:
    request = ChatRequest("chat", "policy", (Message("system", system), Message("user", opencode.TITLE_WORDS)), tools)
    assert OpenCodeHarness().classify(request, headers) == kind


@pytest.mark.harness
def test_twenty_turns_with_parallel_calls_are_one_trajectory_and_the_title_is_a_side_call() -> None:
    turns = [f"On it.\n{WRITE}", f"{READ}\n{bash('ls')}\n{bash('cat a.txt')}"]
    main = [*turns, *(f"Step {n}.\n{bash(f'echo {n}')}" for n in range(17)), "Done: a.txt says hi."]

    def replies(prompt: str, turn: int) -> str:
        return "Hi in a file" if opencode.TITLE_WORDS in prompt else main[min(turn, 19)]

    run = real_run("opencode", replies)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done: a.txt says hi.", b"hi"), run.exit
    assert run.said("auxiliary") == ["Hi in a file"]
    assert len(run.tree) == 21
    assert_one_trajectory(run, main)


@pytest.mark.harness
def test_two_rollouts_of_a_task_share_their_prompts() -> None:
    one, other = (real_run("opencode?title=false", [READ, "Done."], files={"a.txt": b"hi"}) for _ in range(2))
    assert len(one.tree) == 2, "there is no title to ask for"
    assert [one.prompt(call) for call in one.calls()] == [other.prompt(call) for call in other.calls()]


@pytest.mark.harness
def test_sub_agents_and_renamed_calls_leave_one_main_lineage() -> None:
    spawn = tool_call("task", description="look", prompt="SUBTASK: say hi.", subagent_type="general")
    main, child = [spawn, tool_call("nosuch", x=1), WRITE, "Done."], [bash("echo hi"), "hi"]

    def replies(prompt: str, turn: int) -> str:
        turns = main if "MAIN TASK" in prompt else child
        return turns[min(turn, len(turns) - 1)]

    run = real_run("opencode?title=false", replies, instruction="MAIN TASK: write hi into a.txt.")
    assert (run.said(), run.said("subagent")) == (main, child), run.tree.outline()
    drifts = [call.drift_reason for call in run.calls()]
    assert drifts == [None, None, "reply_rewritten", None]
    assert len(run.tree.trajectories()) == 1
    assert run.tree.buckets()["trained"] == sum(len(call.token_ids) for call in run.calls())


@pytest.mark.harness
def test_compaction_begins_a_second_segment() -> None:
    def replies(prompt: str, turn: int) -> str:
        if opencode.COMPACTION_WORDS in prompt:
            return "SUMMARY: write hi."
        if "SUMMARY: write hi." in prompt:
            return "Done." if "Wrote file" in prompt else WRITE
        return bash(f"yes {turn} | head -c 2500")

    run = real_run("opencode?title=false", replies, context_length=48_000)  # 30k of them for the first prompt
    (compaction,) = run.calls("compaction")
    before, after = (
        [call for call in run.calls() if (call.index > compaction.index) is late] for late in (False, True)
    )
    assert (run.exit.response, run.written, len(after)) == ("Done.", b"hi", 2), run.tree.outline()
    assert after[0].lineage_parent != before[-1].index
    assert after[1].lineage_parent == after[0].index
    assert run.tree.buckets()["trained"] == sum(len(call.token_ids) for call in run.calls())


@pytest.mark.harness
def test_it_uses_the_servers_of_a_task() -> None:
    server = (Path(__file__).parent / "mcp_echo.py").read_bytes()
    replies = [tool_call("docs_search", query="needle"), "Done."]
    run = real_run("opencode?title=false", replies, files={"mcp_echo.py": server}, mcp_servers=(SERVER,))
    assert f"needle in {WORKDIR} for us" in run.prompt(run.calls()[1]), run.exit
    assert_one_trajectory(run, replies)
