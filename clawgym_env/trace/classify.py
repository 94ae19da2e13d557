"""What kind of call each one is, and which of them the harness went on from.

Run by the builder over all calls, when the tree is frozen. Kind follows lineage; only calls that open a conversation
are told apart by their role (system prompt and tools). An adapter that knows its product's markers overrides this
per call. Invariant: of all the ways a conversation went on, or was tried to be opened, exactly one is live.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from clawgym_env.messages import ChatRequest, Message
from clawgym_env.trace.calls import CallKind, CallState

COMPACTION_MARKERS = (
    "tasked with summarizing conversations",
    "context summarization a",
    "text only. do not call any tools",
    "create a detailed summary of the conversation",
    "context checkpoint compaction",
)
"""Of Claude Code 2.0, OpenClaw/pi/opencode, Claude Code 2.1, Codex; looked for in lower case."""

AUXILIARY_MARKERS = ("you are a title generator", "pre-compaction memory flush")
"""Of opencode and OpenClaw."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the generic rules know of one call. Indices are those of the tree."""

    lineage_parent: int | None
    segment: int
    """Calls without a lineage parent that re-open the same conversation share it."""
    declared: CallKind | None
    """The adapter's word."""
    marked: CallKind | None
    """By a marker in the text."""
    role_hash: str
    tool_names: tuple[str, ...]
    request_hash: str
    delivered: bool
    echoes_parent: bool
    """The parent's reply stands in the request as it was sampled."""


def worded_kind(text: str) -> CallKind | None:
    """Return the kind that the wording of a system prompt or message gives away."""
    text = text.lower()
    if any(marker in text for marker in COMPACTION_MARKERS):
        return "compaction"
    return "auxiliary" if any(marker in text for marker in AUXILIARY_MARKERS) else None


def marked_kind(
    request: ChatRequest,
    *,
    opens: bool,
    new_system: bool = False,
    worded: Callable[[str], CallKind | None] = worded_kind,
) -> CallKind | None:
    """Return the kind a summariser's or title writer's wording gives away, looking at system and last message only.

    The wording of a task is anybody's, so a call that offers tools and opens a conversation is never marked, nor is
    one with tools by a system prompt that it shares with the call that did.

    Args:
        opens: the call has no lineage parent.
        new_system: its system prompt is not the parent's: Claude Code 2.0 summarises under another one.
        worded: `worded_kind`, or one that remembers long prompts.
    """
    if opens and request.tools:
        return None
    texts = [system_text(request.messages)] if new_system or not request.tools else []
    if request.messages and request.messages[-1].role == "user":
        texts.append(request.messages[-1].content)
    return next((kind for kind in map(worded, texts) if kind is not None), None)


def system_text(messages: Sequence[Message]) -> str:
    """Return the text of the leading system messages."""
    return "\n".join(message.content for message in itertools.takewhile(lambda m: m.role == "system", messages))


def assign_kinds(calls: Sequence[CallFacts]) -> list[CallKind]:
    """Return the kind of every call.

    A conversation's kind is that of its opening call: main for the first role that offers tools (the first role at
    all where none does) and for any that offers the same tools, subagent for others with tools, auxiliary without.
    """
    main = _main_role(calls)
    kinds: list[CallKind] = []
    below: list[CallKind] = []
    for call in calls:
        inherited = below[call.lineage_parent] if call.lineage_parent is not None else _opening_kind(call, main)
        kind = call.declared or call.marked or inherited
        kinds.append(kind)
        # A summary or side call that the conversation goes on from does not change whose conversation it is.
        below.append(inherited if call.lineage_parent is not None and kind in ("compaction", "auxiliary") else kind)
    return kinds


def _main_role(calls: Sequence[CallFacts]) -> CallFacts | None:
    plain = [call for call in calls if call.declared is None and call.marked is None]
    declared = (call for call in calls if call.declared == "main")
    offering = (call for call in plain if call.tool_names)
    return next(declared, None) or next(offering, None) or next(iter(plain), None)


def _opening_kind(call: CallFacts, main: CallFacts | None) -> CallKind:
    if main is None or call.role_hash == main.role_hash:
        return "main"
    if not call.tool_names:
        return "auxiliary"
    return "main" if call.tool_names == main.tool_names else "subagent"


def assign_states(calls: Sequence[CallFacts], kinds: Sequence[CallKind]) -> list[CallState]:
    """Return the state of every call.

    Within a segment the path with most delivered calls is live, of several the latest: what a harness asks for again
    it has given up. Off it, a call is `retry` when the same request was sampled again later, `dead` otherwise. A reply
    that never arrived is `undelivered`, unless the harness went on from all of it (not from a part) all the same.
    """
    parents = [_same_kind_parent(index, calls, kinds) for index in range(len(calls))]
    openings = _openings(calls, kinds)
    gone_on = {parent for parent in parents if parent is not None}
    echoed = {call.lineage_parent for call in calls if call.echoes_parent}
    arrived = [call.delivered or index in echoed for index, call in enumerate(calls)]
    delivered: list[int] = []
    groups: list[Hashable] = []
    for index, call in enumerate(calls):
        parent = parents[index]
        delivered.append(arrived[index] + (0 if parent is None else delivered[parent]))
        below = (kinds[index], "below", call.lineage_parent)
        groups.append(openings.get(index, below) if parent is None else groups[parent])
    best: dict[Hashable, int] = {}
    for index in range(len(calls)):
        group = groups[index]
        if index not in gone_on and (group not in best or delivered[index] >= delivered[best[group]]):
            best[group] = index
    live: set[int] = set()
    for leaf in best.values():
        at: int | None = leaf
        while at is not None:
            live.add(at)
            at = parents[at]
    latest: dict[Hashable, int] = defaultdict(int)
    places = [(groups[index], parents[index], calls[index].request_hash) for index in range(len(calls))]
    for index, place in enumerate(places):
        latest[place] = index
    states: list[CallState] = []
    for index in range(len(calls)):
        if not arrived[index]:
            states.append("undelivered")
        elif index in live:
            states.append("live")
        else:
            states.append("retry" if latest[places[index]] > index else "dead")
    return states


def _same_kind_parent(index: int, calls: Sequence[CallFacts], kinds: Sequence[CallKind]) -> int | None:
    at = calls[index].lineage_parent
    while at is not None and kinds[at] != kinds[index]:
        at = calls[at].lineage_parent
    return at


def _openings(calls: Sequence[CallFacts], kinds: Sequence[CallKind]) -> Mapping[int, Hashable]:
    """For every call that opens a conversation, say which path it competes with to be the live one.

    Of several tries at the same opening the next one that was gone on from counts; two that were gone on from are
    twins (sub-agents with the same task), each with a path of its own.
    """
    tries: dict[Hashable, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        if call.lineage_parent is None:
            tries[kinds[index], call.segment].append(index)
    continued = {call.lineage_parent for call in calls}
    owners: dict[int, Hashable] = {}
    for same in tries.values():
        owner = next((index for index in reversed(same) if index in continued), same[-1])
        for index in reversed(same):
            owner = index if index in continued else owner
            owners[index] = (kinds[index], "opens", owner)
    return owners
