"""What the matcher needs to know of a conversation, made once per message.

Harnesses send the whole history with every call. `Transcripts` keeps the latest conversations of a rollout and takes
over what a new request shares with one of them, so that a turn costs its new messages and a comparison of the old.
Invariant: what is taken over equals what would be made afresh, because messages count as shared only when every text
in them is the same to the letter; and memory is bounded by the text of `KEPT` conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from clawgym_env.messages import ChatRequest, Message, ToolSpec
from clawgym_env.trace.digests import (
    EMPTY,
    Digest,
    chain,
    echoed_ids,
    message_digest,
    spelling_digest,
    tools_digest,
)

KEPT = 4
"""Conversations: the main agent's and those of sub-agents that run beside it."""


@dataclass(frozen=True, eq=False)
class Transcript:
    """The messages and tools of one request with their digests. Nothing in it is changed once it is made."""

    messages: tuple[Message, ...]
    offered: tuple[ToolSpec, ...]
    digests: list[Digest]
    spellings: list[Digest]
    """[i]: of messages[i] to the letter."""
    echoed: list[tuple[str, ...]]
    """[i]: bare ids of the tool calls in messages[i]."""
    replies: list[int]
    """Positions of assistant messages."""
    histories: list[Digest]
    """[i]: of messages[:i] without system messages; EMPTY while there are none."""
    answers: list[Digest]
    """[i]: of the assistant messages alone in messages[:i]."""
    systems: list[Digest]
    """[i]: of the system messages alone in messages[:i]."""
    letters: list[Digest]
    """[i]: of messages[:i] to the letter, ids included."""
    tools: Digest

    @functools.cached_property
    def role_hash(self) -> str:
        """Hash system prompt and tool names: the agent role."""
        leading = next((at for at, message in enumerate(self.messages) if message.role != "system"), len(self.messages))
        hasher = blake2b(self.systems[leading], digest_size=8)
        for tool in self.offered:
            hasher.update(b"\0" + tool.name.encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    @functools.cached_property
    def request_hash(self) -> str:
        """Hash what the policy is shown: equal hashes are the same request, whatever budget the client allowed."""
        return blake2b(self.tools + b"".join(self.digests), digest_size=16).hexdigest()


def transcribe(request: ChatRequest, before: Transcript | None = None, shared: int = 0) -> Transcript:
    """Digest a request.

    Args:
        before: of another request, from which the first `shared` messages are taken over.
    """
    if before is None:
        before = Transcript((), (), [], [], [], [], [EMPTY], [EMPTY], [EMPTY], [EMPTY], EMPTY)
    new = request.messages[shared:]
    transcript = Transcript(
        messages=before.messages[:shared] + new,
        offered=request.tools,
        digests=before.digests[:shared],
        spellings=before.spellings[:shared],
        echoed=before.echoed[:shared],
        replies=[at for at in before.replies if at < shared],
        histories=before.histories[: shared + 1],
        answers=before.answers[: shared + 1],
        systems=before.systems[: shared + 1],
        letters=before.letters[: shared + 1],
        tools=tools_digest(request.tools),
    )
    for message in new:
        _append(transcript, message)
    return transcript


def _append(transcript: Transcript, message: Message) -> None:
    system, answer = message.role == "system", message.role == "assistant"
    if answer:
        transcript.replies.append(len(transcript.digests))
    digest = message_digest(message)
    spelling = spelling_digest(message, digest)
    ids = "\0".join([message.tool_call_id or "", *(call.id for call in message.tool_calls)])
    histories, answers, systems = transcript.histories, transcript.answers, transcript.systems
    transcript.digests.append(digest)
    transcript.spellings.append(spelling)
    transcript.echoed.append(tuple(echoed_ids(message)))
    histories.append(histories[-1] if system else chain(histories[-1], digest))
    answers.append(chain(answers[-1], digest) if answer else answers[-1])
    systems.append(chain(systems[-1], digest) if system else systems[-1])
    transcript.letters.append(chain(transcript.letters[-1], spelling + ids.encode("utf-8", "surrogatepass")))


class Transcripts:
    """The latest conversations of one rollout. Thread-safe: of two at once one may be forgotten, never mixed up."""

    def __init__(self) -> None:
        self._latest: tuple[Transcript, ...] = ()

    def of(self, request: ChatRequest) -> Transcript:
        """Return the transcript of a request; its messages are equal to the request's."""
        latest = self._latest
        before: Transcript | None = None
        shared = 0
        for known in latest:
            if known.messages is request.messages and known.offered is request.tools:
                return known
            length = shared_length(known.messages, request.messages)
            if length > shared:
                before, shared = known, length
        transcript = transcribe(request, before, shared)
        gone_on = before is not None and shared > len(before.messages) // 2
        others = [known for known in latest if known is not before or not gone_on]
        self._latest = (transcript, *others[: KEPT - 1])
        return transcript


def shared_length(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Return how many messages two conversations begin with alike, to the letter."""
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b and a != b:
            return at
    return min(len(one), len(other))
