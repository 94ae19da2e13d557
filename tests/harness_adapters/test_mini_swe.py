"""The mini-swe-agent adapter: configuration and answer; then the product itself against the real proxy."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml
from fake_sandbox import CONTEXT, FakeSandbox
from hypothesis import given
from hypothesis import strategies as st
from real_run import assert_one_trajectory, real_run

from clawgym_env.engine.scripted import ScriptedReply, tool_call
from clawgym_env.errors import HarnessNotInstalled
from clawgym_env.sandbox.base import WORKDIR, ExecResult
from harness_adapters import mini_swe
from harness_adapters.mini_swe import MiniSweHarness
from harness_adapters.pypi import host_python

TRAJECTORY = "/root/.config/mini-swe-agent/trajectory.json"


def trajectory(status: str = "Submitted", submission: str = "", said: str | None = "Done.") -> bytes:
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": said}, {"role": "tool"}]
    return json.dumps({"info": {"exit_status": status, "submission": submission}, "messages": messages}).encode()


def test_it_is_pointed_at_the_proxy_by_a_file_and_not_by_what_its_commands_inherit() -> None:
    sandbox = FakeSandbox([ExecResult(0, b"", b"")], files={TRAJECTORY: trajectory()})
    done = asyncio.run(MiniSweHarness().run(sandbox, CONTEXT))
    (run,) = sandbox.execs
    assert run.argv[1:4] == ("-I", "-S", "/opt/clawgym/mini-swe-agent-2.4.6/program")
    assert run.argv[-2:] == ("-o", TRAJECTORY)
    assert not any("k3y" in value or "sk-dummy" in value for value in run.env.values())
    made = yaml.safe_load(sandbox.files[run.argv[-3]])
    assert made["run"]["task"] == CONTEXT.instruction
    assert made["model"]["model_name"] == "openai/policy"
    assert made["model"]["model_kwargs"]["api_base"] == "http://127.0.0.1:8080/r/k3y/v1"
    assert (run.cwd, done.response) == (WORKDIR, "Done.")


@pytest.mark.parametrize(
    ("record", "response"),
    [
        (trajectory(submission="42\n"), "42"),
        (trajectory(said=None), ""),
        (trajectory(status="RepeatedFormatError"), ""),
        (b"", ""),
        (b"[]", ""),
        (b'{"info": {"exit_status": "Submitted"}}', ""),
    ],
)
def test_the_answer_is_what_was_submitted_or_said_beside_it(record: bytes, response: str) -> None:
    assert mini_swe.final_answer(record) == response


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_an_instruction_written_as_yaml_reads_back_the_same(text: str) -> None:
    assert yaml.safe_load(mini_swe.yaml_text({"task": text})) == {"task": text}


def test_it_is_shown_where_the_name_says_and_its_command_is_named_while_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(HarnessNotInstalled, match="clawgym install mini-swe-agent"):
        MiniSweHarness().mounts(tmp_path)
    (tmp_path / f"harnesses/mini-swe-agent-2.4.6-{host_python().name}").mkdir(parents=True)
    assert [mount.target for mount in MiniSweHarness().mounts(tmp_path)] == ["/opt/clawgym/mini-swe-agent-2.4.6"]


def test_every_package_is_pinned_and_so_is_the_product() -> None:
    pins = [line for line in mini_swe.PRODUCT.lock.read_text().splitlines() if not line.startswith("#")]
    assert all(pin.count("==") == 1 for pin in pins)
    assert f"mini-swe-agent=={mini_swe.PRODUCT.version}" in pins


def bash(command: str, text: str = "") -> str:
    return f"{text}\n{tool_call('bash', command=command)}"


SUBMIT = bash("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT", "Done: a.txt says hi.")


@pytest.mark.harness
def test_twenty_turns_with_parallel_calls_are_one_trajectory() -> None:
    steps = [bash(f"echo {i}", f"Step {i}.") + bash(f"seq {i}") for i in range(16)]
    replies = [bash("printf hi > a.txt", "Writing."), bash("cat a.txt; env", "Checking."), *steps, bash("ls"), SUBMIT]
    run = real_run("mini-swe-agent", replies)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done: a.txt says hi.", b"hi"), run.exit
    assert_one_trajectory(run, replies)
    assert "sk-dummy" not in run.prompt(run.calls()[2])


@pytest.mark.harness
def test_a_reply_it_rejects_is_a_dead_leaf_and_the_run_goes_on() -> None:
    talk, unknown = "I would rather talk.", tool_call("python", code="1")
    cut = ScriptedReply("On and on and", finish_reason="length")

    def script(prompt: str, turn: int) -> str | ScriptedReply:
        complaints = prompt.count("Tool call error")
        if turn == 0:
            return bash("printf hi > a.txt", "Writing.") if complaints else talk
        if turn == 1 and complaints == 1:
            return cut if "output token limit" not in prompt else unknown
        return bash("cat a.txt", "Checking.") if turn == 1 else SUBMIT

    run = real_run("mini-swe-agent", script)
    assert (run.exit.exit_code, run.exit.response, run.written) == (0, "Done: a.txt says hi.", b"hi"), run.exit
    states = [(call.kind, call.state, call.lineage_parent) for call in run.tree.calls]
    assert states == [
        ("main", "dead", None),
        ("main", "live", None),
        ("main", "dead", 1),
        ("main", "dead", 1),
        ("main", "live", 1),
        ("main", "live", 4),
    ], run.tree.outline()
    assert [call.drift_reason for call in run.tree.calls] == [None] * 6
    (kept,) = run.tree.trajectories()
    assert kept.calls == (1, 4, 5)
    dead = sum(len(run.tree[at].token_ids) for at in (0, 2, 3))
    buckets = run.tree.buckets()
    assert (buckets["dead"], buckets["trained"]) == (dead, run.tree.num_completion_tokens - dead)


@pytest.mark.harness
def test_three_rejected_replies_end_the_run_without_an_answer() -> None:
    run = real_run("mini-swe-agent", ["I would rather talk."])
    assert (run.exit.exit_code, run.exit.response, len(run.tree)) == (0, "", 3)
    assert [call.state for call in run.tree.calls].count("live") == 1
