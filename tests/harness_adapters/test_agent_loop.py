"""The white-box loop: a linear trajectory, tools that always answer, and the same in any sandbox."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from fake_sandbox import CONTEXT, FakeSandbox
from real_run import assert_one_trajectory, real_run

from clawgym_env.engine.scripted import Script, ScriptedEngine, tool_call
from clawgym_env.harness import HarnessExit
from clawgym_env.messages import Json
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.sandbox.base import WORKDIR, ExecResult, SandboxSpec
from clawgym_env.sandbox.fake import FakeBackend
from clawgym_env.trace.prefix_tree import PrefixTree
from harness_adapters.agent_loop.adapter import AgentLoop
from harness_adapters.agent_loop.tools import MAX_OUTPUT, TOOLS, Toolbox

WORK = [
    tool_call("write", path="notes/a.txt", content="one\ntwo\n") + tool_call("bash", command="wc -l < notes/a.txt"),
    tool_call("edit", path="notes/a.txt", old="two", new="2 é"),
    tool_call("search", pattern="^[0-9]", path="notes"),
    tool_call("read", path="notes/a.txt"),
    "All done.",
]


def run_in_fake(
    script: Script, *, instructions: tuple[str, ...] = ("Go.",), window: int = 1 << 20
) -> tuple[list[HarnessExit], PrefixTree, ScriptedEngine]:
    """Run the loop once per instruction, in one session."""

    async def run() -> tuple[list[HarnessExit], PrefixTree, ScriptedEngine]:
        engine, loop, proxy, exits = ScriptedEngine(script, context_length=window), AgentLoop(), ProxyServer(), []
        await proxy.start()
        sandbox = await FakeBackend().open(SandboxSpec())
        try:
            session = proxy.open_session(engine, adapter=loop)
            socket = await sandbox.listen(8080)
            port = socket.getsockname()[1]  # the fake shares the host's network
            listener = await proxy.serve(socket, session)
            for turn, instruction in enumerate(instructions):
                context = replace(
                    CONTEXT,
                    instruction=instruction,
                    base_url=f"http://127.0.0.1:{port}/r/{session.key}",
                    resume=turn > 0,
                    resumable=len(instructions) > 1,
                )
                exits.append(await loop.run(sandbox, context))
            tree = await session.settle()
            await listener.close()
            return exits, tree, engine
        finally:
            await sandbox.close()
            await proxy.close()

    return asyncio.run(run())


def use(*calls: tuple[str, Mapping[str, Json] | None], file: bytes = b"one\ntwo\n") -> list[str]:
    """Return what each call is answered, one after the other in a sandbox with a file "a"."""

    async def run() -> list[str]:
        sandbox = await FakeBackend().open(SandboxSpec())
        try:
            await sandbox.write_file(f"{WORKDIR}/a", file)
            return [await Toolbox(sandbox, WORKDIR).run(name, arguments) for name, arguments in calls]
        finally:
            await sandbox.close()

    return asyncio.run(run())


def results(tree: PrefixTree, engine: ScriptedEngine) -> list[str]:
    """Return what the tools answered, as the last prompt shows it."""
    text = engine.tokenizer.decode(tree.prompt(len(tree) - 1).tolist())
    return [part.split("</tool_response>")[0] for part in text.split("<tool_response>")[1:]]


def test_the_loop_works_with_all_its_tools_on_one_linear_trajectory() -> None:
    [done], tree, engine = run_in_fake(WORK)
    assert (done.exit_code, done.response) == (0, "All done.")
    assert results(tree, engine) == ["ok", "2\n", "ok", "notes/a.txt:2:2 é\n", "one\n2 é\n"]
    assert [call.lineage_parent for call in tree] == [None, 0, 1, 2, 3]
    assert [call.drift_reason for call in tree] == [None] * 5
    assert tree.buckets()["trained"] == tree.num_completion_tokens
    assert len(tree.rows()) == 1


def test_it_goes_on_with_its_session() -> None:
    exits, tree, engine = run_in_fake(["First.", "Second."], instructions=("Say one.", "Say two."))
    assert [done.response for done in exits] == ["First.", "Second."]
    assert tree[1].lineage_parent == 0
    prompt = engine.tokenizer.decode(tree.prompt(1).tolist())
    assert prompt.index("Say one.") < prompt.index("First.") < prompt.index("Say two.")


def test_a_history_too_long_for_the_window_ends_it() -> None:
    [done], tree, _ = run_in_fake([tool_call("bash", command="seq 9999")], window=6000)
    assert done.exit_code == 1
    assert b"HTTP 400" in done.stderr
    assert len(tree) == 1


def test_a_lost_reply_is_asked_for_again_and_a_refusal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness_adapters.agent_loop.adapter.RETRY_WAITS_S", (0.0, 0.0))
    lost = [ExecResult(1, b"", b"ConnectionResetError"), ExecResult(0, b"503\nbusy", b"")]
    said = ExecResult(0, b'200\n{"choices": [{"message": {"role": "assistant", "content": "Done."}}]}', b"")
    refused = ExecResult(0, b"400\ntoo long", b"")

    def ask(*answers: ExecResult) -> tuple[HarnessExit, FakeSandbox]:
        sandbox = FakeSandbox(list(answers))
        return asyncio.run(AgentLoop().run(sandbox, CONTEXT)), sandbox

    done, sandbox = ask(*lost, said)
    assert (done.exit_code, done.response) == (0, "Done.")
    assert len({exec.stdin for exec in sandbox.execs}) == 1
    done, sandbox = ask(*lost, lost[0], said)
    assert (done.exit_code, done.stderr) == (1, b"HTTP : ConnectionResetError")
    done, sandbox = ask(refused, said)
    assert (done.exit_code, done.stderr) == (1, b"HTTP 400: too long")
    assert len(sandbox.execs) == 1


@pytest.mark.parametrize(
    ("name", "arguments", "answer"),
    [
        ("fetch", {}, "error: expected a tool out of bash, read, write, edit, search, got 'fetch'"),
        ("bash", None, "error: expected the arguments to be a JSON object"),
        ("write", {"path": "b", "content": 7}, "error: expected text for content"),
        ("read", {"path": "b"}, "No such file"),
        ("read", {"path": "."}, "not a regular file"),
        ("read", {"path": "a\0b"}, "error: "),
        ("write", {"path": "a/b", "content": ""}, "error: "),
        ("edit", {"path": "a", "old": "o", "new": "0"}, "to be in the file once, got 2"),
        ("edit", {"path": "a", "old": "", "new": "0"}, "got empty text"),
        ("edit", {"path": "a", "old": "none", "new": "0"}, "got 0"),
        ("search", {"pattern": "three"}, "no match"),
        ("search", {"pattern": "("}, "grep: "),
        ("bash", {"command": "true"}, "exit 0"),
        ("bash", {"command": "echo out; echo err >&2; exit 3"}, "out\nerr\nexit 3"),
        ("bash", {"command": "printf '\\377'"}, "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_whatever_is_asked_for_is_answered(name: str, arguments: Mapping[str, Json] | None, answer: str) -> None:
    assert answer in use((name, arguments))[0]


def test_what_is_no_text_is_not_edited_away() -> None:
    refused, after = use(("edit", {"path": "a", "old": "x", "new": "y"}), ("read", {"path": "a"}), file=b"x\xff")
    assert refused.startswith("error: ")
    assert after == "x\N{REPLACEMENT CHARACTER}"


def test_a_command_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness_adapters.agent_loop.tools.COMMAND_TIMEOUT_S", 0.2)
    assert use(("bash", {"command": "echo begun; sleep 60"}))[0].startswith("begun\n\nerror: stopped after")


def test_results_are_bounded() -> None:
    [text] = use(("bash", {"command": f"head -c {MAX_OUTPUT + 50} /dev/zero | tr '\\0' x"}))
    assert text == "x" * MAX_OUTPUT + "\n[50 characters left out]"


def test_the_tools_are_described_as_what_they_take() -> None:
    assert [tool.name for tool in TOOLS] == ["bash", "read", "write", "edit", "search"]
    assert all(json.loads(json.dumps(dict(tool.parameters)))["type"] == "object" for tool in TOOLS)


def test_it_runs_in_the_local_sandbox() -> None:
    run = real_run("agent-loop", [tool_call("write", path="a.txt", content="hi"), *WORK[:3], "Done."])
    assert run.written == b"hi"
    assert run.exit.response == "Done."
    assert_one_trajectory(run, [tool_call("write", path="a.txt", content="hi"), *WORK[:3], "Done."])
