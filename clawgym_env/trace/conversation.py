"""What the main agent and its user said in a rollout, told once and in order.

The builder keeps what each call added, the session asks for the whole when the tree is settled, graders and judges
read it. Harnesses send the whole history with every call and begin it anew when they compact it. Invariant: every
message stands here once, the agent's as the policy sampled them, and memory grows with new text only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clawgym_env.messages import Json, Message
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.digests import bare_id


@dataclass(frozen=True, slots=True)
class Spoken:
    """What one call added to its conversation."""

    heard: tuple[Message, ...]
    """Of user and tools: what stands behind the reply of the lineage parent; the whole request without one or where the
    history before it is another. What else the harness put there in the agent's name was said by no policy."""
    reply: Message
    segment: int
    """Calls without a lineage parent that re-open the same conversation share it."""
    retells: bool
    """`heard` is of a whole request that goes on from an older conversation, so it repeats what was said there."""


def conversation(calls: Sequence[ModelCall], spoken: Sequence[Spoken]) -> tuple[Message, ...]:
    """Return what the main agent and its user said, over all sessions and compactions.

    Sub-agents, titles, the asking for summaries, what the harness did not go on from and system prompts are left out.
    A summary that takes the place of older messages is a user message: it is what the agent was told. The messages
    that a compaction keeps are not repeated.

    Args:
        calls: of a frozen tree.
        spoken: one for each call.
    """
    answered = _answered(calls)
    unanswered = _unanswered(calls, spoken, answered)
    said: list[Message] = []
    latest = -1
    for index in sorted(answered | unanswered):
        call, words = calls[index], spoken[index]
        heard = list(words.heard)
        between = (other.kind for other in calls[latest + 1 : index])
        if words.retells or (call.lineage_parent is None and "compaction" in between):
            heard = list(_fresh(heard, said))
        else:
            heard[:0] = _results_on_the_way(calls, spoken, call)
        said += heard
        if index in answered:
            said.append(words.reply)
        latest = index
    return tuple(said)


def _answered(calls: Sequence[ModelCall]) -> set[int]:
    """Return the main agent's calls whose reply counts: live ones, and what those go on from, if only from a part."""
    answered: set[int] = set()
    for call in calls:
        at: int | None = call.index if call.kind == "main" and call.state == "live" else None
        while at is not None and at not in answered:
            if calls[at].kind == "main":
                answered.add(at)
            at = calls[at].lineage_parent
    return answered


def _unanswered(calls: Sequence[ModelCall], spoken: Sequence[Spoken], answered: set[int]) -> set[int]:
    """Return the calls whose reply never arrived and that were not tried again with success: of each the last try."""
    places = {(spoken[index].segment, calls[index].lineage_parent) for index in answered}
    latest: dict[tuple[int, int | None], int] = {}
    for call in calls:
        place = (spoken[call.index].segment, call.lineage_parent)
        parent = _main_ancestor(calls, call)
        waits = call.kind == "main" and call.state == "undelivered" and place not in places
        if waits and (parent is None or parent in answered):
            latest[place] = call.index
    return set(latest.values())


def _main_ancestor(calls: Sequence[ModelCall], call: ModelCall) -> int | None:
    at = call.lineage_parent
    while at is not None and calls[at].kind != "main":
        at = calls[at].lineage_parent
    return at


def _results_on_the_way(calls: Sequence[ModelCall], spoken: Sequence[Spoken], call: ModelCall) -> list[Message]:
    """Return the tool results that first stood in a side call which the main agent went on from, oldest first."""
    found: list[Message] = []
    at = call.lineage_parent
    while at is not None and calls[at].kind != "main":
        found[:0] = [message for message in spoken[at].heard if message.role == "tool"]
        at = calls[at].lineage_parent
    return found


def _fresh(heard: Sequence[Message], said: Sequence[Message]) -> Iterator[Message]:
    """Yield what was not said before: a result of a call that had none, else what has no equal.

    Each earlier message stands for one later one. Some products give their calls other ids when they resume.
    """
    ours = {bare_id(call.id) for message in said for call in message.tool_calls}
    answered = {bare_id(message.tool_call_id) for message in said if message.tool_call_id}
    before = Counter((message.role, message.content) for message in said)
    for message in heard:
        call_id = bare_id(message.tool_call_id or "")
        if call_id in ours:
            if call_id not in answered:
                yield message
        elif before[message.role, message.content]:
            before[message.role, message.content] -= 1
        else:
            yield message


def conversation_to_transcript(messages: Sequence[Message]) -> list[Json]:
    """Return a conversation as the lines of an OpenClaw session file, which checkers of several benchmarks read.

    Tools have the names that the harness gave them, whichever it was. Arguments that are no JSON object stand as text
    under the name "raw".
    """
    names = {bare_id(call.id): call.name for message in messages for call in message.tool_calls}
    return [{"type": "message", "message": _entry(message, names)} for message in messages if message.role != "system"]


def _entry(message: Message, names: dict[str, str]) -> dict[str, Json]:
    text: list[Json] = [{"type": "text", "text": message.content}] if message.content else []
    if message.role == "tool":
        call_id = message.tool_call_id or ""
        name = names.get(bare_id(call_id), "")
        return {"role": "toolResult", "toolCallId": call_id, "toolName": name, "content": text}
    if message.role == "user":
        return {"role": "user", "content": text}
    thought: list[Json] = [{"type": "thinking", "thinking": message.reasoning}] if message.reasoning else []
    calls: list[Json] = []
    for call in message.tool_calls:
        arguments = call.parsed_arguments()
        value: Json = {"raw": call.arguments} if arguments is None else arguments
        calls.append({"type": "toolCall", "id": call.id, "name": call.name, "arguments": value})
    return {"role": "assistant", "content": [*thought, *text, *calls]}
