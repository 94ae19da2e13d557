"""`clawgym rollout`: run a harness on tasks and show what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, arg

from clawgym_env.cli._rollout_args import CommonRolloutArgs
from clawgym_env.envs._face import grade_line
from clawgym_env.envs.sampler import Draw
from clawgym_env.envs.service import RolloutService
from clawgym_env.errors import UsageError
from clawgym_env.grading.base import JudgeUsage
from clawgym_env.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class RolloutArgs(CommonRolloutArgs):
    """What to run, and how far."""

    harness: str = "mini"
    """mini, pi, claude-code, codex, openclaw, mini-swe-agent, qwen-code, opencode, gemini-cli, command, noop or oracle;
    options as in "claude-code?bare"."""
    limit: int = 1
    """How many tasks, from the first on."""
    run_dir: Path | None = None
    """Keep every call and rollout in this folder."""
    verbose: Annotated[bool, arg(aliases=["-v"])] = False
    """Show the tree, and what harness and grader printed."""


def rollout_command(args: OmitArgPrefixes[FlagCreatePairsOff[RolloutArgs]]) -> int:
    """Run a harness on the first tasks and show what came of it; exit code 1 where a rollout has no grade."""
    if args.limit < 1:
        raise UsageError(f"Expected --limit to be at least 1, got {args.limit}. Leave it out for one rollout.")
    service = RolloutService(
        tasks=args.tasks,
        harness=args.harness,
        policy=args.load_policy(),
        engine=args.engine,
        sampling=args.sampling,
        sandbox=args.sandbox,
        judge=args.load_judge(),
        run_dir=args.run_dir,
        max_concurrency=args.max_concurrency,
    )
    try:
        finished = []
        for rollout in service.as_completed(service.request(draw) for draw in _draws(service, args)):
            finished.append(rollout)
            print(report(rollout, verbose=args.verbose), flush=True)
        print(summary(finished))
        return 0 if all(rollout.graded for rollout in finished) else 1
    finally:
        service.close()


def report(rollout: Rollout, *, verbose: bool = False) -> str:
    """Return what a rollout came to, as text.

    Args:
        verbose: with the tree and what harness and grader printed.
    """
    tree, timing, usage = rollout.tree, rollout.timing, rollout.tree.usage
    phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in timing.items() if name != "total")
    lines = [
        f"{rollout.task_id}  {rollout.harness}  {grade_line(rollout)}",
        f"  calls {len(tree)}  kept trajectories {len(tree.trajectories())}  "
        f"tokens {usage.prompt_tokens} prompt + {usage.completion_tokens} sampled  "
        f"time {timing.get('total', 0.0):.1f} s ({phases})",
    ]
    if rollout.exclusion is not None:
        lines.append(f"  excluded from training: {rollout.exclusion}")
    if verbose:
        lines.append(f"  requests with nonces or clock stamps replaced: {rollout.rewritten_calls}")
        lines += _section("tree", tree.outline())
        lines += _section("answer", rollout.response)
        lines += _section(f"harness (exit code {rollout.harness_exit_code})", rollout.harness_output)
        lines += _section("error", rollout.error)
        if rollout.grade is not None:
            lines += _section("grader", rollout.grade.output)
            lines += _section("judge", _cost(rollout.grade.judge_usage))
    return "\n".join(lines)


def summary(rollouts: Sequence[Rollout]) -> str:
    """Return the mean over the graded rollouts, as text."""
    graded = [rollout.reward for rollout in rollouts if rollout.graded]
    mean = f"mean reward {sum(graded) / len(graded):.3f}" if graded else "no grade"
    return f"{len(rollouts)} rollouts, {len(graded)} graded, {mean}"


def _cost(usage: JudgeUsage) -> str:
    """Return what the judge cost; empty where none was asked."""
    if usage == JudgeUsage():
        return ""
    tokens = f"tokens {usage.prompt_tokens} prompt + {usage.completion_tokens} completion"
    return f"calls {usage.calls}, answered before {usage.cached}, {tokens}"


def _draws(service: RolloutService, args: RolloutArgs) -> Iterator[Draw]:
    sampler = service.sampler()
    sampler.reseed(args.seed)
    for index in range(min(args.limit, len(service.tasks))):
        draw = sampler.draw(service.tasks[index].id)
        yield dataclasses.replace(draw, task=draw.task.with_limits(args.limits))


def _section(title: str, text: str) -> list[str]:
    return [f"  -- {title}", *(f"  {line}" for line in text.rstrip().splitlines())] if text.strip() else []
