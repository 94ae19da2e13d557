"""Finds which stored replies a request holds, and which one the harness went on from.

The builder asks here with every request; `digests` says when two messages are the same. Invariant: a reply is only
ever spliced where its digest, and its reasoning if echoed, are those of what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from clawgym_env.messages import ChatRequest, Completion, Message
from clawgym_env.trace.digests import (
    Digest,
    bare_id,
    chain,
    message_digest,
    reasoning_kept,
    tools_digest,
)
from clawgym_env.trace.latest import Latest, shared_length
from clawgym_env.trace.transcript import Transcript, transcribe


@dataclass(slots=True, eq=False)
class RequestView:
    """A request as the matcher sees it, and what `LineageIndex.place` found."""

    transcript: Transcript
    lasting: int
    """How many messages come before the transient suffix."""
    parent: int | None = None
    position: int = -1
    """Of the parent's reply; -1 without one."""
    drift: str | None = None
    """Why the parent's tokens cannot simply be gone on from."""
    echoes_parent: bool = False
    """Whether the parent's reply stands in the request as it was sampled."""
    new_system: bool = False
    """Whether the system prompt is another than the parent was asked under."""
    known: dict[int, int] = field(default_factory=dict)
    """Position of each assistant message that is a stored reply, to its call."""
    exact: list[Digest] = field(default_factory=list)
    """[i]: of the tools and messages[:i] to the letter, stored replies by call."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return self.transcript.messages

    @property
    def tools(self) -> Digest:
        return self.transcript.tools

    @property
    def role_hash(self) -> str:
        return self.transcript.role_hash

    @property
    def replies(self) -> list[int]:
        """Positions of assistant messages before the transient suffix."""
        return [at for at in self.transcript.replies if at < self.lasting]

    @property
    def last_foreign(self) -> int:
        """Position of the last assistant message that is no stored reply; -1 when all are."""
        return next((at for at in reversed(self.transcript.replies) if at not in self.known), -1)

    def exact_in_common(self, other: RequestView) -> int:
        """Return with how many messages both begin that are the same to the letter, stored replies by call."""
        if self.tools != other.tools:
            return 0
        length = shared_length(self.transcript.spellings, other.transcript.spellings)
        known, others = self.known, other.known
        return next((at for at in self.transcript.replies if at < length and known.get(at) != others.get(at)), length)

    def exact_with_reply(self, call: int) -> Digest:
        """Digest this request and the reply it got."""
        return chain(self.exact[-1], b"call%d" % call)


def view_request(request: ChatRequest, *, transient: int = 0, transcript: Transcript | None = None) -> RequestView:
    """Look at a request before it has a place.

    Args:
        transient: how many trailing messages are no part of its history.
        transcript: of this very request, where it has been made already.
    """
    return RequestView(transcript or transcribe(request), lasting=max(len(request.messages) - transient, 0))


@dataclass(slots=True, eq=False)
class _Asked:
    """What is kept of a committed call to recognise its reply; nothing that grows with its history."""

    parent: int | None
    history: Digest
    answers: Digest
    """Of all replies in its history, its own last."""
    systems: Digest
    tools: Digest
    role_hash: str
    reply: Digest
    reasoning: str | None
    delivered: int = -1
    """Rank in the order of delivery."""


class LineageIndex:
    """Finds which stored replies a request holds, and which one the harness went on from."""

    def __init__(self) -> None:
        self._calls: list[_Asked] = []
        self._by_history: dict[Digest, list[int]] = {}
        """History up to and including a reply, to the calls that gave it."""
        self._by_prompt: dict[Digest, list[int]] = {}
        """History a call was asked with, to those calls."""
        self._by_answers: dict[Digest, list[int]] = {}
        """All replies of a conversation and nothing else, to the calls that gave the last of them."""
        self._by_tool_call: dict[str, int] = {}
        self._mute_opening: list[tuple[int, RequestView]] = []
        """The latest call that opened a conversation and got a reply without text or tool call; at most one."""
        self._deliveries = 0
        self._placed: Latest[RequestView] = Latest()

    def add(self, view: RequestView, completion: Completion) -> None:
        """Remember the next call: how it was asked and what the harness was told."""
        index = len(self._calls)
        reply = message_digest(completion.as_message())
        history = view.transcript.histories[view.lasting]
        asked = _Asked(
            parent=view.parent,
            history=history,
            answers=chain(view.transcript.answers[view.lasting], reply),
            systems=view.transcript.systems[view.lasting],
            tools=view.tools,
            role_hash=view.role_hash,
            reply=reply,
            reasoning=completion.reasoning,
        )
        self._calls.append(asked)
        self._by_prompt.setdefault(history, []).append(index)
        self._by_answers.setdefault(asked.answers, []).append(index)
        # With the transient suffix as well: some stay after all (OpenClaw's does on the Responses API).
        for before in {history, view.transcript.histories[-1]}:
            self._by_history.setdefault(chain(before, reply), []).append(index)
        for call in completion.tool_calls:
            self._by_tool_call[bare_id(call.id)] = index
        if view.parent is None and not completion.content.strip() and not completion.tool_calls:
            self._mute_opening = [(index, view)]

    def mark_delivered(self, index: int) -> None:
        """Rank a call as the latest delivered."""
        self._calls[index].delivered = self._deliveries
        self._deliveries += 1

    def place(self, view: RequestView) -> None:
        """Fill in parent, drift, known replies and exact digests of a view."""
        view.position = self._find_parent(view)
        self._recognise(view)
        if view.parent is not None:
            asked = self._calls[view.parent]
            view.echoes_parent = view.known.get(view.position) == view.parent
            view.new_system = asked.systems != view.transcript.systems[view.position]
            if view.drift is None:
                view.drift = self._drift(view, asked)
        self._digest_exactly(view)

    def _digest_exactly(self, view: RequestView) -> None:
        """Fill in the exact digests, those that a recent request begins with as well taken over from it."""
        before, shared = self._placed.nearest(view.exact_in_common)
        view.exact = exact = [view.tools] if before is None else before.exact[: shared + 1]
        known, spellings = view.known, view.transcript.spellings
        for at in range(shared, len(spellings)):
            exact.append(chain(exact[-1], b"call%d" % known[at] if at in known else spellings[at]))
        self._placed.keep(view, before, gone_on=before is not None and shared > len(before.messages) // 2)

    def reopened(self, view: RequestView) -> int | None:
        """Return the latest call that opened the conversation this request, which has no parent, opens again.

        The same request, or one with more messages but without the reply: mini-swe-agent drops replies it rejects.
        After a reply without any output, also one that says so inside a message: Claude Code and Gemini CLI do.
        """
        if view.parent is not None:
            return None
        histories = view.transcript.histories
        for at in range(view.lasting, 0, -1):
            for index in reversed(self._by_prompt.get(histories[at], ())) if histories[at] else ():
                if self._calls[index].parent is None and self._same_agent(index, view):
                    return index
            if view.messages[at - 1].role == "assistant":
                return None
        for index, mute in self._mute_opening:
            if self._same_agent(index, view) and longer_by_a_hint(mute, view):
                return index
        return None

    def _same_agent(self, index: int, view: RequestView) -> bool:
        """Whether a call has the role of a request; one that offers tools may have another system prompt."""
        asked = self._calls[index]
        return asked.role_hash == view.role_hash or (asked.tools == view.tools != tools_digest(()))

    @staticmethod
    def _drift(view: RequestView, asked: _Asked) -> str | None:
        if not view.echoes_parent:
            return "reasoning_rewritten"
        if asked.tools != view.tools:
            return "tools_changed"
        if view.new_system:
            return "system_changed"
        return "foreign_reply" if view.last_foreign > view.position else None

    def _find_parent(self, view: RequestView) -> int:
        """Set parent and drift; return the position of the parent's reply, -1 without one."""
        for at in reversed(view.replies):
            named = self._named(view.transcript.echoed[at])
            same = self._by_history.get(view.transcript.histories[at + 1])
            if same is not None:
                view.parent = named if named in same else self._latest(same, view)
                return at
            if named is not None and self._calls[named].answers == view.transcript.answers[at + 1]:
                view.parent, view.drift = named, "history_rewritten"
                return at
            asked_alike = self._by_prompt.get(view.transcript.histories[at])
            if asked_alike is not None and view.transcript.histories[at]:
                merged = named is not None and not set(asked_alike).isdisjoint(self._lineage(named))
                # Else of the last try, delivered or not: Qwen Code goes on from the part of a reply that arrived.
                view.parent = named if merged else self._last_try(asked_alike, view)
                view.drift = "reply_rewritten"
                return at
            same_answers = self._by_answers.get(view.transcript.answers[at + 1], ())
            own = [index for index in same_answers if self._calls[index].role_hash == view.role_hash]
            if own:
                view.parent, view.drift = self._latest(own, view), "history_rewritten"
                return at
        return -1

    def _recognise(self, view: RequestView) -> None:
        """Find the stored reply that each assistant message is, preferring those of the parent's own lineage."""
        lineage = set(self._lineage(view.parent))
        for at in view.replies:
            named = self._named(view.transcript.echoed[at])
            if named is not None and self._calls[named].reply == view.transcript.digests[at]:
                call = named
            else:
                same = self._by_history.get(view.transcript.histories[at + 1])
                if same is None:
                    continue
                own = [index for index in same if index in lineage]
                call = own[-1] if own else self._latest(same, view)
            if reasoning_kept(self._calls[call].reasoning, view.messages[at].reasoning):
                view.known[at] = call

    def _lineage(self, call: int | None) -> Iterator[int]:
        """Yield a call and those it goes back to."""
        while call is not None:
            yield call
            call = self._calls[call].parent

    def _named(self, echoed: Sequence[str]) -> int | None:
        """Return the call whose minted tool-call ids a message echoes."""
        for name in echoed:
            index = self._by_tool_call.get(name)
            if index is not None:
                return index
        return None

    def _latest(self, calls: Sequence[int], view: RequestView) -> int:
        """Return the latest delivered call, of the same agent role if there is one."""
        return max(calls, key=lambda i: (self._calls[i].role_hash == view.role_hash, self._calls[i].delivered, i))

    def _last_try(self, calls: Sequence[int], view: RequestView) -> int:
        """Return the call asked last, of the same agent role if there is one."""
        return max(calls, key=lambda i: (self._calls[i].role_hash == view.role_hash, i))


def longer_by_a_hint(mute: RequestView, view: RequestView) -> bool:
    """Whether a request is an earlier one with text put behind that of one user message, or with one more of them."""
    was, now = mute.transcript.digests, view.transcript.digests
    if len(now) == len(was) + 1:
        # Not at the end only: OpenClaw on the Responses API puts it before what it tells of its own state.
        at = next((at for at in range(len(was)) if was[at] != now[at]), len(was))
        return view.messages[at].role == "user" and now[at + 1 :] == was[at:]
    if len(now) != len(was):
        return False
    changed = [at for at in range(len(now)) if was[at] != now[at]]
    if len(changed) != 1:
        return False
    before, after = mute.messages[changed[0]], view.messages[changed[0]]
    return before.role == after.role == "user" and after.content.startswith(before.content)
