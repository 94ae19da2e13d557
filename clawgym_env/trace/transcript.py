"""What the matcher needs to know of a conversation, made once per message.

Harnesses send the whole history with every call. `Transcripts` keeps the latest conversations of a rollout and takes
over what a new request shares with one of them, so that a turn costs its new messages and a comparison of the old.
Invariant: what is taken over equals what would be made afresh, because messages count as shared only when every text
in them is the same to the letter; and memory is bounded by the text of `KEPT` conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Generic, TypeVar

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

S = TypeVar("S")
T = TypeVar("T")

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


class Latest(Generic[T]):
    """What is kept of the latest conversations of one rollout: of each what was made of its latest request.

    Thread-safe: of two at once one may be forgotten, never mixed up.
    """

    def __init__(self) -> None:
        self._kept: tuple[T, ...] = ()

    def nearest(self, in_common: Callable[[T], int]) -> tuple[T | None, int]:
        """Return what has most in common with a request, and how much; None and 0 when nothing has anything."""
        before, shared = None, 0
        for kept in self._kept:
            length = in_common(kept)
            if length > shared:
                before, shared = kept, length
        return before, shared

    def find(self, is_it: Callable[[T], bool]) -> T | None:
        """Return what answers to a description, None without one."""
        return next(filter(is_it, self._kept), None)

    def keep(self, made: T, before: T | None, *, gone_on: bool) -> None:
        """Keep what was made, in place of `before` where its conversation has gone on."""
        self._kept = (made, *[kept for kept in self._kept if kept is not before or not gone_on][: KEPT - 1])


class Transcripts:
    """The latest conversations of one rollout. Thread-safe."""

    def __init__(self) -> None:
        self._latest: Latest[Transcript] = Latest()

    def of(self, request: ChatRequest) -> Transcript:
        """Return the transcript of a request; its messages are equal to the request's."""
        before, shared = self._latest.nearest(lambda known: shared_length(known.messages, request.messages))
        if before is not None and before.messages is request.messages and before.offered is request.tools:
            return before
        transcript = transcribe(request, before, shared)
        self._latest.keep(transcript, before, gone_on=before is not None and shared > len(before.messages) // 2)
        return transcript


def shared_length(one: Sequence[S], other: Sequence[S]) -> int:
    """Return with how many equal items both begin. Slices of them must be of one type."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # most conversations only grow
        return shorter
    for at, (a, b) in enumerate(zip(one, other, strict=False)):
        if a is not b and a != b:
            return at
    return shorter
