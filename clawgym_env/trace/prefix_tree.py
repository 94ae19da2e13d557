"""The prefix tree of one rollout: every captured call, and the views learners train on.

Built by `trace.builder` while the rollout runs, frozen when it has settled. Pure: no I/O, no torch.
Invariant: every sampled token of every call is in exactly one bucket (`buckets`), and a trained one is trained once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from clawgym_env.engine.base import ApiUsage, Logprobs, TokenIds
from clawgym_env.messages import Json
from clawgym_env.trace.calls import CallKind, ModelCall, call_from_json, call_to_json

Use = Literal["train", "context", "drop"]

BUCKETS = (
    "trained",
    "context",
    "relayed",
    "dead",
    "retry",
    "undelivered",
    "starved",
    "main",
    "compaction",
    "subagent",
    "auxiliary",
)
"""Where sampled tokens end; relayed ones are an API model's. The last four are calls whose kind is dropped."""


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

    def bucket(self, call: ModelCall) -> str:
        """Return what becomes of the sampled tokens of a call: one of `BUCKETS`."""
        if call.relayed:
            return "relayed"
        use: Use = getattr(self, call.kind)
        if use == "drop":
            return call.kind
        if call.state == "undelivered":
            return "undelivered"
        if call.starved:
            return "starved"
        if call.state in ("dead", "retry"):
            use = self.dead
            if use == "drop":
                return call.state
        return "trained" if use == "train" else "context"


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


def read_tokens(
    calls: Sequence[ModelCall],
    index: int,
    length: int,
    *,
    start: int = 0,
    at_hand: tuple[int, TokenIds] | None = None,
) -> TokenIds:
    """Return ids `start` to `length` of a call's history, gathered from the end of the prefix chain to its start.

    Args:
        at_hand: a call and its whole prompt; the chain is not followed beyond it.
    """
    pieces: list[TokenIds] = []
    at: int | None = index
    end = length
    while at is not None and end > start:
        call = calls[at]
        if end > call.prompt_len:
            pieces.append(call.token_ids[max(start - call.prompt_len, 0) : end - call.prompt_len])
            end = max(call.prompt_len, start)
        if at_hand is not None and at == at_hand[0]:
            pieces.append(at_hand[1][start:end])
            break
        if end > call.prefix_len:
            pieces.append(call.delta_token_ids[max(start - call.prefix_len, 0) : end - call.prefix_len])
        end = min(end, call.prefix_len)
        at = call.prefix_parent
    if not pieces:
        return np.empty(0, dtype=np.int32)
    return np.concatenate(pieces[::-1])


class PrefixTree:
    """Immutable. `len(tree)` is the number of calls; `tree[i]` is a `ModelCall`. Equal trees hold equal calls."""

    def __init__(self, calls: Sequence[ModelCall] = ()) -> None:
        self.calls: tuple[ModelCall, ...] = tuple(calls)

    def __len__(self) -> int:
        return len(self.calls)

    def __getitem__(self, index: int) -> ModelCall:
        return self.calls[index]

    def __iter__(self) -> Iterator[ModelCall]:
        return iter(self.calls)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrefixTree) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(tuple(call.id for call in self.calls))

    def __deepcopy__(self, memo: dict[int, object]) -> PrefixTree:
        return self

    def prompt(self, index: int) -> TokenIds:
        """Return the exact prompt ids of a call, shape [prompt_len]."""
        return read_tokens(self.calls, index, self.calls[index].prompt_len)

    def history(self, index: int) -> TokenIds:
        """Return prompt and reply ids of a call, shape [history_len]."""
        return read_tokens(self.calls, index, self.calls[index].history_len)

    def trajectories(self, selection: Selection = Selection()) -> tuple[Trajectory, ...]:
        """Return the kept lineage paths, in order of their first call."""
        kept = [selection.bucket(call) in ("trained", "context") for call in self.calls]
        gone_on = [False] * len(self.calls)
        for call in reversed(self.calls):
            if call.lineage_parent is not None and (kept[call.index] or gone_on[call.index]):
                gone_on[call.lineage_parent] = True
        paths = [
            Trajectory(self.lineage(call.index), call.kind)
            for call in self.calls
            if kept[call.index] and not gone_on[call.index]
        ]
        return tuple(sorted(paths, key=lambda path: (path.calls[0], path.calls[-1])))

    def lineage(self, index: int) -> tuple[int, ...]:
        """Return the calls the harness went on from, root first, ending with `index`."""
        path: list[int] = []
        at: int | None = index
        while at is not None:
            path.append(at)
            at = self.calls[at].lineage_parent
        return tuple(reversed(path))

    def rows(self, selection: Selection = Selection()) -> tuple[TokenRow, ...]:
        """Return the token paths that cover every trained token once.

        A trained call whose whole history is the beginning of a longer trained path is trained there; any other gets
        a row of its own, so that each is trained in exactly the context it was sampled in.
        """
        trained = [selection.bucket(call) == "trained" and len(call.token_ids) > 0 for call in self.calls]
        inside = self._contained_histories()
        covered = [False] * len(self.calls)
        leaves: list[int] = []
        for index in range(len(self.calls) - 1, -1, -1):
            if not trained[index] or covered[index]:
                continue
            leaves.append(index)
            at: int | None = index
            while at is not None and not covered[at]:
                covered[at] = True
                at = inside[at]
        owned = [False] * len(self.calls)
        rows: list[TokenRow] = []
        for leaf in reversed(leaves):
            members: list[int] = []
            at = leaf
            while at is not None and not owned[at]:
                owned[at] = True
                if trained[at]:
                    members.append(at)
                at = inside[at]
            rows.append(self._row(leaf, members))
        return tuple(rows)

    def buckets(self, selection: Selection = Selection()) -> Mapping[str, int]:
        """Count sampled tokens by what becomes of them: "trained", "context" or the reason they are dropped.

        The counts sum to `num_completion_tokens`; every name of `BUCKETS` is present.
        """
        counts = dict.fromkeys(BUCKETS, 0)
        for call in self.calls:
            counts[selection.bucket(call)] += len(call.token_ids)
        return counts

    def over_branched(self, selection: Selection = Selection()) -> bool:
        """Whether the rollout has more main lineage leaves than `selection.max_leaves`."""
        return self.num_leaves > selection.max_leaves

    @property
    def num_leaves(self) -> int:
        """Main calls that no other main call goes on from, dead and retry ones included."""
        main = {call.index for call in self.calls if call.kind == "main"}
        return len(main - {self.calls[index].lineage_parent for index in main})

    @property
    def relayed(self) -> bool:
        """Whether an API model answered any call: then nothing here can be trained."""
        return any(call.relayed for call in self.calls)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens over all calls, shared ones counted once."""
        return sum(len(call.delta_token_ids) for call in self.calls)

    @property
    def num_completion_tokens(self) -> int:
        """Sampled tokens over all calls."""
        return sum(len(call.token_ids) for call in self.calls)

    @property
    def usage(self) -> ApiUsage:
        """What the calls came to: of a relayed one what the API counted, its whole prompt, shared or not.

        Of calls of a policy of ours it is `num_prompt_tokens` and `num_completion_tokens`.
        """
        counts = [
            call.api_usage or ApiUsage(prompt_tokens=len(call.delta_token_ids), completion_tokens=len(call.token_ids))
            for call in self.calls
        ]
        return ApiUsage(
            prompt_tokens=sum(count.prompt_tokens for count in counts),
            completion_tokens=sum(count.completion_tokens for count in counts),
        )

    @property
    def delivered_fraction(self) -> float:
        """Share of sampled tokens whose reply reached the harness; 1.0 for an empty tree."""
        total = self.num_completion_tokens
        if total == 0:
            return 1.0
        delivered = sum(len(call.token_ids) for call in self.calls if call.timing.delivered_s is not None)
        return delivered / total

    def outline(self, decode: Callable[[Sequence[int]], str] | None = None) -> str:
        """Draw the tree as indented text, one line a call.

        Follows lineage; a line is indented further than its parent's only where the harness went on more than once.
        """
        children: dict[int | None, list[int]] = {}
        for call in self.calls:
            children.setdefault(call.lineage_parent, []).append(call.index)
        lines: list[str] = []
        stack = [(index, 0) for index in reversed(children.get(None, []))]
        while stack:
            index, depth = stack.pop()
            lines.append("  " * depth + self._line(self.calls[index], decode))
            below = children.get(index, [])
            deeper = depth + 1 if len(below) > 1 else depth
            stack.extend((child, deeper) for child in reversed(below))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        """Return a JSON value `from_json` reads back."""
        return {"calls": [call_to_json(call) for call in self.calls]}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> PrefixTree:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the arrays and the prefix chain do not fit together.
        """
        calls = value.get("calls")
        if not isinstance(calls, list):
            raise ValueError(f"Expected a list under 'calls', got {type(calls).__name__}. Write trees with to_json.")
        tree = cls([call_from_json(call) for call in calls])
        tree.validate()
        return tree

    def validate(self) -> None:
        """Check what every reader relies on.

        Raises:
            ValueError: an invariant of `ModelCall` is broken; the message names the call.
        """
        for index, call in enumerate(self.calls):
            call.validate()
            if call.index != index:
                raise ValueError(f"Expected call {index} to have index {index}, got {call.index}.")
            if call.lineage_parent is not None and not 0 <= call.lineage_parent < index:
                raise ValueError(f"Expected an earlier lineage parent of call {index}, got {call.lineage_parent}.")
            if call.prefix_parent is None:
                longest = 0
            elif 0 <= call.prefix_parent < index:
                longest = self.calls[call.prefix_parent].history_len
            else:
                raise ValueError(f"Expected an earlier prefix parent of call {index}, got {call.prefix_parent}.")
            if not 0 <= call.prefix_len <= longest:
                raise ValueError(f"Expected prefix_len of call {index} in [0, {longest}], got {call.prefix_len}.")

    def _contained_histories(self) -> list[int | None]:
        """For each call the nearest other call whose whole history its own history begins with.

        Links of the prefix chain that end inside the parent contain nothing, so a run of them is skipped at once:
        `jump[i]` is the nearest call, from i on upwards, whose link is whole, `cut[i]` the shortest link on the way.
        """
        jump: list[int] = []
        cut: list[int] = []
        inside: list[int | None] = []
        for call in self.calls:
            parent = call.prefix_parent
            if parent is None or call.prefix_len == self.calls[parent].history_len:
                jump.append(call.index)
                cut.append(call.prefix_len)
            else:
                jump.append(jump[parent])
                cut.append(min(call.prefix_len, cut[parent]))
            inside.append(self._first_contained(call.index, jump, cut))
        return inside

    def _first_contained(self, index: int, jump: list[int], cut: list[int]) -> int | None:
        shared = cut[index]
        at = jump[index]
        while shared > 0:
            parent = self.calls[at].prefix_parent
            if parent is None:
                return None
            if self.calls[parent].history_len <= shared:
                return parent
            shared = min(shared, cut[parent])
            at = jump[parent]
        return None

    def _row(self, leaf: int, members: Sequence[int]) -> TokenRow:
        token_ids = self.history(leaf)
        length = len(token_ids)
        row = TokenRow(
            token_ids=token_ids,
            loss_mask=np.zeros(length, dtype=np.bool_),
            logprobs=np.zeros(length, dtype=np.float32),
            policy_versions=np.full(length, -1, dtype=np.int32),
            temperatures=np.ones(length, dtype=np.float32),
            call_indices=np.full(length, -1, dtype=np.int32),
        )
        for index in members:
            call = self.calls[index]
            start = call.prompt_len
            sampled = slice(start, call.history_len)
            row.loss_mask[sampled] = True
            row.logprobs[sampled] = call.logprobs
            row.temperatures[sampled] = call.sampling.temperature
            row.call_indices[sampled] = index
            for span in call.policy_versions:
                row.policy_versions[start + span.start : start + span.end] = span.version
        return row

    def _line(self, call: ModelCall, decode: Callable[[Sequence[int]], str] | None) -> str:
        length = f"{call.prompt_len}+{len(call.token_ids)}"
        if call.api_usage is not None:
            length = f"{call.api_usage.prompt_tokens}+{call.api_usage.completion_tokens} relayed"
        words = [
            f"#{call.index}",
            call.kind if call.state == "live" else f"{call.kind}/{call.state}",
            length,
            call.finish_reason,
        ]
        if call.starved:
            words.append("starved")
        if call.drift_reason is not None:
            words.append(f"[{call.drift_reason}]")
        if decode is not None:
            text = " ".join(decode(call.token_ids.tolist()).split())
            words.append(text if len(text) <= 80 else text[:79] + "…")
        return " ".join(words)
