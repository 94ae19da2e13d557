"""The inference engine contract: token ids in, token ids and their log-probabilities out.

The proxy calls `generate` for every model call of every rollout, concurrently, on one event loop; a learner calls
`update_weights` between (or during) them. Invariant: `logprobs[i]` is the log-probability, in nats, under which
`token_ids[i]` was really drawn (temperature applied), and generation ends at the first stop id, which is included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from clawgym_env.errors import EngineError

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.messages import ChatRequest, Message
    from clawgym_env.trace.calls import CallKind
    from clawgym_env.trace.prefix_tree import PrefixTree

TokenIds = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
RoutedExperts = npt.NDArray[np.int16]


class SamplingParams(BaseModel):
    """How tokens are drawn. The policy's values override whatever the harness asks for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 keeps every token."""
    max_tokens: int = Field(default=1024, ge=1)
    """Bound on the sampled tokens of one call."""
    seed: int | None = None
    """Seed of this one call; None draws a fresh one."""
    given: bool = False
    """Nothing was drawn: somebody outside said what the tokens are, and their log-probabilities say nothing."""

    @property
    def trainable(self) -> bool:
        """Whether the returned log-probabilities are those of the full softmax at `temperature`."""
        return not self.given and self.temperature > 0.0 and self.top_p == 1.0 and self.top_k == 0


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Sampled tokens `start` (inclusive) to `end` (exclusive) came from policy `version`."""

    version: int
    start: int
    end: int


class ApiUsage(BaseModel):
    """What an API counted for one call, in tokens of its own."""

    model_config = ConfigDict(frozen=True)

    prompt_tokens: int = Field(default=0, ge=0)
    """Of the whole prompt."""
    completion_tokens: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class RelayedReply:
    """What an API model said, as it said it."""

    message: Message
    """The assistant's; its tool calls have ids that no other call has."""
    usage: ApiUsage


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one call sampled."""

    token_ids: TokenIds
    """Shape [n], the stop id included when `finish_reason` is "stop"."""
    logprobs: Logprobs
    """Shape [n], nats."""
    finish_reason: Literal["stop", "length", "abort"]
    policy_versions: tuple[VersionSpan, ...]
    """Contiguous, covering [0, n)."""
    sampling: SamplingParams | None = None
    """How the tokens were drawn, where not as the engine was asked to draw them."""
    relayed: RelayedReply | None = None
    """Set where an API model answered. Then the ids are a stand-in's, `logprobs` says nothing, and the call is never
    trained."""
    routed_experts: RoutedExperts | None = None
    """Of a mixture of experts: which ones each token was predicted by, shape [n, layers, experts of a token]."""


@runtime_checkable
class Engine(Protocol):
    """What answers model calls. Implementations are shared by all rollouts and safe to call concurrently."""

    @property
    def renderer(self) -> Renderer:
        """The model family's renderer; its stop ids end every generation."""

    @property
    def context_length(self) -> int:
        """Largest number of prompt plus sampled tokens of one call."""

    @property
    def policy_version(self) -> int:
        """Counts weight updates, from 0."""

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Sample one turn. Cancelling the task aborts the sequence and frees its memory.

        Raises:
            EngineError: the engine cannot answer; the rollout ends as `engine_error`.
        """

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Run `apply` while no token is being sampled, count `policy_version` up and return it.

        Running sequences go on under the new version; cached prefixes of the old one are never used again.
        Blocking, and called from the learner's thread.
        """

    async def pause(self) -> None:
        """Stop decoding at the next step boundary; running sequences keep their state."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def close(self) -> None:
        """Release threads, memory and connections. Idempotent."""


@runtime_checkable
class RelayingEngine(Engine, Protocol):
    """An engine that passes conversations on to a model behind an API; its renderer is a stand-in for the unknown one.

    Its generations are `relayed`, and it raises `ContextOverflow` where the API says that a prompt does not fit.
    """

    @property
    def name(self) -> str:
        """What results call it."""

    def estimated_tokens(self, token_ids: Sequence[int] | TokenIds) -> int:
        """Return about how many tokens of the API's the stand-in's ids are."""


@dataclass(frozen=True, slots=True, eq=False)
class CallInHand:
    """The model call that `generate` is to answer, for an engine that must know more of it than its prompt."""

    id: str
    """Of the completion; the tree's call has the same."""
    parent_id: str | None
    """Of the call whose reply the harness went on from; None opens a new conversation."""
    request: ChatRequest
    kind: Callable[[], CallKind]
    """Returns what kind the call is by what is known so far; later calls may still change it."""
    snapshot: Callable[[], PrefixTree]
    """Returns the tree of the calls recorded so far. To be called on the proxy's event loop."""


CALL_IN_HAND: ContextVar[CallInHand] = ContextVar("CALL_IN_HAND")
"""Set by the proxy in the task of each call, before it asks the engine."""


def call_in_hand() -> CallInHand:
    """Return the call that the running task answers.

    Raises:
        EngineError: it answers none.
    """
    try:
        return CALL_IN_HAND.get()
    except LookupError:
        raise EngineError("Expected to be asked by the proxy, in the task of a model call.") from None
