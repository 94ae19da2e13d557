"""The mini agent as a process over a real socket, against scripted replies."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from stub_model import Step, Stub, Turn, serve

from harness_adapters.mini import agent
from harness_adapters.mini.agent import Conversation, LostReply, ToolCall, read_reply, run_tool

DIALECTS = ("chat", "messages")


def play(folder: Path, steps: list[Step], dialect: str = "chat") -> tuple[subprocess.CompletedProcess[str], Stub]:
    """Run the agent's file as the sandbox would."""
    work = folder / "work"
    work.mkdir()
    with serve(steps) as stub:
        config = folder / "config.json"
        task = {"instruction": "Écris it.", "model": "policy", "max_tokens": 64, "api_key": "none"}
        config.write_text(json.dumps({**task, "base_url": stub.url, "dialect": dialect}))
        argv = ["/usr/bin/env", "python3", "-I", "-S", agent.__file__, str(config)]
        done = subprocess.run(argv, cwd=work, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=50)
    return done, stub


def write(path: str, content: str) -> tuple[str, str]:
    return "write", json.dumps({"path": path, "content": content})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_it_runs_every_tool_call_of_a_reply_then_prints_the_final_answer(tmp_path: Path, dialect: str) -> None:
    turn = Turn("Writing.", (write("a/b.txt", "ü\n"), ("bash", '{"command": "cat a/b.txt"}')), reasoning="hm")
    done, stub = play(tmp_path, [turn, Turn("Fait: ü")], dialect)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Fait: ü\n", "")
    assert (tmp_path / "work/a/b.txt").read_text() == "ü\n"
    assert len(stub.requests) == 2
    assert all(request["stream"] and request["max_tokens"] == 64 for request in stub.requests)
    results = json.dumps(stub.requests[1]["messages"], ensure_ascii=False)
    assert '"ok"' in results
    assert '"ü\\n"' in results


@pytest.mark.parametrize("dialect", DIALECTS)
def test_each_request_extends_the_one_before(tmp_path: Path, dialect: str) -> None:
    steps: list[Step] = [Turn("", (write(f"{i}", "x"),), reasoning="because") for i in range(3)]
    _, stub = play(tmp_path, [*steps, Turn("Done.")], dialect)
    for before, after in zip(stub.requests, stub.requests[1:], strict=False):
        assert after["messages"][: len(before["messages"])] == before["messages"]
        assert {k: v for k, v in after.items() if k != "messages"} == {
            k: v for k, v in before.items() if k != "messages"
        }
    assert len(stub.requests[3]["messages"]) == len(stub.requests[0]["messages"]) + 6


def test_the_commands_it_runs_find_no_key(tmp_path: Path) -> None:
    _, stub = play(tmp_path, [Turn("", (("bash", '{"command": "cat ../config.json"}'),)), Turn("Done.")])
    assert "No such file" in stub.requests[1]["messages"][-1]["content"]
    assert not (tmp_path / "config.json").exists()


def test_chat_echoes_text_reasoning_ids_and_argument_text_verbatim(tmp_path: Path) -> None:
    arguments = '{"path":  "f", "content": "1"}'
    _, stub = play(tmp_path, [Turn("Ok.", (("write", arguments),), reasoning="r"), Turn("Done.")])
    assert stub.requests[1]["messages"][2:] == [
        {
            "role": "assistant",
            "content": "Ok.",
            "reasoning_content": "r",
            "tool_calls": [
                {"id": "call0x0", "type": "function", "function": {"name": "write", "arguments": arguments}}
            ],
        },
        {"role": "tool", "tool_call_id": "call0x0", "content": "ok"},
    ]
    assert stub.paths[0] == "/r/key/v1/chat/completions"
    assert stub.headers[0]["authorization"] == "Bearer none"


def test_messages_echoes_blocks_and_their_signature(tmp_path: Path) -> None:
    _, stub = play(tmp_path, [Turn("Ok.", (write("f", "1"),), reasoning="r"), Turn("Done.")], "messages")
    assert stub.requests[1]["messages"][1:] == [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "r", "signature": "s"},
                {"type": "text", "text": "Ok."},
                {"type": "tool_use", "id": "call0x0", "name": "write", "input": {"path": "f", "content": "1"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call0x0", "content": "ok"}]},
    ]
    assert stub.paths[0] == "/r/key/v1/messages"
    assert stub.headers[0]["x-api-key"] == "none"


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("arguments", ['{"path": "x"', "[1]", '"text"', "null"])
def test_malformed_arguments_become_an_error_result(tmp_path: Path, dialect: str, arguments: str) -> None:
    done, stub = play(tmp_path, [Turn("", (("write", arguments),)), Turn("Sorry.")], dialect)
    assert done.stdout == "Sorry.\n"
    assert "error: arguments must be a JSON object" in json.dumps(stub.requests[1]["messages"][-1])


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("fault", [500, 503, "cut"])
def test_a_lost_reply_is_asked_for_again_with_the_same_body(tmp_path: Path, dialect: str, fault: Step) -> None:
    done, stub = play(tmp_path, [fault, Turn("Done.")], dialect)
    assert (done.returncode, done.stdout) == (0, "Done.\n")
    assert stub.requests[0] == stub.requests[1]


def test_it_gives_up_when_replies_stay_lost(tmp_path: Path) -> None:
    done, stub = play(tmp_path, [503] * 9)
    assert done.returncode == 1
    assert "503" in done.stderr
    assert len(stub.requests) == 1 + len(agent.RETRY_WAITS_S)


def test_a_refused_request_ends_the_run_at_once(tmp_path: Path) -> None:
    done, stub = play(tmp_path, [400])
    assert (done.returncode, len(stub.requests)) == (1, 1)
    assert "scripted" in done.stderr


def test_a_lone_surrogate_in_the_answer_does_not_crash_it(tmp_path: Path) -> None:
    done, _ = play(tmp_path, [Turn("", (write("f", "\ud800"),)), Turn("a\ud800b")])
    assert (done.returncode, done.stdout) == (0, "a?b\n")


def test_an_error_event_in_the_stream_counts_as_a_lost_reply() -> None:
    with pytest.raises(LostReply, match="overloaded"):
        read_reply("messages", [b'data: {"type": "error", "error": {"type": "overloaded_error"}}\n', b"\n"])


def test_data_without_its_closing_blank_line_is_a_lost_reply() -> None:
    with pytest.raises(LostReply):
        read_reply("chat", [b"data: [DONE]\n"])


def test_tool_errors_name_no_host_path(tmp_path: Path) -> None:
    answers = [
        run_tool("read", {"path": "missing"}, str(tmp_path)),
        run_tool("read", {}, str(tmp_path)),
        run_tool("fly", {}, str(tmp_path)),
        run_tool("bash", {"command": "\0"}, str(tmp_path)),
        run_tool("bash", {"command": "exit 3"}, str(tmp_path)),
    ]
    assert answers == [
        "error: No such file or directory",
        "error: missing argument 'path'",
        "error: no tool named fly",
        "error: embedded null byte",
        "exit 3",
    ]


def test_a_long_command_is_stopped_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "BASH_TIMEOUT_S", 0.2)
    assert run_tool("bash", {"command": "sleep 50 & sleep 50"}, str(tmp_path)) == "error: stopped after 0.2 s"


def test_tool_output_is_bounded(tmp_path: Path) -> None:
    assert len(run_tool("bash", {"command": "head -c 100000 /dev/zero | tr '\\0' x"}, str(tmp_path))) == 4000


def test_a_conversation_can_be_played_in_process(tmp_path: Path) -> None:
    conversation = Conversation("Say hi.")
    call = ToolCall("c1", "bash", '{"command": "echo hi"}')
    conversation.add_reply("", [call])
    conversation.add_tool_results([("c1", run_tool("bash", {"command": "echo hi"}, str(tmp_path)))])
    conversation.add_reply("hi")
    assert [message["role"] for message in conversation.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert conversation.messages[3]["content"] == "hi\n"


def test_an_unknown_dialect_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'gemini'"):
        Conversation("x", "gemini")
