"""`clawgym doctor`: what this machine has for rollouts, what is missing, and the command that mends it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from clawgym_env.cache import cache_dir
from clawgym_env.doctor import Finding, Report, examine
from clawgym_env.envs.service import DEFAULT_POLICY

PRIVATE_DOCKER = "CLAWGYM_DOCKER"
STYLES: Mapping[str, str] = {"ok": "green", "optional": "dim", "warning": "yellow", "problem": "bold red"}
NAME_WIDTH, STATUS_WIDTH = 16, 8


@dataclass(frozen=True)
class DoctorArgs:
    """What is to answer, and how to report."""

    engine: str | None = None
    """Connect to it and see that it answers as it has to: "vllm:URL", "openai:URL#MODEL", an import path."""
    policy: str = DEFAULT_POLICY
    """What answers where no engine is named: tiny, smollm2 or a Hugging Face folder."""
    json: bool = False
    """Print one JSON object: ready, clawgym_version and findings of topic, name, status, found and fix."""


def doctor_command(args: OmitArgPrefixes[FlagCreatePairsOff[DoctorArgs]]) -> int:
    """Say what this machine has and how to get the rest; exit code 1 where rollouts with mini cannot run."""
    cache = cache_dir()
    report = examine(
        cache=cache,
        policy=args.policy,
        engine=args.engine,
        private_docker=Path(os.environ.get(PRIVATE_DOCKER) or cache / "docker"),
    )
    if args.json:
        print(report.model_dump_json(indent=2))
    else:
        _show(report, Console(highlight=False))
    return 0 if report.ready else 1


def _show(report: Report, console: Console) -> None:
    for topic, findings in groupby(report.findings, key=lambda finding: finding.topic):
        console.print(Text(f"\n{topic}", style="bold"))
        for finding in findings:
            for part in _lines(finding):
                console.print(part, soft_wrap=True)
    console.print(Text(f"\n{_verdict(report)}", style="bold"), soft_wrap=True)


def _lines(finding: Finding) -> Iterator[Text | Padding]:
    mark = Text(f"  {finding.status:<{STATUS_WIDTH}}  ", style=STYLES[finding.status])
    yield mark + Text(f"{finding.name:<{NAME_WIDTH}}  {finding.found}")
    if finding.fix:
        yield Text(f"{'':<{STATUS_WIDTH + NAME_WIDTH + 6}}-> {finding.fix}")


def _verdict(report: Report) -> str:
    problems = report.having("problem")
    if not problems:
        return f"ClawGym {report.clawgym_version}: rollouts with the bundled harness run here."
    return (
        f"ClawGym {report.clawgym_version}: rollouts with the bundled harness do not run here yet. "
        f"First: {problems[0].fix or problems[0].found}"
    )
