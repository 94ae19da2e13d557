"""`clawgym fidelity`: does every token stay the one the engine saw?"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from clawgym_env.envs.service import DEFAULT_POLICY


@dataclass(frozen=True)
class FidelityArgs:
    """Whom to examine, and in what."""

    harness: str = "mini"
    """Options as in "claude-code?bare"; it must be installed."""
    policy: str = DEFAULT_POLICY
    """Whose tokens: tiny, smollm2, a Hugging Face folder (no weights are loaded), or "bytes", which needs no file."""
    scenario: tuple[str, ...] = ()
    """Only these."""
    sandbox: str = "local"
    report: Path | None = None
    """Write the table, the trees and what the harness printed to this file too."""


def fidelity_command(args: OmitArgPrefixes[FlagCreatePairsOff[FidelityArgs]]) -> int:
    """Run the conformance suite with a harness and a policy's tokens; exit code 1 where a scenario fails."""
    from clawgym_env.fidelity import ScenarioResult, run_fidelity  # the other commands start without

    def progress(result: ScenarioResult) -> None:
        print(f"{result.scenario}: {result.verdict}", file=sys.stderr, flush=True)

    report = run_fidelity(
        args.harness, args.policy, scenarios=args.scenario or None, sandbox=args.sandbox, on_result=progress
    )
    table = report.table()
    print(table)
    if args.report is not None:
        details = (f"\n== {one.scenario}\n{one.outline}\n{one.output}" for one in report.results)
        args.report.write_text("\n".join((table, *details)), encoding="utf-8")
    return 0 if report.passed else 1
