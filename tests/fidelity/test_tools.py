from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from clawgym_env.fidelity.tools import Call, Toolbox, Unsayable
from clawgym_env.messages import ChatRequest, Json, Message, ToolSpec


def tool(name: str, properties: Mapping[str, Json], required: Sequence[str] = (), description: str = "") -> ToolSpec:
    return ToolSpec(name, description, {"type": "object", "properties": dict(properties), "required": list(required)})


TEXT: Json = {"type": "string"}


def toolbox(*tools: ToolSpec, messages: Sequence[Message] = ()) -> Toolbox:
    return Toolbox(ChatRequest("chat", "policy", tuple(messages), tuple(tools)))


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("Bash", "command"),
        ("bash", "command"),
        ("exec", "command"),
        ("exec_command", "cmd"),
        ("run_shell_command", "command"),
        ("local_shell", "command"),
        ("execute_bash", "command"),
        ("terminal", "command"),
        ("mcp__box__run_command", "command"),
    ],
)
def test_a_shell_is_found_under_any_of_its_names(name: str, argument: str) -> None:
    noise = [tool("execute_plan", {"plan": TEXT}), tool("process", {"action": TEXT}), tool("bash_output", {"id": TEXT})]
    assert toolbox(*noise, tool(name, {argument: TEXT}, [argument])).shell("ls") == Call(name, {argument: "ls"})


def test_a_shell_that_takes_a_list_gets_one_and_every_required_argument_is_given() -> None:
    properties: dict[str, Json] = {
        "command": {"type": "array"},
        "is_background": {"type": "boolean"},
        "timeout": {"type": "integer"},
        "mode": {"type": "string", "enum": ["fast", "slow"]},
        "description": TEXT,
        "optional": TEXT,
    }
    call = toolbox(tool("shell", properties, ["command", "is_background", "timeout", "mode", "description"])).shell(
        "ls"
    )
    assert call.arguments == {
        "command": ["bash", "-c", "ls"],
        "is_background": False,
        "timeout": 1,
        "mode": "fast",
        "description": "a small job",
    }


@pytest.mark.parametrize(
    ("name", "path", "content"),
    [("Write", "file_path", "content"), ("write", "filePath", "content"), ("create_file", "path", "file_text")],
)
def test_a_file_is_written_by_the_tool_for_it(name: str, path: str, content: str) -> None:
    box = toolbox(tool("bash", {"command": TEXT}), tool(name, {path: TEXT, content: TEXT}, [path, content]))
    assert box.write("/w/a.txt", "hi") == Call(name, {path: "/w/a.txt", content: "hi"})


def test_a_file_is_written_by_the_shell_where_there_is_no_tool_for_it() -> None:
    box = toolbox(tool("bash", {"command": TEXT}), tool("write_stdin", {"chars": TEXT}))
    assert box.write("/w/a.txt", "hi").arguments == {"command": "printf '%s' 'hi' > '/w/a.txt'"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (
            tool("Agent", {"description": TEXT, "prompt": TEXT}, ["description", "prompt"]),
            {"description": "a small job", "prompt": "go"},
        ),
        (
            tool(
                "task",
                {"prompt": TEXT, "subagent_type": TEXT},
                ["prompt", "subagent_type"],
                "Agents:\n- explore: looks\n- general: does anything",
            ),
            {"prompt": "go", "subagent_type": "general"},
        ),
        (
            tool("agent", {"prompt": TEXT, "subagent_type": {"type": "string", "enum": ["a", "b"]}}, ["subagent_type"]),
            {"prompt": "go", "subagent_type": "a"},
        ),
        (tool("spawn_agent", {"message": TEXT, "items": {"type": "array"}}), {"message": "go"}),
        (tool("sessions_spawn", {"task": TEXT}, ["task"]), {"task": "go"}),
    ],
)
def test_a_task_is_handed_to_a_sub_agent_that_takes_any(spec: ToolSpec, expected: Mapping[str, Json]) -> None:
    box = toolbox(tool("TaskStop", {"task_id": TEXT}), tool("list_agents", {}), tool("wait_agent", {}), spec)
    assert box.spawn("go") == Call(spec.name, expected)


def test_sub_agents_are_waited_for_by_the_ids_of_the_latest_result() -> None:
    wait = tool("wait_agent", {"targets": {"type": "array"}, "timeout_ms": {"type": "number"}}, ["targets"])
    old, new = (f"0000000{number}-0000-4000-8000-000000000000" for number in (1, 2))
    results = [Message("tool", f'{{"agent_id": "{old}"}}'), Message("tool", f'{{"agent_id": "{new}"}}')]
    assert toolbox(wait, messages=results).wait() == Call("wait_agent", {"targets": [new]})
    assert toolbox(wait).wait() is None
    assert toolbox(messages=results).wait() is None


def test_an_agent_ends_its_work_the_way_its_harness_wants() -> None:
    bash = tool("bash", {"command": TEXT})
    told = Message("user", "When done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`.")
    assert toolbox(bash).ending("Done.") is None
    assert toolbox(bash, messages=[Message("system", ""), told]).ending("Done.") == Call(
        "bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}
    )
    finish = tool("complete_task", {"result": TEXT}, ["result"])
    assert toolbox(bash, finish).ending("Done.") == Call("complete_task", {"result": "Done."})
    nested: Json = {"type": "object", "properties": {"response": TEXT}, "required": ["response"]}
    gemini = tool("complete_task", {"result": nested, "wait_for_previous": {"type": "boolean"}}, ["result"])
    assert toolbox(bash, gemini).ending("Done.") == Call("complete_task", {"result": {"response": "Done."}})


def test_what_is_not_offered_is_missing() -> None:
    box = toolbox(tool("read", {"path": TEXT}), ToolSpec("bash", "", {}, kind="custom"))
    for missing in (lambda: box.shell("ls"), lambda: box.write("/w/a.txt", "hi"), lambda: box.spawn("go")):
        with pytest.raises(Unsayable, match="read"):
            missing()
    assert box.unknown().name not in ("read", "bash")
