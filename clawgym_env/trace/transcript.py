"""What the matcher needs to know of a conversation, made once per message.

Harnesses send the whole history with every call. `Transcripts` keeps the latest conversations of a rollout and takes
over what a new request shares with one of them, so that a turn costs its new messages and a comparison of the old.
Invariant: what is taken over equals what would be made afresh, because messages count as shared only when every text
in them is the same to the letter; and memory is bounded by the text of `latest.KEPT` conversations.
"""

from __future__ import annotations

import functools
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
from clawgym_env.trace.latest import Latest, shared_length


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
