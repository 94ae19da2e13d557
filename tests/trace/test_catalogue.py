"""The catalogue of what real harnesses do to their histories, each entry in the shape it has on the wire.

What is only spelled differently is spliced by its sampled ids; what really differs is a named drift; what the harness
threw away is dead; and the lineage survives all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from wire_talk import (
    Body,
    Sent,
    Wire,
    block,
    body,
    called,
    claude,
    content,
    decoded,
    drifts,
    echo,
    gemini_body,
    goes_on,
    holds_reply,
    kept,
    kinds,
    result,
    said,
    states,
    tool_result,
    used,
)

from clawgym_env.proxy import gemini, messages, responses
from clawgym_env.trace.prefix_tree import PrefixTree, Selection
from harness_adapters.claude_code import OFF_SWITCHES, ClaudeCodeHarness
from harness_adapters.openclaw import OpenClawHarness

SYSTEM = said("system", "You are an agent.")
TASK = said("user", "Write hello.txt.")
HI = {"path": "hello.txt", "content": "hello"}
WRITE = [("write", HI)]
BROKEN = '{"name": "write", "arguments": {"path": "hello.txt", "content": '

# ---- 1. OpenClaw's transient tail


def tail(sessions: str) -> Body:
    text = (
        f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>\nActive exec sessions: {sessions}\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"
    )
    return said("user", [{"type": "text", "text": text}])


def test_openclaws_moving_tail_branches_tokens_and_not_the_lineage() -> None:
    wire = Wire(adapter=OpenClawHarness(api="chat"))
    first = wire.send(body(SYSTEM, TASK, tail("none")), "Writing.", WRITE)
    history = [SYSTEM, TASK, echo(first), result(first.id, "ok")]
    second = wire.send(body(*history, tail("one")), "Checking.", [("bash", {"command": "cat hello.txt"})])
    history += [echo(second), result(second.id, "hello")]
    wire.send(body(*history, tail("none")), "Done.")
    tree = wire.tree()
    assert kept(tree) == [(0, 1, 2)]
    assert drifts(tree) == [None] * 3
    assert all(decoded(tree, at).count("BEGIN_OPENCLAW") == 1 for at in range(3)), "each prompt as it was sent"
    assert holds_reply(tree, 1, 0)
    assert holds_reply(tree, 2, 0)
    assert holds_reply(tree, 2, 1)
    assert len(tree.rows()) == 3, "each reply is trained in the context it was sampled in"
    assert sum(int(row.loss_mask.sum()) for row in tree.rows()) == tree.num_completion_tokens


@pytest.mark.parametrize("api", ["responses", "chat"])
def test_a_tail_that_stays_is_simply_history(api: str) -> None:
    """As on the Responses API, even if it is declared to be transient."""
    wire = Wire(adapter=OpenClawHarness(api=api))
    first = wire.send(body(SYSTEM, TASK, tail("none")), "Writing.", WRITE)
    wire.send(body(SYSTEM, TASK, tail("none"), echo(first), result(first.id, "ok")), "Done.")
    assert goes_on(wire.tree(), 0, 1)


# ---- 2. altered ids


@pytest.mark.parametrize(
    "alter",
    [
        lambda name: re.sub("[^A-Za-z0-9]", "", name),
        lambda name: f"call_{name}",
        lambda name: f"toolu_{name}".replace("_", ""),
        lambda name: "",
    ],
)
def test_a_reply_is_known_whatever_became_of_its_ids(alter: Callable[[str], str]) -> None:
    wire = Wire()
    first = wire.send(body(SYSTEM, TASK), "Both.", [*WRITE, ("bash", {"command": "ls"})])
    ids = [alter(call.id) for call in first.tool_calls]
    calls = [called(name, call.name, call.arguments) for name, call in zip(ids, first.tool_calls, strict=True)]
    reply = said("assistant", "Both.", tool_calls=calls)
    wire.send(body(SYSTEM, TASK, reply, result(ids[0], "ok"), result(ids[1], "hello.txt")), "Done.")
    assert goes_on(wire.tree(), 0, 1)


# ---- 3. retries that are worded anew


def test_a_retry_with_a_rewritten_task_leaves_the_reply_that_never_arrived_behind() -> None:
    wire = Wire(adapter=OpenClawHarness(api="chat"))
    wire.send(body(SYSTEM, TASK, tail("none")), "Writing.", WRITE, delivered=False)
    again = said("user", "[Queued user message from a previous active turn.]\nWrite hello.txt.\n\nContinue.")
    second = wire.send(body(SYSTEM, again, tail("none")), "Writing.", WRITE)
    wire.send(body(SYSTEM, again, echo(second), result(second.id, "ok"), tail("none")), "Done.")
    tree = wire.tree()
    assert states(tree) == ["undelivered", "live", "live"]
    assert kept(tree) == [(1, 2)]
    assert tree.buckets(Selection(dead="train"))["undelivered"] == len(tree[0].token_ids), "never trained"


def test_a_task_rewritten_in_mid_run_keeps_the_lineage_and_every_sampled_id() -> None:
    wire = Wire()
    first = wire.send(body(SYSTEM, TASK), "Writing.", WRITE)
    again = said("user", "[Queued user message from a previous active turn.]\nWrite hello.txt.")
    wire.send(body(SYSTEM, again, echo(first), result(first.id, "ok")), "Done.")
    tree = wire.tree()
    assert tree[1].lineage_parent == 0
    assert drifts(tree) == [None, "history_rewritten"]
    assert holds_reply(tree, 1, 0)
    assert kept(tree) == [(0, 1)]


# ---- 4. stamps


def test_a_minute_stamp_does_not_tell_two_rollouts_apart() -> None:
    prompts = []
    for minute in ("20:03", "20:04"):
        wire = Wire(adapter=OpenClawHarness(api="chat"))
        wire.send(body(SYSTEM, said("user", f"[Sun 2026-11-29 {minute} UTC] Write hello.txt."), tail("none")), "ok")
        prompts.append(wire.tree().prompt(0).tolist())
    assert prompts[0] == prompts[1]


# ---- 5. cache_control moves, and text is a list here and a string there


def test_claude_codes_cache_marks_and_flips_between_list_and_string_change_nothing() -> None:
    wire = Wire(messages)
    first = wire.send(claude(said("user", [block("Write hello.txt.", cached=True)])), "Writing.", [("Write", HI)])
    answered = said("user", [tool_result(first.id, "ok", cached=True)])
    second = wire.send(
        claude(said("user", "Write hello.txt."), used(first), answered), "Checking.", [("Bash", {"command": "ls"})]
    )
    later = said("user", [tool_result(first.id, [block("ok")])])
    last = said("user", [tool_result(second.id, "hello.txt", cached=True)])
    wire.send(claude(said("user", "Write hello.txt."), used(first), later, used(second), last), "Done.")
    assert goes_on(wire.tree(), 0, 1, 2)


# ---- 6. system messages in mid-conversation, and reminders put behind results


def test_system_messages_between_the_turns_and_reminders_are_history_like_any_other() -> None:
    wire = Wire(messages)
    task, place = said("user", "Write hello.txt."), said("system", [block("Today is Monday.", cached=True)])
    first = wire.send(claude(task, place), "Writing.", [("Write", HI)])
    reminded = said("user", [tool_result(first.id, "ok"), block("<system-reminder>9000 tokens left</system-reminder>")])
    history = [task, said("system", "Today is Monday."), used(first), reminded]
    second = wire.send(claude(*history, said("system", "A tool has been added.")), "Yes.")
    again = said("assistant", [block(second.text)])
    wire.send(claude(*history, said("system", "A tool has been added."), again, said("user", "Thanks.")), "Bye.")
    tree = wire.tree()
    assert goes_on(tree, 0, 1, 2)
    assert decoded(tree, 0).count("<|im_start|>system") == 2


# ---- 7. the billing header


def test_claude_codes_billing_header_is_switched_off_and_costs_the_tokens_only_where_it_is_not() -> None:
    assert OFF_SWITCHES["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    wire = Wire(messages, ClaudeCodeHarness())
    task = said("user", "Write hello.txt.")
    system = [block("x-anthropic-billing-header: cc_version=2.1.332.47d;"), block("You are an agent.")]
    first = wire.send(claude(task, system=system), "Writing.", [("Write", HI)])
    answered = said("user", [tool_result(first.id, "ok")])
    changed = [block("x-anthropic-billing-header: cc_version=2.1.332.0ab;"), block("You are an agent.")]
    wire.send(claude(task, used(first), answered, system=changed), "Done.")
    tree = wire.tree()
    assert drifts(tree) == [None, "system_changed"]
    assert kinds(tree) == ["main", "main"]
    assert holds_reply(tree, 1, 0)
    assert kept(tree) == [(0, 1)]


# ---- 8. dropped and merged replies


def test_mini_swe_agent_drops_the_replies_it_rejects_at_the_start_and_later() -> None:
    wire = Wire()
    wire.send(body(SYSTEM, TASK), "I shall write it.")
    history = [SYSTEM, TASK, said("user", "No tool call.")]
    good = wire.send(body(*history), "Writing.", WRITE)
    history += [echo(good), result(good.id, "ok")]
    wire.send(body(*history), "Broken.", raw_call=BROKEN)
    history.append(said("user", "The arguments are no JSON."))
    wire.send(body(*history), "", [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})])
    tree = wire.tree()
    assert states(tree) == ["dead", "live", "dead", "live"]
    assert kept(tree) == [(1, 3)]
    assert drifts(tree) == [None] * 4
    assert tree.buckets()["dead"] == len(tree[0].token_ids) + len(tree[2].token_ids)
    assert tree.buckets(Selection(dead="train"))["trained"] == tree.num_completion_tokens, "its negative gradient"


def test_the_empty_message_that_opencode_puts_in_after_a_dropped_stream_is_a_foreign_reply() -> None:
    wire = Wire()
    first = wire.send(body(SYSTEM, TASK), "Writing.", WRITE)
    history = [SYSTEM, TASK, echo(first), result(first.id, "ok"), said("assistant", ""), said("user", "Go on.")]
    wire.send(body(*history), "Done.")
    tree = wire.tree()
    assert tree[1].lineage_parent == 0
    assert drifts(tree) == [None, "foreign_reply"]
    assert kept(tree) == [(0, 1)]


def test_qwen_codes_merged_parts_are_one_lineage_and_the_part_that_was_cut_off_is_never_trained() -> None:
    wire = Wire()
    wire.send(body(SYSTEM, TASK), "I will write it, then check it.", delivered=False)
    resumed = wire.send(body(SYSTEM, TASK, said("assistant", "I will"), said("user", "Resume.")), " write it.", WRITE)
    merged = echo(resumed) | {"content": "I will write it."}
    wire.send(body(SYSTEM, TASK, merged, result(resumed.id, "ok")), "Done.")
    tree = wire.tree()
    assert [call.lineage_parent for call in tree] == [None, 0, 1]
    assert drifts(tree) == [None, "reply_rewritten", "reply_rewritten"]
    assert states(tree) == ["undelivered", "live", "live"]
    assert tree.buckets()["trained"] == len(tree[1].token_ids) + len(tree[2].token_ids)


# ---- 9. malformed tool calls


def claude_unparsed(sent: Sent) -> Body:
    raw = sent.tool_calls[0].arguments
    return used(sent, __unparsedToolInput={"raw": raw, "len": len(raw)})


def pi_emptied(sent: Sent) -> Body:
    return said("assistant", sent.text, tool_calls=[called(sent.id, "write", "{}")])


def opencode_renamed(sent: Sent) -> Body:
    arguments = json.dumps({"tool": "write", "error": "Invalid input"})
    return said("assistant", sent.text, tool_calls=[called(sent.id, "invalid", arguments)])


def nanobot_repaired(sent: Sent) -> Body:
    arguments = json.dumps({"path": "hello.txt", "content": ""})
    return said("assistant", sent.text, tool_calls=[called(sent.id, "write", arguments)])


def verbatim(sent: Sent) -> Body:
    return said("assistant", sent.text, tool_calls=[called(sent.id, "write", sent.tool_calls[0].arguments)])


@pytest.mark.parametrize(
    ("kept_as", "drift"),
    [
        (claude_unparsed, "reply_rewritten"),
        (pi_emptied, "reply_rewritten"),
        (opencode_renamed, "reply_rewritten"),
        (nanobot_repaired, "reply_rewritten"),
        (verbatim, None),
    ],
)
def test_broken_arguments_come_back_in_each_harnesss_own_way(
    kept_as: Callable[[Sent], Body], drift: str | None
) -> None:
    """Claude Code wraps them, pi empties them, opencode renames the call, nanobot repairs it, OpenHands keeps all."""
    native = kept_as is claude_unparsed
    wire = Wire(messages) if native else Wire()
    task = [said("user", "Write hello.txt.")]
    make = claude if native else body
    first = wire.send(make(*task), "Writing.", raw_call=BROKEN)
    complaint = "The arguments are no JSON."
    answered = said("user", [tool_result(first.id, complaint)]) if native else result(first.id, complaint)
    again = wire.send(make(*task, kept_as(first), answered), "Again.", [("Write" if native else "write", HI)])
    tree = wire.tree()
    assert tree[1].lineage_parent == 0
    assert drifts(tree) == [None, drift]
    assert states(tree) == ["live", "live"]
    assert holds_reply(tree, 1, 0) == (drift is None), "what the harness made up is context, never the sampled ids"
    assert tree.buckets()["trained"] == len(tree[0].token_ids) + len(again.call.token_ids)


def test_codex_sends_broken_arguments_back_to_the_letter() -> None:
    wire = Wire(responses)
    tools = [{"type": "function", "name": "write", "parameters": {"type": "object"}}]
    task = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Write hello.txt."}]}
    first = wire.send({"model": "policy", "input": [task], "tools": tools}, "Writing.", raw_call=BROKEN)
    call = first.tool_calls[0]
    items = [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": first.text}]},
        {"type": "function_call", "name": call.name, "call_id": call.id, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.id, "output": "failed to parse"},
    ]
    wire.send({"model": "policy", "input": [task, *items], "tools": tools}, "Done.")
    assert goes_on(wire.tree(), 0, 1)


@pytest.mark.parametrize("budget", [None, 64000])
def test_asking_again_because_of_a_broken_call_makes_the_first_a_retry(budget: int | None) -> None:
    """hermes sends the identical request, Qwen Code the same with a larger budget."""
    wire = Wire()
    wire.send(body(SYSTEM, TASK, max_tokens=32000), "Writing.", raw_call=BROKEN)
    wire.send(body(SYSTEM, TASK, max_tokens=budget or 32000), "Writing.", WRITE)
    tree = wire.tree()
    assert states(tree) == ["retry", "live"]
    assert tree[1].prefix_len == tree[0].prompt_len


def test_a_run_that_a_broken_call_ends_keeps_that_call() -> None:
    """OpenClaw aborts; the broken call is then the end of its trajectory."""
    wire = Wire(adapter=OpenClawHarness(api="chat"))
    wire.send(body(SYSTEM, TASK, tail("none")), "Writing.", raw_call=BROKEN)
    assert kept(wire.tree()) == [(0,)]


# ---- 10. empty replies


def hinted(message: Body) -> Body:
    hint = "<system-reminder>\n[Your previous response had no visible output.]\n</system-reminder>"
    return said("user", [block(message["content"]), block(hint)])


def test_claude_codes_hint_inside_the_first_message_is_another_try_at_the_same_conversation() -> None:
    wire = Wire(messages)
    task, place = said("user", "Write hello.txt."), said("system", "Today is Monday.")
    wire.send(claude(task, place), "")
    second = wire.send(claude(hinted(task), place), "Writing.", [("Write", HI)])
    answered = said("user", [tool_result(second.id, "ok")])
    wire.send(claude(hinted(task), place, used(second), answered), "Done.")
    tree = wire.tree()
    assert states(tree) == ["dead", "live", "live"]
    assert kept(tree) == [(1, 2)], "one segment"


def test_gemini_clis_hint_inside_the_first_message_is_one_too() -> None:
    wire = Wire(gemini)
    wire.send(gemini_body(content("user", {"text": "Write hello.txt."})), "")
    wire.send(gemini_body(content("user", {"text": "Write hello.txt."}, {"text": "System: Please continue."})), "Done.")
    assert states(wire.tree()) == ["dead", "live"]


def test_a_hint_in_mid_run_leaves_the_empty_reply_dead_and_the_lineage_whole() -> None:
    wire = Wire(messages)
    task = said("user", "Write hello.txt.")
    first = wire.send(claude(task), "Writing.", [("Write", HI)])
    answered = said("user", [tool_result(first.id, "ok")])
    wire.send(claude(task, used(first), answered), "")
    wire.send(claude(hinted(task), used(first), answered), "Done.")
    tree = wire.tree()
    assert [call.lineage_parent for call in tree] == [None, 0, 0]
    assert drifts(tree) == [None, None, "history_rewritten"]
    assert kept(tree) == [(0, 2)]


@pytest.mark.parametrize(
    ("first_reply", "second"),
    [
        ("Hello.", claude(said("user", "Write hello.txt.\nAnd more."))),
        ("", claude(said("user", "Read hello.txt.\nAnd more."))),
        ("", claude(said("user", "Write hello.txt.\nAnd more."), said("user", "Now."))),
        ("", claude(said("user", "Write hello.txt.\nAnd more."), system="You are a helper.", tools=["Bash"])),
    ],
    ids=["a reply with text", "another beginning", "another message", "another role"],
)
def test_a_task_that_only_begins_alike_is_a_conversation_of_its_own(first_reply: str, second: Body) -> None:
    wire = Wire(messages)
    wire.send(claude(said("user", "Write hello.txt.")), first_reply)
    wire.send(second, "Done.")
    assert states(wire.tree()) == ["live", "live"]


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openclaws_nudge_after_an_empty_reply_goes_on_without_it(api: str) -> None:
    """On the Responses API the nudge stands before a message that stays."""
    wire = Wire(adapter=OpenClawHarness(api="chat") if api == "chat" else None)
    wire.send(body(SYSTEM, TASK, tail("none")), "")
    nudge = said("user", "The previous attempt did not produce a user-visible answer.")
    wire.send(body(SYSTEM, TASK, nudge, tail("none")), "Done.")
    assert states(wire.tree()) == ["dead", "live"]


def test_an_empty_reply_is_asked_for_again_or_accepted() -> None:
    """Qwen Code, Cline and nanobot send the identical request; pi, Codex and opencode end with the empty reply."""
    again = Wire()
    again.send(body(SYSTEM, TASK), "")
    again.send(body(SYSTEM, TASK), "Done.")
    assert states(again.tree()) == ["retry", "live"]
    accepted = Wire()
    accepted.send(body(SYSTEM, TASK), "")
    assert kept(accepted.tree()) == [(0,)]


# ---- 11. the length limit


def test_a_cut_reply_that_stays_is_gone_on_from_and_its_closer_is_not_trained() -> None:
    """Claude Code keeps the part and asks for the rest; nanobot and Cline nudge."""
    wire = Wire(messages)
    task = said("user", "Write hello.txt.")
    cut = wire.send(claude(task), "I will wri", cut=True)
    resume = said("user", "<system-reminder>Output token limit hit. Resume directly.</system-reminder>")
    wire.send({**claude(task, said("assistant", [block(cut.text)]), resume), "max_tokens": 128000}, "te it.")
    tree = wire.tree()
    assert goes_on(tree, 0, 1)
    (row,) = tree.rows()
    end = tree[0].history_len
    assert row.token_ids[end] == 258
    assert not row.loss_mask[end]


def test_a_cut_reply_that_is_asked_for_again_is_a_retry_and_a_dropped_one_is_dead() -> None:
    """Qwen Code raises the budget for the same prompt; mini-swe-agent complains without the reply."""
    wire = Wire()
    wire.send(body(SYSTEM, TASK, max_tokens=32000), "I will wri", cut=True)
    wire.send(body(SYSTEM, TASK, max_tokens=64000), "I will wri", cut=True)
    wire.send(body(SYSTEM, TASK, said("user", "Too long.")), "Short.")
    assert states(wire.tree()) == ["retry", "dead", "live"]


# ---- 12. starved budgets


def test_a_reply_under_a_clamped_budget_is_kept_apart_and_the_run_goes_on_through_it() -> None:
    wire = Wire()
    first = wire.send(body(SYSTEM, TASK, max_completion_tokens=4096), "Writing.", WRITE)
    history = [SYSTEM, TASK, echo(first), result(first.id, "ok")]
    starved = wire.send(body(*history, max_completion_tokens=1), "Y", cut=True)
    wire.send(body(*history, echo(starved), said("user", "And?"), max_completion_tokens=4096), "Yes.")
    tree = wire.tree()
    assert goes_on(tree, 0, 1, 2)
    assert tree.buckets()["starved"] == 1
    assert kept(tree) == [(0, 1, 2)]
    (row,) = tree.rows()
    assert set(row.call_indices[row.loss_mask].tolist()) == {0, 2}


# ---- 13. parallel branches


def test_claude_codes_helpers_run_beside_the_main_agent() -> None:
    wire = Wire(messages, ClaudeCodeHarness())
    task, helper = said("user", "Delegate."), {"X-Claude-Code-Agent-Id": "a1"}
    first = wire.send(claude(task), "Two helpers.", [("Agent", {"prompt": "Count."}), ("Agent", {"prompt": "Count."})])
    subtask, role = said("user", "Count."), {"system": "You are a helper.", "tools": ["Bash"]}
    one = wire.send(claude(subtask, **role), "", [("Bash", {"command": "ls"})], headers=helper)
    two = wire.send(claude(subtask, **role), "", [("Bash", {"command": "ls -a"})], headers=helper)
    launched = [tool_result(call.id, "Async agent launched.") for call in first.tool_calls]
    calls = [
        {"type": "tool_use", "id": c.id, "name": c.name, "input": json.loads(c.arguments)} for c in first.tool_calls
    ]
    told = said("assistant", [block("Two helpers."), *calls])
    main = wire.send(claude(task, told, said("user", launched)), "Waiting.")
    for sub in (two, one):
        answered = said("user", [tool_result(sub.id, "a b")])
        wire.send(claude(subtask, used(sub), answered, **role), "2", headers=helper)
    tree = wire.tree()
    assert kinds(tree) == ["main", "subagent", "subagent", "main", "subagent", "subagent"]
    assert goes_on(tree, 0, main.index)
    assert goes_on(tree, one.index, 5)
    assert goes_on(tree, two.index, 4)
    assert states(tree) == ["live"] * 6, "two helpers with the same task are no retry of each other"
    assert kept(tree) == [(0, 3)]
    assert sorted(kept_subagents(tree)) == [(1, 5), (2, 4)]


def kept_subagents(tree: PrefixTree) -> list[tuple[int, ...]]:
    return [path.calls for path in tree.trajectories(Selection(main="drop", subagent="train"))]


def test_a_title_call_beside_the_first_main_call_is_a_side_call() -> None:
    wire = Wire()
    wire.send(body(said("system", "You are a title generator."), TASK, tools=()), "Hello file")
    wire.send(body(SYSTEM, TASK), "Done.")
    assert kinds(wire.tree()) == ["auxiliary", "main"]


def test_two_warm_ups_with_the_same_words_are_two_side_calls() -> None:
    """Claude Code 2.0 warms up two helpers; they differ in their system prompts only."""
    wire = Wire(messages)
    wire.send(claude(said("user", "Write hello.txt.")), "Done.")
    wire.send(claude(said("user", "Warmup"), system="You search.", tools=[]), "ok")
    wire.send(claude(said("user", "Warmup"), system="You plan.", tools=[]), "ok")
    tree = wire.tree()
    assert kinds(tree) == ["main", "auxiliary", "auxiliary"]
    assert states(tree) == ["live"] * 3


# ---- compaction


def test_claude_code_2_0_summarises_under_another_system_prompt() -> None:
    wire = Wire(messages)
    task = said("user", "Write hello.txt.")
    first = wire.send(claude(task), "Writing.", [("Write", HI)])
    asked = said("user", [tool_result(first.id, "ok"), block("Summarise what was done.")])
    system = "You are a helpful AI assistant tasked with summarizing conversations."
    wire.send(claude(task, used(first), asked, system=system, tools=["Read"]), "A file was written.")
    wire.send(claude(said("user", "This session is being continued. Summary: A file was written.")), "Done.")
    tree = wire.tree()
    assert kinds(tree) == ["main", "compaction", "main"]
    assert kept(tree) == [(0,), (2,)]


def test_the_same_beginning_after_a_compaction_is_a_new_segment() -> None:
    """Two summaries in the same words: what was done after the first is no retry."""
    wire = Wire(messages)
    start = said("user", "This session is being continued. Summary: nothing yet.")
    words = "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Summarise."
    for turn in range(2):
        sent = wire.send(claude(start), "Writing.", [("Write", {"turn": turn})])
        wire.send(claude(start, used(sent), said("user", [tool_result(sent.id, "ok"), block(words)])), "nothing yet.")
    wire.send(claude(start), "Done?")
    wire.send(claude(start), "Done.")
    tree = wire.tree()
    assert kinds(tree) == ["main", "compaction", "main", "compaction", "main", "main"]
    assert states(tree) == ["live"] * 4 + ["retry", "live"]
    assert kept(tree) == [(0,), (2,), (5,)]


# ---- what else becomes of an echo


def test_hermes_sorts_keys_and_drops_reasoning_and_openhands_splits_text_into_parts() -> None:
    wire = Wire()
    first = wire.send(body(SYSTEM, TASK), "Writing.", WRITE, reasoning="A file is needed.")
    sorted_keys = json.dumps(HI, sort_keys=True)
    reply = said(
        "assistant", [{"type": "text", "text": "Writing."}], tool_calls=[called(first.id, "write", sorted_keys)]
    )
    wire.send(body(SYSTEM, TASK, reply, result(first.id, [{"type": "text", "text": "ok"}])), "Done.")
    assert goes_on(wire.tree(), 0, 1)


def test_gemini_cli_makes_up_ids_and_drops_thoughts() -> None:
    wire = Wire(gemini)
    task = content("user", {"text": "Look twice."})
    wire.send(
        gemini_body(task), "Looking.", [("run", {"command": "ls"}), ("run", {"command": "ls -a"})], reasoning="Twice."
    )
    calls = [{"functionCall": {"name": "run", "args": {"command": c}, "id": c}} for c in ("ls", "ls -a")]
    calls[0]["thoughtSignature"] = "skip_thought_signature_validator"
    answers = [{"functionResponse": {"name": "run", "id": c, "response": {"output": "x"}}} for c in ("ls", "ls -a")]
    wire.send(gemini_body(task, content("model", {"text": "Looking."}, *calls), content("user", *answers)), "Done.")
    assert goes_on(wire.tree(), 0, 1)


@pytest.mark.parametrize("flag", [{"is_error": True}, {"is_error": False}, {}])
def test_the_error_flag_of_a_result_is_no_text_and_may_come_and_go(flag: Body) -> None:
    """What went wrong is in the result's own words; a result without any is shown as an error."""
    wire = Wire(messages)
    task = said("user", "Write hello.txt.")
    first = wire.send(claude(task), "Writing.", [("Write", HI)])
    second = wire.send(claude(task, used(first), said("user", [tool_result(first.id, "No space.", **flag)])), "Hm.")
    again = said("assistant", [block(second.text)])
    history = [task, used(first), said("user", [tool_result(first.id, "No space.")]), again, said("user", "Why?")]
    wire.send(claude(*history), "Full.")
    tree = wire.tree()
    assert goes_on(tree, 0, 1, 2)
    bare = Wire(messages)
    sent = bare.send(claude(task), "Writing.", [("Write", HI)])
    bare.send(claude(task, used(sent), said("user", [tool_result(sent.id, "", **flag)])), "Hm.")
    assert ("[error]" in decoded(bare.tree(), 1)) == bool(flag.get("is_error"))
