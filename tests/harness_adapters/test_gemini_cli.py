"""Gemini CLI: what the adapter tells it, and the real product in the sandbox against the real proxy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_sandbox import CONTEXT, FakeSandbox

from clawgym_env.cache import cache_dir
from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.harness import HarnessContext, HarnessExit
from clawgym_env.messages import ChatRequest, Json, Message, ToolSpec
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.registry import adapter
from clawgym_env.rendering import make_renderer
from clawgym_env.sandbox.base import WORKDIR, ExecResult, SandboxSpec
from clawgym_env.sandbox.local import LocalBackend
from clawgym_env.tasks.task import McpServer
from clawgym_env.tokenizer import byte_tokenizer
from clawgym_env.trace.prefix_tree import PrefixTree
from harness_adapters import gemini_cli
from harness_adapters.gemini_cli import GeminiCliHarness

PORT = 8080
WRITE = tool_call("write_file", file_path=f"{WORKDIR}/a.txt", content="hi")
SPAWN = tool_call("invoke_agent", agent_name="generalist", prompt="Write hi into a.txt.")
FINISH = tool_call("complete_task", result={"response": "It is written."})
SHELL = tool_call("run_shell_command", command="cat a.txt")
READ = tool_call("read_file", file_path=f"{WORKDIR}/a.txt")


def configured(harness: GeminiCliHarness, context: HarnessContext = CONTEXT) -> dict[str, Json]:
    """Return the settings file of a run."""
    sandbox = FakeSandbox()
    asyncio.run(harness.run(sandbox, context))
    chosen: dict[str, Json] = json.loads(sandbox.files["/root/.gemini/settings.json"])
    return chosen


def test_it_is_pointed_at_the_proxy_and_gets_the_instruction_on_stdin() -> None:
    sandbox = FakeSandbox([ExecResult(0, b'{"session_id": "s", "response": "Done."}\n', b"")])
    done = asyncio.run(GeminiCliHarness().run(sandbox, CONTEXT))
    (run,) = sandbox.execs
    program = ("/opt/clawgym/node-24.19.0/bin/node", "/opt/clawgym/gemini-cli-0.61.0/program")
    assert run.argv == (*program, "--yolo", "--model", "policy", "--output-format", "json")
    assert run.env == {
        "GEMINI_API_KEY": "sk-dummy",
        "GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:8080/r/k3y",
        "GEMINI_CLI_SYSTEM_SETTINGS_PATH": "/root/.gemini/settings.json",
        "GEMINI_SANDBOX": "false",
        "NO_PROXY": "127.0.0.1",
        "GEMINI_CLI_TRUST_WORKSPACE": "true",
    }
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    assert done.response == "Done."


def test_nothing_is_reported_and_compaction_knows_the_true_window() -> None:
    assert configured(GeminiCliHarness()) == {
        "security": {"auth": {"selectedType": "gemini-api-key"}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False, "maxAttempts": 4},
        "model": {
            "compressionThreshold": pytest.approx(0.7 * 32_768 / 1_048_576),
            "disableLoopDetection": True,
        },
        "mcpServers": {},
    }


def test_the_servers_of_a_task_are_its_servers() -> None:
    server = McpServer(name="docs", command=("python3", "serve.py", "--all"), env={"ROOT": "docs"})
    chosen = configured(GeminiCliHarness(), replace(CONTEXT, mcp_servers=(server,)))
    entry = {"command": "python3", "args": ["serve.py", "--all"], "env": {"ROOT": "docs"}, "trust": True}
    assert chosen["mcpServers"] == {"docs": entry}


@pytest.mark.parametrize(
    ("spec", "tools"), [("gemini-cli?tools=read_file,replace", ["read_file", "replace"]), ("gemini-cli", None)]
)
def test_its_tools_can_be_chosen(spec: str, tools: list[str] | None) -> None:
    harness = adapter(spec)
    assert isinstance(harness, GeminiCliHarness)
    assert configured(harness).get("tools") == (None if tools is None else {"core": tools})


@pytest.mark.parametrize(
    ("stdout", "answer"),
    [
        (b'{"response": "Done."}', "Done."),
        (b'{"response": null}', ""),
        (b'{"error": {"code": 400}}', ""),
        (b"[]", ""),
        (b"killed", ""),
    ],
)
def test_only_an_answer_is_an_answer(stdout: bytes, answer: str) -> None:
    assert gemini_cli.final_answer(stdout) == answer


@pytest.mark.parametrize(
    ("system", "tool", "kind"),
    [
        ("You are Gemini CLI.", "read_file", None),
        ("You are a helper.", "complete_task", "subagent"),
        (
            "\nYou are a specialized system component responsible for distilling chat history into XML.",
            "x",
            "compaction",
        ),
    ],
)
def test_calls_are_told_apart_by_tools_and_system_prompt(system: str, tool: str, kind: str | None) -> None:
    words = Message("user", gemini_cli.COMPACTION_WORDS)  # a task may say anything
    request = ChatRequest("gemini", "policy", (Message("system", system), words), (ToolSpec(tool, "", {}),))
    assert GeminiCliHarness().classify(request, {}) == kind


async def play(harness: GeminiCliHarness, engine: ScriptedEngine) -> tuple[HarnessExit, PrefixTree]:
    proxy = ProxyServer()
    await proxy.start()
    spec = SandboxSpec(memory_mb=harness.memory_mb, mounts=harness.mounts(cache_dir()))
    sandbox = await LocalBackend().open(spec)
    try:
        session = proxy.open_session(engine, adapter=harness)
        listener = await proxy.serve(await sandbox.listen(PORT), session)
        url = f"http://127.0.0.1:{PORT}/r/{session.key}"
        context = replace(CONTEXT, instruction="Write hi into a.txt.", base_url=url)
        async with asyncio.timeout(420):
            done = await harness.run(sandbox, context)
        tree = await session.settle()
        await listener.close()
        return done, tree
    finally:
        await sandbox.close()
        await proxy.close()


def real(engine: ScriptedEngine, *, tools: Sequence[str] | None = None) -> tuple[HarnessExit, PrefixTree]:
    """Run one rollout of the installed product."""
    harness = GeminiCliHarness(tools=tools)
    harness.install(cache_dir())
    return asyncio.run(play(harness, engine))


@pytest.mark.harness
def test_turns_thoughts_and_parallel_calls_are_one_trajectory_of_what_was_sampled() -> None:
    tokenizer = byte_tokenizer(extra_specials=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    engine = ScriptedEngine(
        [f"<think>\nxyzzy\n</think>\n\nOn it.\n{WRITE}", READ + READ, SHELL, "Done."],
        tokenizer=tokenizer,
        renderer=make_renderer(tokenizer, "qwen3"),
    )
    done, tree = real(engine)
    assert (done.exit_code, done.response) == (0, "Done."), done
    found = [(call.kind, call.state, call.lineage_parent, call.prefix_parent, call.drift_reason) for call in tree.calls]
    assert found == [("main", "live", turn, turn, None) for turn in (None, 0, 1, 2)], tree.outline()
    assert tokenizer.decode(tree.prompt(3).tolist()).count("xyzzy") == 1, "The thought that was dropped is still there."
    assert tree.buckets()["trained"] == tree.num_completion_tokens


@pytest.mark.harness
def test_two_rollouts_of_a_task_share_their_prompts() -> None:
    engine = ScriptedEngine([WRITE, "Done."])
    one, other = (real(engine, tools=("write_file", "read_file"))[1] for _ in range(2))
    for call in range(2):  # as text first, so that a failure can be read
        assert engine.tokenizer.decode(one.prompt(call)) == engine.tokenizer.decode(other.prompt(call))
    assert [one.prompt(i).tolist() for i in range(2)] == [other.prompt(i).tolist() for i in range(2)]


@pytest.mark.harness
def test_a_sub_agent_is_no_part_of_the_main_trajectory() -> None:
    turns = {True: (WRITE, FINISH), False: (SPAWN, "Done.")}

    def replies(prompt: str, turn: int) -> str:
        return turns["complete_task" in prompt.split("<|im_start|>user")[0]][min(turn, 1)]

    done, tree = real(ScriptedEngine(replies))
    assert done.response == "Done.", done
    assert sorted(call.kind for call in tree.calls) == ["main", "main", "subagent", "subagent"], tree.outline()
    mains = [call for call in tree.calls if call.kind == "main"]
    assert mains[1].lineage_parent == mains[0].index
