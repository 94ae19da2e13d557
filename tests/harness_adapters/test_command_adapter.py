"""Any CLI by template: what its placeholders become, what is refused, and two programs that run by template alone."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import pydantic
import pytest
from fake_sandbox import CONTEXT, FakeSandbox
from hypothesis import given
from hypothesis import strategies as st
from real_run import assert_one_trajectory, real_run

import clawgym_env  # noqa: F401 (registers the ids)
from clawgym_env.cache import cache_dir
from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.errors import HarnessError
from clawgym_env.grading.specs import CommandGrading
from clawgym_env.registry import adapter
from clawgym_env.sandbox.base import WORKDIR, ExecResult
from clawgym_env.tasks.task import Task
from harness_adapters.command import CommandHarness
from harness_adapters.pi import PiHarness, models, settings
from harness_adapters.template import fill, placeholders

TOLD = ("agent", "{instruction}", "{base_url}")
WRITE = tool_call("write", path="a.txt", content="hi")


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{task}", 'say "hi"\n{x}'),
        ("--task={task}!", '--task=say "hi"\n{x}!'),
        ("{task:json}", '"say \\"hi\\"\\n{x}"'),
        ("{n} {n:json}", "7 7"),
        ('{"a": {"b": {n}}, "c": {}}', '{"a": {"b": 7}, "c": {}}'),
        ("{{n}} {{n:json}}", "{n} {7}"),
        ("awk '{ print $1 }' a{1,2}", "awk '{ print $1 }' a{1,2}"),
        ("${HOME:-x}", "${HOME:-x}"),
    ],
)
def test_placeholders_are_filled_in_and_other_braces_stay(template: str, text: str) -> None:
    assert fill(template, {"task": 'say "hi"\n{x}', "n": 7}) == text


@given(st.text())
def test_any_value_arrives_as_it_is(value: str) -> None:
    assert fill("<{v}>", {"v": value}) == f"<{value}>"
    assert json.loads(fill('{"v": {v:json}}', {"v": value})) == {"v": value}


def test_a_template_names_its_placeholders() -> None:
    assert placeholders("{a} {b:json} {{c}} {1} { d }") == {"a", "b"}


def test_the_program_gets_its_arguments_environment_files_and_input(tmp_path: Path) -> None:
    harness = CommandHarness(
        argv=["{program}/agent", "--window", "{context_length}"],
        env={"URL": "{base_url}/v1", "KEY": "{api_key}", "LIMIT": "{max_tokens}"},
        files={"{home}/.agent/config.json": '{"model": {model:json}, "dir": {workdir:json}}'},
        stdin="{instruction}",
        program=tmp_path,
        dialect="messages",
        memory_mb=512,
        name="my-agent",
    )
    sandbox = FakeSandbox([ExecResult(3, b" Done.\n", b"noise")])
    done = asyncio.run(harness.run(sandbox, CONTEXT))
    (run,) = sandbox.execs
    assert run.argv == ("/opt/clawgym/command/agent", "--window", "32768")
    assert run.env == {"URL": "http://127.0.0.1:8080/r/k3y/v1", "KEY": "sk-dummy", "LIMIT": "2048"}
    assert (run.cwd, run.stdin.decode()) == (WORKDIR, CONTEXT.instruction)
    assert json.loads(sandbox.files["/root/.agent/config.json"]) == {"model": "policy", "dir": WORKDIR}
    assert (done.exit_code, done.response) == (3, "Done.")
    (mount,) = harness.mounts(tmp_path / "cache")
    assert (mount.source, mount.target) == (tmp_path, "/opt/clawgym/command")
    assert (harness.name, harness.dialect, harness.memory_mb) == ("my-agent", "messages", 512)


def test_the_answer_may_be_in_a_file() -> None:
    harness = CommandHarness(argv=TOLD, response="{workdir}/answer.md")
    sandbox = FakeSandbox(files={f"{WORKDIR}/answer.md": b"Done.\n"})
    assert asyncio.run(harness.run(sandbox, CONTEXT)).response == "Done."
    assert asyncio.run(harness.run(FakeSandbox(), CONTEXT)).response == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"argv": [*TOLD, "{instrution}"]}, "out of instruction, .*got instrution"),
        ({"argv": TOLD, "env": {"A": "${HOME}"}}, "got HOME. Write {{HOME}} for the text itself"),
        ({"argv": TOLD, "response": "{answer}"}, "got answer"),
        ({"argv": ["agent", "{base_url}"]}, "Expected {instruction} in argv, env, files or stdin"),
        ({"argv": ["agent", "{instruction}"]}, "Expected {base_url} in argv, env, files or stdin"),
        ({"argv": ["agent", "{base_url}"], "response": "{instruction}"}, "Expected {instruction}"),
        ({"argv": ["{program}", *TOLD]}, "Expected program= .* got None"),
        ({"argv": ["{program}", *TOLD], "program": "/no/such/agent"}, "got /no/such/agent"),
    ],
)
def test_what_cannot_be_filled_in_is_refused_when_the_harness_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HarnessError, match=words):
        CommandHarness(**options)


@pytest.mark.parametrize(
    "options",
    [{"argv": "agent {instruction} {base_url}"}, {"argv": TOLD, "nice": 1}, {"argv": TOLD, "dialect": "morse"}, {}],
)
def test_options_of_another_form_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(pydantic.ValidationError):
        CommandHarness(**options)


def test_a_file_says_how_to_run_the_program_beside_it(tmp_path: Path) -> None:
    (tmp_path / "agent.py").touch()
    file = tmp_path / "my_cli.toml"
    file.write_text(
        'argv = ["python3", "{program}", "{base_url}"]\nstdin = "{instruction}"\nprogram = "agent.py"\n'
        '[files]\n"{home}/.agent" = \'{"key": {api_key:json}}\'\n'
    )
    harness = adapter(f"command?file={file}")
    assert isinstance(harness, CommandHarness)
    assert harness.program == tmp_path / "agent.py"
    assert harness.files == {"{home}/.agent": '{"key": {api_key:json}}'}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("argv = [", "Invalid|Unclosed"),
        ('argv = "agent"', "argv"),
        ('argv = ["agent"]\nargs = []', "args"),
    ],
)
def test_a_file_of_another_form_is_named(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "my_cli.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(HarnessError, match=f"(?s)my_cli.toml.*({words})"):
        adapter(f"command?file={file}")


def test_the_id_without_a_command_says_what_to_pass() -> None:
    with pytest.raises(HarnessError, match=r"CommandHarness\(argv=.*command\?file=my_cli.toml"):
        gym.make("ClawGym-Command-v0")


AGENT = '''
"""A whole agent: asks, runs what it is told to, asks again."""
import json, subprocess, sys, urllib.request

url, instruction = sys.argv[1], sys.stdin.read()
messages = [{"role": "user", "content": instruction}]
parameters = {"type": "object", "properties": {"command": {"type": "string"}}}
tools = [{"type": "function", "function": {"name": "sh", "description": "Run.", "parameters": parameters}}]
while True:
    body = json.dumps({"model": "policy", "messages": messages, "tools": tools}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
    messages.append(message)
    if not message.get("tool_calls"):
        break
    for call in message["tool_calls"]:
        command = json.loads(call["function"]["arguments"])["command"]
        done = subprocess.run(command, shell=True, capture_output=True, text=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": done.stdout})
open("answer.txt", "w").write(message["content"])
'''


def test_a_little_cli_is_trained_on_like_any_harness(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(AGENT)
    harness = CommandHarness(
        argv=["python3", "{program}/agent.py", "{base_url}/v1/chat/completions"],
        stdin="{instruction}",
        program=tmp_path,
        response="{workdir}/answer.txt",
        memory_mb=256,
    )
    counting = CommandGrading(command=("bash", "-c", "grep -c hi a.txt"))
    task = Task(id="t", instruction="Write hi into a.txt.", grading=counting)
    replies = [tool_call("sh", command="printf hi > a.txt"), tool_call("sh", command="cat a.txt"), "Done."]
    env = gym.make("ClawGym-Command-v0", harness=harness, tasks=[task], engine=ScriptedEngine(replies))
    env.reset(seed=0)
    observation, reward, terminated, _, info = env.step(0)
    env.close()
    assert (observation["response"], reward, terminated) == ("Done.", 1.0, True), info["rollout"].harness_output
    assert (info["harness"], info["num_calls"], info["num_trajectories"]) == ("command", 3, 1)
    tree = observation["trace"]
    assert tree.buckets()["trained"] == tree.num_completion_tokens


@pytest.mark.harness
def test_a_real_product_runs_by_template_alone() -> None:
    pi = PiHarness()
    pi.install(cache_dir())
    # What the adapter of pi writes, as templates: its config is made for a context of placeholders.
    blank = replace(CONTEXT, base_url="{base_url}", api_key="{api_key}", model="{model}", context_length=200_000)
    harness = CommandHarness(
        argv=[
            *("{program}/node-24.19.0/bin/node", f"{{program}}/harnesses/pi-{pi.version}/program"),
            *("--print", "--provider", "clawgym", "--model", "{model}"),
        ],
        env={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        files={
            "{home}/.pi/agent/models.json": json.dumps(models(blank)),
            "{home}/.pi/agent/settings.json": json.dumps(settings(blank)),
        },
        stdin="{instruction}",
        program=cache_dir(),
    )
    replies = [f"On it.\n{WRITE}", "Done: a.txt says hi."]
    run = real_run(harness, replies)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done: a.txt says hi.", b"hi"), run.exit
    assert_one_trajectory(run, replies)
