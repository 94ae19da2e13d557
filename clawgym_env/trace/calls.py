"""One captured model call: the node of the prefix tree.

Made by `trace.builder` when the engine has answered, frozen with the tree. Two relations are kept apart: *lineage*
(which reply the harness went on from) and *token prefix* (ids really shared). Invariant, for every node:
`history(node) = history(prefix_parent)[:prefix_len] + delta_token_ids + token_ids`, and `token_ids` are bit for bit
what the engine sampled. Bytes stored grow with new tokens only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from clawgym_env.engine.base import Logprobs, SamplingParams, TokenIds, VersionSpan
from clawgym_env.messages import Dialect, FinishReason

CallKind = Literal["main", "compaction", "subagent", "auxiliary"]
CallState = Literal["live", "dead", "retry", "undelivered"]
"""live: on the longest valid continuation of its segment. dead: a sibling the harness did not go on from.
retry: sampled again for an identical request. undelivered: the reply never fully reached the harness."""


@dataclass(frozen=True, slots=True)
class CallTiming:
    """Seconds since the rollout's first call arrived."""

    arrived_s: float
    generated_s: float
    delivered_s: float | None


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One call of the policy by the harness. Arrays are read-only."""

    id: str
    index: int
    """Position in the order of commit; parents come before children."""
    lineage_parent: int | None
    """Index of the call whose reply the harness went on from; None opens a new conversation."""
    prefix_parent: int | None
    """Index of the call whose token history this prompt begins with."""
    prefix_len: int
    """How many tokens of history(prefix_parent) are shared; may end inside the parent's delta."""
    delta_token_ids: TokenIds
    """The rest of the prompt, shape [d]; context, never trained (spliced replies of other calls included)."""
    token_ids: TokenIds
    """The sampled reply, shape [n]."""
    logprobs: Logprobs
    """Shape [n], nats, of the sampled distribution."""
    policy_versions: tuple[VersionSpan, ...]
    sampling: SamplingParams
    finish_reason: FinishReason
    kind: CallKind
    state: CallState
    dialect: Dialect
    drift_reason: str | None
    """Why the prompt had to be rendered from scratch although a lineage parent exists; None when spliced."""
    request_hash: str
    """Of the canonical request: equal hashes are the same request."""
    role_hash: str
    """Of system prompt and tool names: the agent role."""
    starved: bool
    """The client's own budget was under 16 tokens, so the reply is no fair sample."""
    timing: CallTiming

    @property
    def prompt_len(self) -> int:
        """Number of prompt tokens."""
        return self.prefix_len + len(self.delta_token_ids)

    @property
    def history_len(self) -> int:
        """Number of prompt and sampled tokens."""
        return self.prompt_len + len(self.token_ids)

    @property
    def policy_version(self) -> int:
        """The oldest policy version any sampled token came from (0 for an empty reply)."""
        return min((span.version for span in self.policy_versions), default=0)
