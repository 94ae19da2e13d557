"""Where a harness is known to do something else than a scenario expects, and why that is no fault of the proxy.

One table, data only: the general expectation stands with each scenario in `scenarios`. Invariant: an exception never
touches the invariants (identical tokens, history chain, buckets), only what the harness itself decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from clawgym_env.fidelity.scenarios import Expectation, Scenario

NO_SUBAGENTS = Expectation(skip="has no sub-agents")
NO_COMPACTION = Expectation(skip="does not compact")

EXCEPTIONS: Mapping[str, Mapping[str, Expectation]] = MappingProxyType(
    {
        "mini": {
            "compaction": NO_COMPACTION,
            "sub-agent": NO_SUBAGENTS,
        },
        "pi": {"sub-agent": NO_SUBAGENTS},
        # Sends the same request again with a remark inside the first message, without the empty reply.
        "claude-code": {"empty-reply": Expectation(forks=1)},
    }
)
"""Harness (with options where they matter) to scenario to what is expected there instead."""


def expectation(harness: str, scenario: Scenario) -> Expectation:
    """Return what a harness is held to in a scenario.

    Args:
        harness: a name, options as in "openclaw?api=chat"; an entry with the same options wins over one without.
    """
    for name in (harness, harness.partition("?")[0]):
        found = EXCEPTIONS.get(name, {}).get(scenario.name)
        if found is not None:
            return found
    return scenario.expect
