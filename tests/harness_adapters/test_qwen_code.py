"""Qwen Code: what the adapter tells it, and the real product in the sandbox against the real proxy."""

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
from harness_adapters import qwen_code
from harness_adapters.qwen_code import QwenCodeHarness

WRITE = tool_call("write_file", file_path=f"{WORKDIR}/a.txt", content="hi")
READ = tool_call("read_file", file_path=f"{WORKDIR}/a.txt")
SERVER = McpServer(name="docs", command=("python3", "mcp_echo.py", "--all"), env={"READER": "us"})


def shell(command: str) -> str:
    return tool_call("run_shell_command", command=command, description="Look.")


def test_it_is_pointed_at_the_proxy_and_gets_the_instruction_on_stdin() -> None:
    events = [{"type": "system"}, {"type": "result", "is_error": False, "result": "Done."}]
    sandbox = FakeSandbox([ExecResult(0, json.dumps(events).encode(), b"")])
    done = asyncio.run(QwenCodeHarness(bare=True).run(sandbox, CONTEXT))
    (run,) = sandbox.execs
    assert run.argv == (
        *("/opt/clawgym/node-24.19.0/bin/node", "/opt/clawgym/qwen-code-0.24.4/program", "--yolo"),
        *("--auth-type", "openai", "--output-format", "json"),
        *("--session-id", "c1a76000-0000-4000-8000-000000000001", "--bare"),
    )
    assert run.env == {
        "OPENAI_API_KEY": "sk-dummy",
        "OPENAI_BASE_URL": "http://127.0.0.1:8080/r/k3y/v1",
        "OPENAI_MODEL": "policy",
        "QWEN_CODE_MAX_OUTPUT_TOKENS": "2048",
        "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
        "QWEN_CODE_SYSTEM_SETTINGS_PATH": "/root/.qwen/settings.json",
        "QWEN_SANDBOX": "false",
        "NO_PROXY": "127.0.0.1",
    }
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    assert done.response == "Done."


def test_a_task_that_begins_with_a_slash_is_no_command() -> None:
    sandbox = FakeSandbox()
    asyncio.run(QwenCodeHarness().run(sandbox, replace(CONTEXT, instruction="/stats is a word. Write it.")))
    assert sandbox.execs[0].stdin == b"\n/stats is a word. Write it."


def test_nothing_is_reported_or_remembered_and_the_window_is_the_true_one() -> None:
    sandbox = FakeSandbox()
    asyncio.run(QwenCodeHarness().run(sandbox, CONTEXT))
    generation = {"contextWindowSize": 32_768, "timeout": 300_000, "streamIdleTimeoutMs": 0, "maxRetries": 3}
    assert json.loads(sandbox.files["/root/.qwen/settings.json"]) == {
        "$version": 4,
        "security": {"auth": {"selectedType": "openai", "baseUrl": "http://127.0.0.1:8080/r/k3y/v1"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False},
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
        "model": {"name": "policy", "generationConfig": generation},
        "mcpServers": {},
    }


@pytest.mark.parametrize("window", [8_192, 33_000, 36_864, 40_960, 61_000, 65_536, 131_072])
def test_it_compacts_inside_any_window_but_not_before_every_turn(window: int) -> None:
    told = qwen_code.told_window(window)
    compacts_at = min(0.85 * told, told - 33_000) if told > 33_000 else 0.85 * told
    assert told <= window
    assert compacts_at >= min(0.4 * window, 28_000)


def test_the_servers_of_a_task_are_offered_at_once() -> None:
    assert qwen_code.settings(replace(CONTEXT, mcp_servers=(SERVER,)))["mcpServers"] == {
        "docs": {
            "command": "python3",
            "args": ["mcp_echo.py", "--all"],
            "env": {"READER": "us"},
            "alwaysLoadTools": True,
        }
    }


@pytest.mark.parametrize(
    "stdout", [b"", b"{}", b"[]", b'[{"type": "result", "is_error": true, "result": "503"}]', b'[{"type": "user"}]']
)
def test_only_an_answer_is_an_answer(stdout: bytes) -> None:
    assert qwen_code.final_answer(stdout) == ""


def test_a_summary_is_known_by_the_end_of_the_last_message() -> None:
    def kind(*messages: Message) -> str | None:
        request = ChatRequest("chat", "policy", messages, (ToolSpec("read_file", "", {}),))
        return QwenCodeHarness().classify(request, {})

    asked = Message("user", f"Summarize. {qwen_code.COMPACTION_WORDS}")
    assert kind(Message("system", "s"), asked) == "compaction"
    assert kind(Message("system", "s"), asked, Message("assistant", "a"), Message("user", "b")) is None
    assert kind(Message("user", f"What does '{qwen_code.COMPACTION_WORDS}' mean?")) is None


@pytest.mark.harness
def test_twenty_turns_with_parallel_calls_are_one_trajectory_of_what_was_sampled() -> None:
    turns = [f"On it.\n{WRITE}", f"{READ}\n{shell('ls')}\n{shell('cat a.txt')}", tool_call("nosuch", x=1)]
    replies = [*turns, *(f"Step {n}.\n{shell(f'echo {n}')}" for n in range(16)), "Done: a.txt says hi."]
    run = real_run("qwen-code", replies)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done: a.txt says hi.", b"hi"), run.exit
    assert len(run.tree) == 20, run.tree.outline()
    assert_one_trajectory(run, replies)


@pytest.mark.harness
def test_two_rollouts_of_a_task_share_their_prompts() -> None:
    one, other = (real_run("qwen-code?bare", [READ, "Done."], files={"a.txt": b"hi"}) for _ in range(2))
    assert [one.prompt(call) for call in one.calls()] == [other.prompt(call) for call in other.calls()]


@pytest.mark.harness
def test_a_sub_agent_is_no_part_of_the_main_trajectory() -> None:
    spawn = tool_call("agent", description="look", prompt="SUBTASK: say hi.", subagent_type="general-purpose")
    main, child = [spawn, WRITE, "Wait.", "Done."], [shell("echo hi"), "hi"]

    def replies(prompt: str, turn: int) -> str:
        turns = main if "MAIN TASK" in prompt else child
        return turns[min(turn, len(turns) - 1)]

    run = real_run("qwen-code", replies, instruction="MAIN TASK: write hi into a.txt.")
    assert run.said("subagent") == child, run.tree.outline()
    assert_one_trajectory(run, main)


@pytest.mark.harness
def test_compaction_begins_a_second_segment() -> None:
    def replies(prompt: str, turn: int) -> str:
        if prompt.rsplit("<|im_start|>user", 1)[1].split("<|im_end|>")[0].endswith(qwen_code.COMPACTION_WORDS):
            return "<analysis>.</analysis><state_snapshot><goal>SUMMARY: write hi.</goal></state_snapshot>"
        if "SUMMARY: write hi." in prompt:
            return "Done." if "Successfully" in prompt else WRITE
        return shell(f"yes {turn} | head -c 5000")

    run = real_run("qwen-code", replies, context_length=125_000)  # 70k of them for the first prompt
    (compaction,) = run.calls("compaction")
    before, after = (
        [call for call in run.calls() if (call.index > compaction.index) is late] for late in (False, True)
    )
    assert (run.exit.response, run.written, len(before), len(after)) == ("Done.", b"hi", 5, 2), run.tree.outline()
    assert after[0].lineage_parent != before[-1].index
    assert after[1].lineage_parent == after[0].index
    assert run.tree.buckets()["trained"] == sum(len(call.token_ids) for call in run.calls())


@pytest.mark.harness
def test_it_uses_the_servers_of_a_task() -> None:
    server = (Path(__file__).parent / "mcp_echo.py").read_bytes()
    replies = [tool_call("mcp__docs__search", query="needle"), "Done."]
    run = real_run("qwen-code", replies, files={"mcp_echo.py": server}, mcp_servers=(SERVER,))
    assert f"needle in {WORKDIR} for us" in run.prompt(run.calls()[1]), run.exit
    assert_one_trajectory(run, replies)
