"""One captured model call: the node of the prefix tree.

Made by `trace.builder` when the engine has answered, frozen with the tree. Two relations are kept apart: *lineage*
(which reply the harness went on from) and *token prefix* (ids really shared). Invariant, for every node:
`history(node) = history(prefix_parent)[:prefix_len] + delta_token_ids + token_ids`, and `token_ids` are bit for bit
what the engine sampled. Bytes stored grow with new tokens only.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from clawgym_env.engine.base import ApiUsage, Logprobs, RoutedExperts, SamplingParams, TokenIds, VersionSpan
from clawgym_env.messages import Dialect, FinishReason, Json

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
    api_usage: ApiUsage | None = None
    """Set where an API model answered, with what the API counted. All ids of such a call are a stand-in's, `logprobs`
    says nothing, and it is never trained."""
    routed_experts: RoutedExperts | None = None
    """Of a mixture of experts: which ones each sampled token was predicted by, shape [n, layers, experts of a token].
    The context's are not kept: a call's size is that of its new tokens."""

    @property
    def relayed(self) -> bool:
        """Whether an API model answered it, and no policy of ours."""
        return self.api_usage is not None

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

    def validate(self) -> None:
        """Check what can be checked without the other calls.

        Raises:
            ValueError: an array has the wrong shape or type, or the version spans do not cover the reply.
        """
        arrays: tuple[tuple[str, npt.NDArray[np.generic], type[np.generic]], ...] = (
            ("delta_token_ids", self.delta_token_ids, np.int32),
            ("token_ids", self.token_ids, np.int32),
            ("logprobs", self.logprobs, np.float32),
        )
        for name, array, dtype in arrays:
            if array.ndim != 1 or array.dtype != dtype:
                raise ValueError(
                    f"Expected {name} of call {self.index} to be a vector of {dtype.__name__}, "
                    f"got shape {array.shape} of {array.dtype}."
                )
        if len(self.logprobs) != len(self.token_ids):
            raise ValueError(
                f"Expected one logprob per sampled token of call {self.index}, "
                f"got {len(self.logprobs)} for {len(self.token_ids)}."
            )
        if self.routed_experts is not None and len(self.routed_experts) != len(self.token_ids):
            raise ValueError(
                f"Expected the experts of {len(self.token_ids)} tokens of call {self.index}, "
                f"got {len(self.routed_experts)}."
            )
        end = 0
        for span in self.policy_versions:
            if span.start != end or span.end < span.start:
                raise ValueError(f"Expected contiguous version spans in call {self.index}, got {self.policy_versions}.")
            end = span.end
        if end != len(self.token_ids):
            raise ValueError(
                f"Expected the version spans of call {self.index} to cover {len(self.token_ids)} tokens, got {end}."
            )


_ARRAYS = {"delta_token_ids": "<i4", "token_ids": "<i4", "logprobs": "<f4"}


class _StoredCall(BaseModel):
    """The JSON form of a `ModelCall`. Arrays are little-endian bytes in base64, so nothing is lost in a float."""

    model_config = ConfigDict(extra="forbid")

    id: str
    index: int
    lineage_parent: int | None
    prefix_parent: int | None
    prefix_len: int
    delta_token_ids: str
    token_ids: str
    logprobs: str
    policy_versions: tuple[VersionSpan, ...]
    sampling: SamplingParams
    finish_reason: FinishReason
    kind: CallKind
    state: CallState
    dialect: Dialect
    drift_reason: str | None
    request_hash: str
    role_hash: str
    starved: bool
    timing: CallTiming
    api_usage: ApiUsage | None = None
    routed_experts: str | None = None


def call_to_json(call: ModelCall) -> dict[str, Json]:
    """Return a JSON value that `call_from_json` reads back without loss."""
    values = {name: getattr(call, name) for name in _StoredCall.model_fields if name not in _ARRAYS}
    if call.routed_experts is not None:
        values["routed_experts"] = base64.b64encode(pack_array(call.routed_experts)).decode("ascii")
    packed = {name: _pack(getattr(call, name), dtype) for name, dtype in _ARRAYS.items()}
    stored: dict[str, Json] = _StoredCall.model_construct(None, **values, **packed).model_dump(mode="json")
    return stored


def call_from_json(value: Json) -> ModelCall:
    """Read what `call_to_json` wrote.

    Raises:
        ValueError: a field is missing or has the wrong type.
    """
    stored = _StoredCall.model_validate(value)
    values = {name: getattr(stored, name) for name in _StoredCall.model_fields}
    values.update({name: _unpack(values[name], dtype) for name, dtype in _ARRAYS.items()})
    if stored.routed_experts is not None:
        values["routed_experts"] = unpack_array(base64.b64decode(stored.routed_experts, validate=True))
    return ModelCall(**values)


def pack_array(array: RoutedExperts) -> bytes:
    """Return an array of any shape as a NumPy file."""
    data = io.BytesIO()
    np.save(data, array.astype("<i2", copy=False), allow_pickle=False)
    return data.getvalue()


def unpack_array(data: bytes) -> RoutedExperts:
    """Read what `pack_array` wrote; the array is read-only.

    Raises:
        ValueError: it is no such file.
    """
    array: RoutedExperts = np.load(io.BytesIO(data), allow_pickle=False).astype(np.int16, copy=False)
    array.setflags(write=False)
    return array


def _pack(array: npt.NDArray[np.generic], dtype: str) -> str:
    return base64.b64encode(array.astype(dtype, copy=False).tobytes()).decode("ascii")


def _unpack(text: str, dtype: str) -> npt.NDArray[np.generic]:
    """Return a read-only array in the machine's own byte order."""
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return array.astype(array.dtype.newbyteorder("="), copy=False)
