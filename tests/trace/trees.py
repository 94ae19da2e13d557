"""Trees made by hand and at random, for the tests of this folder."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from clawgym_env.engine.base import SamplingParams, VersionSpan
from clawgym_env.trace.calls import CallKind, CallState, CallTiming, ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree


def call(
    index: int,
    delta: Sequence[int],
    reply: Sequence[int],
    *,
    prefix: tuple[int, int] | None = None,
    lineage: int | None = None,
    kind: CallKind = "main",
    state: CallState = "live",
    starved: bool = False,
    delivered: bool = True,
    temperature: float = 1.0,
    call_id: str | None = None,
) -> ModelCall:
    """Make a call whose logprobs are minus a thousandth of its token ids."""
    tokens = np.array(reply, dtype=np.int32)
    middle = len(tokens) // 2
    return ModelCall(
        id=call_id or f"call{index}",
        index=index,
        lineage_parent=lineage,
        prefix_parent=None if prefix is None else prefix[0],
        prefix_len=0 if prefix is None else prefix[1],
        delta_token_ids=np.array(delta, dtype=np.int32),
        token_ids=tokens,
        logprobs=(tokens / -1000).astype(np.float32),
        policy_versions=(VersionSpan(3, 0, middle), VersionSpan(4, middle, len(tokens))),
        sampling=SamplingParams(temperature=temperature),
        finish_reason="stop",
        kind=kind,
        state=state,
        dialect="chat",
        drift_reason=None,
        request_hash=f"request{index}",
        role_hash="role",
        starved=starved,
        timing=CallTiming(0.1, 0.25, 0.3 if delivered else None),
    )


@st.composite
def random_trees(draw: st.DrawFn, *, max_calls: int = 8) -> PrefixTree:
    """Any shape the invariants allow; no token id occurs twice, so equal tokens mean the same place."""
    fresh = itertools.count(1)
    calls: list[ModelCall] = []
    for index in range(draw(st.integers(0, max_calls))):
        prefix: tuple[int, int] | None = None
        if index and draw(st.booleans()):
            parent = draw(st.integers(0, index - 1))
            whole = calls[parent].history_len
            prefix = (parent, draw(st.one_of(st.just(whole), st.integers(0, whole))))
        calls.append(
            call(
                index,
                list(itertools.islice(fresh, draw(st.integers(1, 3)))),
                list(itertools.islice(fresh, draw(st.integers(0, 3)))),
                prefix=prefix,
                lineage=draw(st.none() | st.integers(0, index - 1)) if index else None,
                kind=draw(st.sampled_from(["main", "main", "main", "compaction", "subagent", "auxiliary"])),
                state=draw(st.sampled_from(["live", "live", "live", "dead", "retry", "undelivered"])),
                starved=draw(st.sampled_from([False, False, False, True])),
                delivered=draw(st.booleans()),
                temperature=draw(st.sampled_from([1.0, 0.7])),
            )
        )
    return PrefixTree(calls)
