"""Where a harness is known to do something else than a scenario expects, and why that is no fault of the proxy.

One table, data only: the general expectation stands with each scenario in `scenarios`. Invariant: an exception never
touches the invariants (identical tokens, history chain, buckets), only what the harness itself decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypedDict

from clawgym_env.fidelity.scenarios import Expectation, Scenario


class Change(TypedDict, total=False):
    """Fields of an `Expectation` that are other ones for a harness."""

    files: Mapping[str, str]
    main_calls: int | None
    subagent_calls: int
    forks: int
    drift: frozenset[str]
    skip: str


_NO_SUBAGENTS = Change(skip="has no sub-agents")
_NO_COMPACTION = Change(skip="does not compact")
_ONE_DROPPED = Change(forks=1)

EXCEPTIONS: Mapping[str, Mapping[str, Change]] = MappingProxyType(
    {
        "mini": {"sub-agent": _NO_SUBAGENTS, "compaction": _NO_COMPACTION},
        "pi": {"sub-agent": _NO_SUBAGENTS},
        # Sends the same request again with a remark inside the first message, without the empty reply.
        "claude-code": {"empty-reply": _ONE_DROPPED},
        # Drops every reply it rejects and says why.
        "mini-swe-agent": {
            "sub-agent": _NO_SUBAGENTS,
            "compaction": _NO_COMPACTION,
            "malformed-arguments": _ONE_DROPPED,
            "unknown-tool": _ONE_DROPPED,
            "empty-reply": _ONE_DROPPED,
            "length-stop": _ONE_DROPPED,
        },
        "qwen-code": {
            # The reminders of its first message are missing from the first request after a summary, then come back.
            "compaction": Change(drift=frozenset({"history_rewritten"})),
            # Sends the same request again.
            "empty-reply": _ONE_DROPPED,
        },
        "gemini-cli": {
            # Splits its history before a message of the user only, and a one-shot run has just one.
            "compaction": _NO_COMPACTION,
            # Sends the request again with a remark inside the first message, which is gone from the one after.
            "empty-reply": Change(forks=1, drift=frozenset({"history_rewritten"})),
        },
        # Puts a call of its tool `invalid` in place of one it does not know.
        "opencode": {"unknown-tool": Change(drift=frozenset({"reply_rewritten"}))},
        "openclaw": {
            "sub-agent": Change(skip="has no sub-agents in one-shot runs"),
            # Asks once more: with the same request, with a remark, with other words around the task.
            "malformed-arguments": _ONE_DROPPED,
            "empty-reply": _ONE_DROPPED,
            "hang-up": Change(forks=1, drift=frozenset({"history_rewritten"})),
        },
    }
)
"""Harness (with options where they matter) to scenario to what is expected otherwise there."""


def expectation(harness: str, scenario: Scenario) -> Expectation:
    """Return what a harness is held to in a scenario.

    Args:
        harness: a name, options as in "openclaw?api=chat"; an entry with the same options wins over one without.
    """
    for name in (harness, harness.partition("?")[0]):
        change = EXCEPTIONS.get(name, {}).get(scenario.name)
        if change is not None:
            return dataclasses.replace(scenario.expect, **change)
    return scenario.expect
