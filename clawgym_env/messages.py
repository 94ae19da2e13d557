"""The canonical conversation every wire dialect is translated to and from.

A dialect module turns a request body into a `ChatRequest` and a `Completion` back into a body or a stream of
events; rendering, matching and the prefix tree see these types only and know no dialect.
Invariant: values are immutable, and nothing here depends on how a harness happened to serialise them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, Union

Role = Literal["system", "user", "assistant", "tool"]
Dialect = Literal["chat", "messages", "responses", "gemini"]
FinishReason = Literal["stop", "tool_calls", "length", "abort"]

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]


def well_formed(text: str) -> str:
    """Return text that UTF-8 can carry: halves of surrogate pairs, which JSON escapes can smuggle in, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool invocation by the model."""

    id: str
    """Minted by us for sampled calls: letters and digits only, since some harnesses strip the rest."""
    name: str
    arguments: str
    """JSON text. For an echoed call this is what the harness sent back, possibly re-serialised."""

    def parsed_arguments(self) -> dict[str, Json] | None:
        """Return the arguments as an object, or None when the text is not a JSON object."""
        try:
            value = json.loads(self.arguments) if self.arguments.strip() else {}
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of the conversation. Parts that carry no text (images) are rendered as a short placeholder."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """Set on role "tool": the call this result belongs to."""

    @property
    def num_characters(self) -> int:
        """Length of all its texts."""
        return len(self.content) + len(self.reasoning or "") + sum(len(call.arguments) for call in self.tool_calls)


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool the harness offers to the model."""

    name: str
    description: str
    parameters: Mapping[str, Json]
    """JSON schema of the arguments."""
    kind: Literal["function", "custom"] = "function"
    """custom: a free-form tool of the Responses API, whose input travels as plain text."""
    namespace: str | None = None
    """Responses only: the group the client declared the tool in, which its calls must name."""

    @property
    def num_characters(self) -> int:
        """Length of its texts, about."""
        return len(self.name) + len(self.description) + len(repr(self.parameters))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One model call as the harness asked for it, whatever the dialect."""

    dialect: Dialect
    model: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """Chat only: whether a stream ends with a chunk of token counts."""
    stream_as_array: bool = False
    """Gemini only: whether a stream is one JSON array instead of events."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    client_sampling: Mapping[str, Json] = field(default_factory=dict)
    """temperature, top_p, … as the client sent them: logged, never obeyed."""
    unknown_fields: tuple[str, ...] = ()
    """Names of top-level body fields this project gives no meaning to."""
    rewritten: bool = False
    """Whether the adapter's `rewrite` took a nonce or clock stamp out of it."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The policy's answer to a `ChatRequest`, parsed once from the whole turn."""

    id: str
    model: str
    content: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stop_sequence: str | None = None
    """The client's stop sequence at which `content` was cut; the sampled ids go on beyond it."""

    def as_message(self) -> Message:
        """Return the assistant message a harness would append to its history."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)
