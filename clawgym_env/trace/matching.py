"""When two messages are the same, whatever a harness did to their spelling.

The builder finds the parent of a call with these digests. What is equal: tool-call ids altered or dropped, arguments
parsed and written again (spacing, key order, escapes, `1.0` for `1`), white space around a reply, and reasoning that
is left out. What is not: another name, repaired or replaced arguments, other text, other reasoning. Invariant: a
reply is only ever spliced where its digest, and its reasoning if echoed, are those of what was sent.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from clawgym_env.messages import ChatRequest, Completion, Json, Message, ToolCall, ToolSpec, well_formed

Digest = bytes
EMPTY: Digest = b""


@dataclass(slots=True, eq=False)
class RequestView:
    """A request as the matcher sees it, and what `LineageIndex.place` found. One pass over its messages."""

    messages: Sequence[Message]
    lasting: int
    """How many messages come before the transient suffix."""
    digests: list[Digest]
    histories: list[Digest]
    """[i]: of messages[:i] without system messages; EMPTY while there are none."""
    answers: list[Digest]
    """[i]: of the assistant messages alone in messages[:i]."""
    systems: list[Digest]
    """[i]: of the system messages alone in messages[:i]."""
    tools: Digest
    role_hash: str
    request_hash: str
    parent: int | None = None
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
    def replies(self) -> list[int]:
        """Positions of assistant messages before the transient suffix."""
        return [at for at in range(self.lasting) if self.messages[at].role == "assistant"]

    @property
    def last_foreign(self) -> int:
        """Position of the last assistant message that is no stored reply; -1 when all are."""
        for at in range(len(self.messages) - 1, -1, -1):
            if self.messages[at].role == "assistant" and at not in self.known:
                return at
        return -1

    def exact_with_reply(self, call: int) -> Digest:
        """Digest this request and the reply it got."""
        return chain(self.exact[-1], b"call%d" % call)


def view_request(request: ChatRequest, *, transient: int = 0) -> RequestView:
    """Digest a request once. `transient` trailing messages are no part of its history."""
    histories, answers, systems = [EMPTY], [EMPTY], [EMPTY]
    digests = [message_digest(message) for message in request.messages]
    for message, digest in zip(request.messages, digests, strict=True):
        system, answer = message.role == "system", message.role == "assistant"
        histories.append(histories[-1] if system else chain(histories[-1], digest))
        answers.append(chain(answers[-1], digest) if answer else answers[-1])
        systems.append(chain(systems[-1], digest) if system else systems[-1])
    tools = tools_digest(request.tools)
    return RequestView(
        messages=request.messages,
        lasting=max(len(request.messages) - transient, 0),
        digests=digests,
        histories=histories,
        answers=answers,
        systems=systems,
        tools=tools,
        role_hash=role_hash(request),
        request_hash=request_hash(digests, tools),
    )


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
        self._by_tool_call: dict[str, int] = {}
        self._mute_opening: list[tuple[int, RequestView]] = []
        """The latest call that opened a conversation and got a reply without text or tool call; at most one."""
        self._deliveries = 0

    def add(self, view: RequestView, completion: Completion) -> None:
        """Remember the next call: how it was asked and what the harness was told."""
        index = len(self._calls)
        reply = message_digest(completion.as_message())
        history = view.histories[view.lasting]
        asked = _Asked(
            parent=view.parent,
            history=history,
            answers=chain(view.answers[view.lasting], reply),
            systems=view.systems[view.lasting],
            tools=view.tools,
            role_hash=view.role_hash,
            reply=reply,
            reasoning=completion.reasoning,
        )
        self._calls.append(asked)
        self._by_prompt.setdefault(history, []).append(index)
        # With the transient suffix as well: some stay after all (OpenClaw's does on the Responses API).
        for before in {history, view.histories[-1]}:
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
        position = self._find_parent(view)
        self._recognise(view)
        if view.parent is not None:
            asked = self._calls[view.parent]
            view.echoes_parent = view.known.get(position) == view.parent
            view.new_system = asked.systems != view.systems[position]
            if view.drift is None:
                view.drift = self._drift(view, asked, position)
        view.exact = [view.tools]
        for at in range(len(view.messages)):
            view.exact.append(chain(view.exact[-1], self._exact_item(view, at)))

    def reopened(self, view: RequestView) -> int | None:
        """Return an earlier call that opened the conversation this request, which has no parent, opens again.

        The same request, or one with more messages but without the reply: mini-swe-agent drops replies it rejects.
        After a reply without any output, also one that says so inside a message: Claude Code and Gemini CLI do.
        """
        if view.parent is not None:
            return None
        for at in range(view.lasting, 0, -1):
            for index in self._by_prompt.get(view.histories[at], ()) if view.histories[at] else ():
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
    def _drift(view: RequestView, asked: _Asked, position: int) -> str | None:
        if not view.echoes_parent:
            return "reasoning_rewritten"
        if asked.tools != view.tools:
            return "tools_changed"
        if view.new_system:
            return "system_changed"
        return "foreign_reply" if view.last_foreign > position else None

    def _find_parent(self, view: RequestView) -> int:
        """Set parent and drift; return the position of the parent's reply, -1 without one."""
        for at in reversed(view.replies):
            named = self._named(view.messages[at])
            same = self._by_history.get(view.histories[at + 1])
            if same is not None:
                view.parent = named if named in same else self._latest(same, view)
                return at
            if named is not None and self._calls[named].answers == view.answers[at + 1]:
                view.parent, view.drift = named, "history_rewritten"
                return at
            asked_alike = self._by_prompt.get(view.histories[at])
            if asked_alike is not None and view.histories[at]:
                merged = named is not None and not set(asked_alike).isdisjoint(self._lineage(named))
                # Else of the last try, delivered or not: Qwen Code goes on from the part of a reply that arrived.
                view.parent = named if merged else self._last_try(asked_alike, view)
                view.drift = "reply_rewritten"
                return at
        return -1

    def _recognise(self, view: RequestView) -> None:
        """Find the stored reply that each assistant message is, preferring those of the parent's own lineage."""
        lineage = set(self._lineage(view.parent))
        for at in view.replies:
            named = self._named(view.messages[at])
            if named is not None and self._calls[named].reply == view.digests[at]:
                call = named
            else:
                same = self._by_history.get(view.histories[at + 1])
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

    def _named(self, message: Message) -> int | None:
        """Return the call whose minted tool-call ids a message echoes."""
        found = (self._by_tool_call.get(name) for name in echoed_ids(message))
        return next((index for index in found if index is not None), None)

    def _latest(self, calls: Sequence[int], view: RequestView) -> int:
        """Return the latest delivered call, of the same agent role if there is one."""
        return max(calls, key=lambda i: (self._calls[i].role_hash == view.role_hash, self._calls[i].delivered, i))

    def _last_try(self, calls: Sequence[int], view: RequestView) -> int:
        """Return the call asked last, of the same agent role if there is one."""
        return max(calls, key=lambda i: (self._calls[i].role_hash == view.role_hash, i))

    def _exact_item(self, view: RequestView, at: int) -> Digest:
        if at in view.known:
            return b"call%d" % view.known[at]
        message = view.messages[at]
        if message.role != "assistant":
            return view.digests[at]
        spelling = "\0".join([message.content, message.reasoning or "", *(c.arguments for c in message.tool_calls)])
        return chain(view.digests[at], spelling.encode("utf-8", "surrogatepass"))


def longer_by_a_hint(mute: RequestView, view: RequestView) -> bool:
    """Whether a request is an earlier one with text put behind that of one user message."""
    if len(mute.digests) != len(view.digests):
        return False
    changed = [at for at in range(len(view.digests)) if mute.digests[at] != view.digests[at]]
    if len(changed) != 1:
        return False
    before, after = mute.messages[changed[0]], view.messages[changed[0]]
    return before.role == after.role == "user" and after.content.startswith(before.content)


def message_digest(message: Message) -> Digest:
    """Digest what must agree for two messages to be the same: no ids, no reasoning."""
    hasher = blake2b(digest_size=16)
    hasher.update(message.role.encode())
    content = message.content.strip() if message.role == "assistant" else message.content
    for part in (content, *(_call_text(call) for call in message.tool_calls)):
        data = part.encode("utf-8", "surrogatepass")
        hasher.update(b"%d:" % len(data))
        hasher.update(data)
    return hasher.digest()


def chain(key: Digest, item: Digest) -> Digest:
    """Digest a sequence one item longer than the one `key` stands for."""
    return blake2b(key + item, digest_size=16).digest()


def canonical_arguments(arguments: str) -> str:
    """Return one spelling for all spellings of the same JSON; text that is no JSON stays as it is."""
    if not arguments.strip():
        return "{}"
    try:
        value: Json = json.loads(arguments, parse_float=_plain_number)
        # Half a surrogate pair goes out as an escape and comes back as U+FFFD.
        return well_formed(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    except (ValueError, RecursionError):
        return arguments


def bare_id(call_id: str) -> str:
    """Return the letters and digits of an id: OpenClaw sends `call_8ef1` back as `call8ef1`."""
    return "".join(filter(str.isalnum, call_id))


def reasoning_kept(sent: str | None, echoed: str | None) -> bool:
    """Whether an echo's reasoning allows the sampled ids to stand for it.

    Reasoning left out is fine: the policy goes on from what it really thought. Reasoning replaced is not.
    """
    return not (echoed or "").strip() or (echoed or "").strip() == (sent or "").strip()


def tools_digest(tools: Sequence[ToolSpec]) -> Digest:
    """Digest the tool list as it is rendered: order counts."""
    hasher = blake2b(digest_size=16)
    for tool in tools:
        hasher.update(json.dumps([tool.name, tool.description, dict(tool.parameters)]).encode())
    return hasher.digest()


def system_text(messages: Sequence[Message]) -> str:
    """Return the text of the leading system messages."""
    texts: list[str] = []
    for message in messages:
        if message.role != "system":
            break
        texts.append(message.content)
    return "\n".join(texts)


def role_hash(request: ChatRequest) -> str:
    """Hash system prompt and tool names: the agent role."""
    hasher = blake2b(system_text(request.messages).encode("utf-8", "surrogatepass"), digest_size=8)
    for tool in request.tools:
        hasher.update(b"\0" + tool.name.encode("utf-8", "surrogatepass"))
    return hasher.hexdigest()


def request_hash(messages: Sequence[Digest], tools: Digest) -> str:
    """Hash what the policy is shown: equal hashes are the same request, whatever budget the client allowed."""
    return blake2b(tools + b"".join(messages), digest_size=16).hexdigest()


def _call_text(call: ToolCall) -> str:
    return f"{call.name}\0{canonical_arguments(call.arguments)}"


def _plain_number(text: str) -> float:
    """Read whole floats as integers, as JavaScript writes them."""
    value = float(text)
    return int(value) if value.is_integer() else value


def echoed_ids(message: Message) -> Iterator[str]:
    """Return the bare ids of the tool calls a message echoes."""
    return (bare_id(call.id) for call in message.tool_calls if call.id)
