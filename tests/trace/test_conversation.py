"""What graders are told of a rollout: every word once, whatever the harness does to its history."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

import pytest
from conversations import SYSTEM, TOOLS, USER, Agent
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_talk import (
    Wire,
    block,
    body,
    called,
    claude,
    content,
    echo,
    gemini_body,
    result,
    said,
    tool_result,
    used,
)

from clawgym_env.messages import Message, ToolCall
from clawgym_env.proxy import gemini, messages, responses
from clawgym_env.trace.conversation import conversation_to_transcript
from harness_adapters.openclaw import TRANSIENT, OpenClawHarness

START = [SYSTEM, USER]


def told(agent: Agent) -> list[tuple[str, str]]:
    """Return role and text of what graders see; a call stands as `name(arguments)`."""
    lines = []
    for message in agent.builder.conversation(agent.builder.freeze()):
        calls = "".join(f" {call.name}({call.arguments})" for call in message.tool_calls)
        lines.append((message.role, (message.content + calls).strip()))
    return lines


def test_an_append_only_conversation_is_told_once_without_its_system_prompt() -> None:
    agent = Agent()
    first = agent.ask(START, "Sure.", [("write", {"path": "a"})], reasoning="Easy.")
    history = [*START, *agent.results(first, "done")]
    second = agent.ask(history, "Done.")
    agent.ask([*history, agent.echo(second), Message("user", "Thanks.")], "Welcome.")
    assert told(agent) == [
        ("user", "Write hello."),
        ("assistant", 'Sure. write({"path": "a"})'),
        ("tool", "done"),
        ("assistant", "Done."),
        ("user", "Thanks."),
        ("assistant", "Welcome."),
    ]
    assert agent.builder.conversation(agent.builder.freeze())[1].reasoning == "Easy."


def test_parallel_tools_keep_their_results_in_order() -> None:
    agent = Agent()
    both = agent.ask(START, "", [("read", {"path": "a"}), ("read", {"path": "b"})])
    agent.ask([*START, *agent.results(both, "one", "two")], "Done.")
    heard = agent.builder.conversation(agent.builder.freeze())
    assert [(m.content, m.tool_call_id) for m in heard[2:4]] == [("one", "call0x0"), ("two", "call0x1")]


def test_of_several_tries_only_the_one_that_went_on_is_told() -> None:
    agent = Agent()
    agent.ask(START, "Lost.", delivered=False)
    agent.ask(START, "Bad.")
    good = agent.ask(START, "Good.")
    agent.ask([*START, agent.echo(good), Message("user", "Go on.")], "Done.")
    assert told(agent) == [
        ("user", "Write hello."),
        ("assistant", "Good."),
        ("user", "Go on."),
        ("assistant", "Done."),
    ]


def test_a_reply_that_the_harness_dropped_is_left_out_and_its_complaint_is_not() -> None:
    agent = Agent()
    first = agent.ask(START, "", [("write", {"path": "a"})])
    history = [*START, *agent.results(first, "done")]
    agent.ask(history, "No call.")
    agent.ask([*history, Message("user", "Call a tool.")], "Done.")
    assert told(agent) == [
        ("user", "Write hello."),
        ("assistant", 'write({"path": "a"})'),
        ("tool", "done"),
        ("user", "Call a tool."),
        ("assistant", "Done."),
    ]


def test_what_a_reply_that_never_arrived_was_asked_with_is_told_all_the_same() -> None:
    agent = Agent()
    first = agent.ask(START, "", [("write", {"path": "a"})])
    history = [*START, *agent.results(first, "done")]
    agent.ask(history, "Lost.", delivered=False)
    agent.ask(history, "Lost again.", delivered=False)
    assert told(agent) == [("user", "Write hello."), ("assistant", 'write({"path": "a"})'), ("tool", "done")]


def test_a_reply_of_which_a_part_arrived_counts_once_the_harness_goes_on_from_it() -> None:
    agent = Agent()
    agent.ask(START, "One, two, three.", delivered=False)
    agent.ask([*START, Message("assistant", "One, two,"), Message("user", "Resume.")], "Done.")
    assert told(agent) == [
        ("user", "Write hello."),
        ("assistant", "One, two, three."),
        ("user", "Resume."),
        ("assistant", "Done."),
    ]


def test_sub_agents_titles_and_questions_for_summaries_are_left_out() -> None:
    agent = Agent()
    agent.ask([Message("system", "You are a title generator."), USER], "A title", tools=())
    first = agent.ask(START, "", [("read", {"path": "a"})])
    agent.ask([Message("system", "You are a helper."), Message("user", "Help.")], "Helped.", tools=TOOLS[1:])
    agent.ask([*START, *agent.results(first, "text")], "Done.")
    assert told(agent) == [
        ("user", "Write hello."),
        ("assistant", 'read({"path": "a"})'),
        ("tool", "text"),
        ("assistant", "Done."),
    ]


SUMMARISE = Message("user", "Create a detailed summary of the conversation so far.")
SUMMARY = Message("user", "So far: a was written.")


@pytest.mark.parametrize("kept_reply", [True, False])
def test_after_a_compaction_the_summary_is_the_users_and_what_was_kept_is_not_told_again(kept_reply: bool) -> None:
    agent = Agent()
    first = agent.ask(START, "", [("write", {"path": "a"})])
    history = [*START, *agent.results(first, "done")]
    agent.ask([*history, SUMMARISE], "A summary.")
    kept = agent.results(first, "done") if kept_reply else []
    opening = [SYSTEM, USER, SUMMARY, *kept, *([] if kept_reply else [Message("user", "Go on.")])]
    agent.ask(opening, "Done.")
    results = [("tool", "done")] if kept_reply else [("user", "Go on.")]
    before = [("user", "Write hello."), ("assistant", 'write({"path": "a"})')]
    assert told(agent) == [*before, ("user", "So far: a was written."), *results, ("assistant", "Done.")]


def test_a_tail_kept_without_any_summary_is_not_told_again() -> None:
    agent = Agent()
    history = list(START)
    for number in range(3):
        call = agent.ask(history, f"Step {number}.", [("read", {"path": str(number)})])
        history += agent.results(call, f"text {number}")
    tail = [SYSTEM, Message("user", "Older messages are gone."), *history[-4:]]
    agent.ask(tail, "Done.")
    words = [text for _, text in told(agent)]
    assert len(words) == len(set(words))
    assert words[-3:] == ["Older messages are gone.", "text 2", "Done."]


def test_a_result_that_says_what_an_older_one_said_is_not_taken_for_it() -> None:
    agent = Agent()
    history = list(START)
    for number in range(2):
        call = agent.ask(history, f"Step {number}.", [("read", {"path": str(number)})])
        history += agent.results(call, "ok")
    agent.ask([*history[:-1], SUMMARISE], "A summary.")
    agent.ask([SYSTEM, SUMMARY, *history[-2:]], "Done.")
    assert [text for _, text in told(agent)][-3:] == ["So far: a was written.", "ok", "Done."]


def test_results_under_other_ids_are_known_by_their_words() -> None:
    agent = Agent()
    call = agent.ask(START, "", [("read", {"path": "a"})])
    done = agent.ask([*START, *agent.results(call, "text")], "Done.")
    renamed = [
        dataclasses.replace(agent.echo(call), tool_calls=(ToolCall("other", "read", '{"path": "a"}'),)),
        Message("tool", "text", tool_call_id="other"),
    ]
    first = Message("user", "Files: a. Write hello.")
    agent.ask([SYSTEM, first, *renamed, agent.echo(done), Message("user", "More.")], "Enough.")
    assert [text for _, text in told(agent)][-3:] == ["Files: a. Write hello.", "More.", "Enough."]


def test_a_main_agent_that_goes_on_from_a_side_call_keeps_the_results_that_stood_there() -> None:
    agent = Agent()
    first = agent.ask(START, "", [("write", {"path": "a"})])
    flush = [*START, *agent.results(first, "done"), Message("user", "Pre-compaction memory flush.")]
    side = agent.ask(flush, "Nothing to keep.")
    agent.ask([*flush, agent.echo(side), Message("user", "Go on.")], "Done.")
    assert told(agent) == [
        ("user", "Write hello."),
        ("assistant", 'write({"path": "a"})'),
        ("tool", "done"),
        ("user", "Go on."),
        ("assistant", "Done."),
    ]


def test_a_new_session_follows_the_one_before_even_where_its_user_says_the_same() -> None:
    agent = Agent()
    first = agent.ask(START, "Done.")
    agent.ask([*START, agent.echo(first), Message("user", "Good.")], "Thanks.")
    agent.ask(START, "Done again.")
    assert [text for _, text in told(agent)] == [
        "Write hello.",
        "Done.",
        "Good.",
        "Thanks.",
        "Write hello.",
        "Done again.",
    ]


def test_few_shot_replies_that_no_policy_gave_are_left_out() -> None:
    agent = Agent()
    agent.ask([SYSTEM, Message("user", "Example?"), Message("assistant", "Like so."), USER], "Done.")
    assert told(agent) == [("user", "Example?"), ("user", "Write hello."), ("assistant", "Done.")]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["user", "tool", "two tools", "lost", "retry"]), min_size=1, max_size=12))
def test_whatever_the_turns_every_word_is_told_once_and_in_order(moves: Sequence[str]) -> None:
    agent = Agent()
    history, expected = list(START), ["Write hello."]
    for number, move in enumerate(moves):
        if move in ("lost", "retry"):
            agent.ask(history, f"try {number}", delivered=move == "retry")
        if move == "user":
            call = agent.ask(history, f"reply {number}")
            new = [Message("user", f"say {number}")]
            history += [agent.echo(call), *new]
        else:
            count = 2 if move == "two tools" else 1
            call = agent.ask(history, f"reply {number}", [("read", {"n": i}) for i in range(count)])
            new = agent.results(call, *(f"result {number} {i}" for i in range(count)))[1:]
            history += [agent.echo(call), *new]
        expected += [f"reply {number}", *(message.content for message in new)]
    agent.ask(history, "end")
    heard = agent.builder.conversation(agent.builder.freeze())
    assert [message.content for message in heard] == [*expected, "end"]


def test_what_is_kept_grows_with_new_text_only() -> None:
    agent = Agent()
    history = list(START)
    for number in range(40):
        call = agent.ask(history, f"reply {number}", [("read", {"path": "a"})])
        history += agent.results(call, f"{number} " + "x" * 500)
    kept = [node.spoken for node in agent.builder._nodes]
    assert max(len(spoken.heard) for spoken in kept) == 1
    size = sum(sys.getsizeof(message.content) for spoken in kept for message in spoken.heard)
    assert size < 40 * 700


# ---- on the wire


def test_openclaws_moved_context_is_no_part_of_what_was_said() -> None:
    wire = Wire(adapter=OpenClawHarness(api="chat"))
    context = said("user", f"{TRANSIENT}\nActive exec sessions: none")
    start = [said("system", "You are OpenClaw."), said("user", "Write hi.")]
    first = wire.send(body(*start, context), "", [("write", {"path": "a"})])
    wire.send(body(*start, echo(first), result(first.id, "done"), context), "Done.")
    assert told(wire.agent) == [
        ("user", "Write hi."),
        ("assistant", 'write({"path": "a"})'),
        ("tool", "done"),
        ("assistant", "Done."),
    ]


def test_a_context_that_moves_behind_the_next_message_is_told_once_and_breaks_no_lineage() -> None:
    wire = Wire(dialect=responses, adapter=OpenClawHarness())

    def item(role: str, text: str) -> dict[str, object]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    context = item("user", f"{TRANSIENT}\nActive exec sessions: none")
    start = [item("developer", "You are OpenClaw."), item("user", "Say one.")]
    first = wire.send({"model": "policy", "input": [*start, context]}, "One.")
    history = [*start, item("assistant", first.text), item("user", "Say two.")]
    second = wire.send({"model": "policy", "input": [*history, context]}, "Two.")
    assert (second.call.lineage_parent, second.call.drift_reason) == (0, "history_rewritten")
    assert [text for _, text in told(wire.agent)] == [
        "Say one.",
        f"{TRANSIENT}\nActive exec sessions: none",
        "One.",
        "Say two.",
        "Two.",
    ]


def test_claudes_moving_cache_marks_and_reminders_do_not_double_a_message() -> None:
    wire = Wire(dialect=messages)
    first = wire.send(claude(said("user", [block("Write hi.", cached=True)])), "Sure.", [("Write", {"a": 1})])
    second = wire.send(
        claude(
            said("user", "Write hi."),
            used(first),
            said("user", [tool_result(first.id, "done", cached=True), block("A reminder.")]),
        ),
        "Done.",
    )
    wire.send(
        claude(
            said("user", "Write hi."),
            used(first),
            said("user", [tool_result(first.id, [block("done")]), block("A reminder.")]),
            said("assistant", second.text),
            said("user", [block("More.", cached=True)]),
        ),
        "Enough.",
    )
    assert told(wire.agent) == [
        ("user", "Write hi."),
        ("assistant", 'Sure. Write({"a": 1})'),
        ("tool", "done"),
        ("user", "A reminder."),
        ("assistant", "Done."),
        ("user", "More."),
        ("assistant", "Enough."),
    ]


def test_the_policys_own_words_are_told_where_the_harness_replaced_them() -> None:
    wire = Wire()
    start = [said("system", "s"), said("user", "Write hi.")]
    first = wire.send(body(*start), "", [("wrote", {"path": "a"})])
    invalid = {"role": "assistant", "content": "", "tool_calls": [called(first.id, "invalid", '{"error": "unknown"}')]}
    wire.send(body(*start, invalid, result(first.id, "no such tool")), "Sorry.")
    assert told(wire.agent)[1:] == [
        ("assistant", 'wrote({"path": "a"})'),
        ("tool", "no such tool"),
        ("assistant", "Sorry."),
    ]


def test_codex_says_its_first_prompt_again_after_a_compaction_but_graders_hear_it_once() -> None:
    wire = Wire(dialect=responses)
    tools = [{"type": "function", "name": "exec_command", "parameters": {"type": "object"}}]

    def item(role: str, text: str) -> dict[str, object]:
        kind = "output_text" if role == "assistant" else "input_text"
        return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}

    base = [item("developer", "You are Codex."), item("user", "<environment/>"), item("user", "Write hi.")]
    first = wire.send({"model": "policy", "input": base, "tools": tools}, "Working.")
    checkpoint = item("user", "You are performing a CONTEXT CHECKPOINT COMPACTION. Summarize.")
    wire.send({"model": "policy", "input": [*base, item("assistant", first.text), checkpoint]}, "Summary.")
    wire.send({"model": "policy", "input": [*base, item("user", "Summary: working.")], "tools": tools}, "Done.")
    assert told(wire.agent) == [
        ("user", "<environment/>"),
        ("user", "Write hi."),
        ("assistant", "Working."),
        ("user", "Summary: working."),
        ("assistant", "Done."),
    ]


def test_gemini_turns_are_told_with_their_results() -> None:
    wire = Wire(dialect=gemini)
    first = wire.send(gemini_body(content("user", {"text": "Write hi."})), "", [("run", {"a": 1})])
    answer = {"functionResponse": {"id": first.id, "name": "run", "response": {"output": "done"}}}
    call = {"functionCall": {"id": first.id, "name": "run", "args": {"a": 1}}}
    wire.send(
        gemini_body(content("user", {"text": "Write hi."}), content("model", call), content("user", answer)), "Done."
    )
    roles = [role for role, _ in told(wire.agent)]
    assert roles == ["user", "assistant", "tool", "assistant"]
    assert "done" in told(wire.agent)[2][1]


# ---- in the shape that checkers read


def test_a_transcript_has_the_shape_of_openclaws_session_files() -> None:
    spoken = [
        Message("user", "Write hi."),
        Message("assistant", "Sure.", "Easy.", (ToolCall("call1", "Write", '{"path": "a"}'),)),
        Message("tool", "done", tool_call_id="call1"),
        Message("assistant", "Done."),
    ]
    assert conversation_to_transcript(spoken) == [
        {"type": "message", "message": {"role": "user", "content": [{"type": "text", "text": "Write hi."}]}},
        {
            "type": "message",
            "message": {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Easy."},
                    {"type": "text", "text": "Sure."},
                    {"type": "toolCall", "id": "call1", "name": "Write", "arguments": {"path": "a"}},
                ],
            },
        },
        {
            "type": "message",
            "message": {
                "role": "toolResult",
                "toolCallId": "call1",
                "toolName": "Write",
                "content": [{"type": "text", "text": "done"}],
            },
        },
        {"type": "message", "message": {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}},
    ]


@pytest.mark.parametrize(
    ("text", "value"), [("", {}), ('{"a": [1]}', {"a": [1]}), ("{oops", {"raw": "{oops"}), ("[1]", {"raw": "[1]"})]
)
def test_arguments_are_always_an_object(text: str, value: object) -> None:
    (line,) = conversation_to_transcript([Message("assistant", tool_calls=(ToolCall("c", "t", text),))])
    assert isinstance(line, dict)
    entry = line["message"]
    assert isinstance(entry, dict)
    assert entry["content"] == [{"type": "toolCall", "id": "c", "name": "t", "arguments": value}]
