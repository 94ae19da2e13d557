"""Kinds follow lineage, then roles; one path per segment is live."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from clawgym_env.messages import ChatRequest, Message, ToolSpec
from clawgym_env.trace.calls import CallKind
from clawgym_env.trace.classify import CallFacts, assign_kinds, assign_states, marked_kind


def fact(parent: int | None = None, **changes: object) -> CallFacts:
    base = CallFacts(
        lineage_parent=parent,
        segment=0,
        declared=None,
        marked=None,
        role_hash="agent",
        tool_names=("write", "read"),
        request_hash=f"request{next(FRESH)}",
        delivered=True,
        echoes_parent=parent is not None,
    )
    return dataclasses.replace(base, **changes)


FRESH = itertools.count()
SUB = {"role_hash": "helper", "tool_names": ("read",)}
SIDE = {"role_hash": "titles", "tool_names": ()}


def kinds(*calls: CallFacts) -> list[CallKind]:
    return assign_kinds(calls)


def states(*calls: CallFacts) -> list[str]:
    return list(assign_states(calls, assign_kinds(calls)))


def test_the_first_role_with_tools_is_main_other_roles_are_subagents_or_side_calls() -> None:
    assert kinds(fact(**SIDE), fact(), fact(**SUB), fact(1)) == ["auxiliary", "main", "subagent", "main"]


def test_a_changed_system_prompt_with_the_same_tools_is_still_main() -> None:
    assert kinds(fact(), fact(role_hash="agent after compaction")) == ["main", "main"]


def test_a_child_is_what_its_parent_is_whatever_its_role() -> None:
    assert kinds(fact(), fact(**SUB), fact(1), fact(0, **SUB)) == ["main", "subagent", "subagent", "main"]


def test_a_marked_call_does_not_change_whose_conversation_it_is() -> None:
    assert kinds(fact(), fact(0, marked="compaction"), fact(1)) == ["main", "compaction", "main"]


def test_what_the_adapter_declares_wins_and_is_inherited() -> None:
    assert kinds(fact(), fact(declared="subagent"), fact(1)) == ["main", "subagent", "subagent"]
    assert kinds(fact(**SUB), fact(declared="main")) == ["subagent", "main"]


def test_only_marked_calls_make_no_main_role() -> None:
    assert kinds(fact(marked="compaction", **SIDE)) == ["compaction"]


@pytest.mark.parametrize(
    ("messages", "kind"),
    [
        ([Message("system", "You are a helpful AI assistant tasked with summarizing conversations.")], "compaction"),
        ([Message("system", "You are a context summarization agent"), Message("user", "x")], "compaction"),
        ([Message("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. <analysis>")], "compaction"),
        ([Message("user", "Pre-compaction memory flush. Store what matters.")], "auxiliary"),
        ([Message("system", "You are a title generator")], "auxiliary"),
        ([Message("system", "You are an agent."), Message("user", "Summarize the report.")], None),
        ([Message("tool", "You are a title generator")], None),
        ([], None),
    ],
)
def test_summarisers_and_title_writers_give_themselves_away(messages: list[Message], kind: CallKind | None) -> None:
    assert marked_kind(ChatRequest("chat", "m", tuple(messages)), opens=True) == kind


def test_the_wording_of_a_task_does_not_make_it_a_compaction() -> None:
    system = Message("system", "You are an agent. You may be asked for a context checkpoint compaction.")
    task = Message("user", "Read chat.txt and create a detailed summary of the conversation in out.md.")
    tools = (ToolSpec("bash", "", {}),)
    assert marked_kind(ChatRequest("chat", "m", (system, task), tools), opens=True) is None
    later = (system, task, Message("assistant", "ok"), Message("user", "go on"))
    assert marked_kind(ChatRequest("chat", "m", later, tools), opens=False) is None
    assert marked_kind(ChatRequest("chat", "m", (*later[:-1], task), tools), opens=False) == "compaction"
    assert marked_kind(ChatRequest("chat", "m", (task,)), opens=True) == "compaction"


def test_the_path_with_most_delivered_calls_is_live() -> None:
    assert states(fact(), fact(0), fact(0), fact(2)) == ["live", "dead", "live", "live"]


def test_of_equally_long_paths_the_latest_is_live() -> None:
    assert states(fact(), fact(0), fact(0)) == ["live", "dead", "live"]


def test_a_repeated_request_makes_the_older_reply_a_retry() -> None:
    again = {"request_hash": "same"}
    assert states(fact(), fact(0, **again), fact(0, **again), fact(2)) == ["live", "retry", "live", "live"]


def test_the_newer_of_two_identical_ones_is_dead_when_the_older_was_gone_on_from() -> None:
    again = {"request_hash": "same"}
    assert states(fact(), fact(0, **again), fact(0, **again), fact(1)) == ["live", "live", "dead", "live"]


def test_an_undelivered_reply_is_undelivered_unless_the_harness_went_on_from_it() -> None:
    assert states(fact(), fact(0, delivered=False)) == ["live", "undelivered"]
    assert states(fact(), fact(0, delivered=False), fact(1)) == ["live", "live", "live"]
    assert states(fact(), fact(0, delivered=False), fact(0)) == ["live", "undelivered", "live"]


def test_a_part_of_a_reply_that_the_harness_went_on_from_is_no_delivery() -> None:
    assert states(fact(), fact(0, delivered=False), fact(1, echoes_parent=False)) == ["live", "undelivered", "live"]


def test_of_several_tries_at_an_opening_the_one_gone_on_from_is_live() -> None:
    assert states(fact(), fact(), fact(1)) == ["dead", "live", "live"]
    assert states(fact(), fact(), fact(0)) == ["live", "dead", "live"]


def test_openings_that_were_both_gone_on_from_are_twins() -> None:
    again = {"request_hash": "same", **SUB}
    assert states(fact(), fact(**again), fact(**again), fact(2), fact(1)) == ["live"] * 5


def test_each_segment_keeps_a_path_of_its_own() -> None:
    assert states(fact(), fact(0), fact(segment=2)) == ["live", "live", "live"]
    assert states(fact(), fact(0), fact(segment=0)) == ["live", "live", "dead"]


def test_a_side_branch_does_not_compete_with_the_main_path() -> None:
    assert states(fact(), fact(0, marked="compaction"), fact(0)) == ["live", "live", "live"]


def test_two_compactions_of_one_conversation_do_not_compete() -> None:
    calls = [fact(), fact(0, marked="compaction"), fact(0), fact(2, marked="compaction")]
    assert states(*calls) == ["live"] * 4
