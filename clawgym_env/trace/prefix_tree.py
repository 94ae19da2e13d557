"""The prefix tree of one rollout: every captured call, and the views learners train on.

Built by `trace.builder` while the rollout runs, frozen when it has settled. Pure: no I/O, no torch.
Invariant: every sampled token of every call is in exactly one bucket (`buckets`), and a trained one is trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from clawgym_env.engine.base import Logprobs, TokenIds
from clawgym_env.messages import Json
from clawgym_env.trace.calls import CallKind, ModelCall

Use = Literal["train", "context", "drop"]


@dataclass(frozen=True, slots=True)
class Selection:
    """Which calls are trained. The default is the paper's: main agent only, longest continuation per segment."""

    main: Use = "train"
    compaction: Use = "drop"
    subagent: Use = "drop"
    auxiliary: Use = "drop"
    dead: Use = "drop"
    """Siblings the harness did not go on from (retries included)."""
    max_leaves: int = 16
    """Lineage leaves of kind main, dead and retry ones included; a rollout with more is over-branched."""


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One kept lineage path, root to leaf."""

    calls: tuple[int, ...]
    kind: CallKind


@dataclass(frozen=True, slots=True, eq=False)
class TokenRow:
    """One root-to-leaf token path, ready to be packed. All arrays have shape [T].

    Over the rows of one rollout every trained token has `loss_mask` True exactly once; a shared one belongs to the
    first row that holds it and is context in the others.
    """

    token_ids: TokenIds
    loss_mask: npt.NDArray[np.bool_]
    logprobs: Logprobs
    """nats under the sampling policy; 0 where not sampled in this row."""
    policy_versions: npt.NDArray[np.int32]
    """-1 where not sampled in this row."""
    temperatures: npt.NDArray[np.float32]
    """Of the call a token was sampled in; 1 elsewhere."""
    call_indices: npt.NDArray[np.int32]
    """The call whose reply a token is; -1 for context."""


class PrefixTree:
    """Immutable. `len(tree)` is the number of calls; `tree[i]` is a `ModelCall`."""

    def __init__(self, calls: Sequence[ModelCall] = ()) -> None:
        self.calls: tuple[ModelCall, ...] = tuple(calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> ModelCall:
        return self.calls[index]

    def prompt(self, index: int) -> TokenIds:
        """Return the exact prompt ids of a call, shape [prompt_len]."""
        raise NotImplementedError

    def history(self, index: int) -> TokenIds:
        """Return prompt and reply ids of a call, shape [history_len]."""
        raise NotImplementedError

    def trajectories(self, selection: Selection = Selection()) -> tuple[Trajectory, ...]:
        """Return the kept lineage paths, in order of their first call."""
        raise NotImplementedError

    def rows(self, selection: Selection = Selection()) -> tuple[TokenRow, ...]:
        """Return the token paths that cover every trained token once."""
        raise NotImplementedError

    def buckets(self, selection: Selection = Selection()) -> Mapping[str, int]:
        """Count sampled tokens by what becomes of them: "trained", "context" or the reason they are dropped.

        The counts sum to `num_completion_tokens`.
        """
        raise NotImplementedError

    def over_branched(self, selection: Selection = Selection()) -> bool:
        """Whether the rollout has more main lineage leaves than `selection.max_leaves`."""
        raise NotImplementedError

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens over all calls, shared ones counted once."""
        return sum(len(call.delta_token_ids) for call in self.calls)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all calls."""
        return sum(len(call.token_ids) for call in self.calls)

    @property
    def delivered_fraction(self) -> float:
        """Share of sampled tokens whose reply reached the harness; 1.0 for an empty tree."""
        raise NotImplementedError

    def outline(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """Draw the tree as indented text, one line a call."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Json]:
        """Return a JSON value `from_json` reads back."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> PrefixTree:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the arrays and the prefix chain do not fit together.
        """
        raise NotImplementedError
