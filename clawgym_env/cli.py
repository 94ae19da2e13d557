"""The `clawgym` command: run rollouts or the proxy alone, install harnesses, build policies, check tasks.

Every subcommand is a function whose signature is its command line. What goes wrong on purpose is one line on stderr
and exit code 2; Ctrl-C closes what is open and exits with 130.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pydantic
import tyro
from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

from clawgym_env import registry
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.envs._face import grade_line
from clawgym_env.envs.sampler import Draw, GroupSampler
from clawgym_env.envs.service import DEFAULT_POLICY, DEFAULT_TASKS, RolloutService
from clawgym_env.errors import ClawGymError
from clawgym_env.rollout import Rollout
from clawgym_env.tasks.loading import load_tasks
from clawgym_env.trace.store import RolloutStore

app = tyro.extras.SubcommandApp()

INTERRUPTED = 130


@dataclass(frozen=True)
class RolloutArgs:
    """What to run, and how far."""

    harness: str = "mini"
    """mini, pi, claude-code, openclaw, noop or oracle; options as in "claude-code?bare"."""
    tasks: str = DEFAULT_TASKS
    """A folder of ClawGym tasks, or a name such as "bundled:level=1"."""
    limit: int = 1
    """How many tasks, from the first on."""
    policy: str = DEFAULT_POLICY
    """tiny, smollm2 or a Hugging Face folder."""
    engine: str | None = None
    """"scripted:FILE" or an import path, instead of the policy."""
    sandbox: str = "local"
    max_tokens: int = 1024
    """Sampled tokens of one model call."""
    temperature: float = 1.0
    """Of the sampling, whatever the harness asks for."""
    context_length: int | None = None
    """Stretch or shrink the policy's window, in tokens. A stretched one is for smoke runs: answers get worse."""
    renderer: str | None = None
    """What writes the conversations of a folder that does not say: "chatml" or a family such as "llama-3"."""
    max_calls: int | None = None
    """Model calls of one rollout; the task's own limit where not given."""
    wall_clock: float | None = None
    """Seconds of one rollout's harness; the task's own limit where not given."""
    max_concurrency: int = 1
    """Harnesses alive at once."""
    seed: int = 0
    """Of the sampling."""
    run_dir: Path | None = None
    """Keep every call and rollout in this folder."""
    verbose: Annotated[bool, arg(aliases=["-v"])] = False
    """Show the tree, and what harness and grader printed."""


@app.command(name="rollout")
def rollout_command(args: OmitArgPrefixes[FlagCreatePairsOff[RolloutArgs]]) -> None:
    """Run a harness on the first tasks and show what came of it."""
    policy = args.policy
    if args.engine is None and (args.context_length, args.renderer) != (None, None):
        load_policy = registry.load("clawgym_env.policy:load_policy")
        policy = load_policy(args.policy, cache=cache_dir(), context_length=args.context_length, renderer=args.renderer)
    service = RolloutService(
        tasks=args.tasks,
        harness=args.harness,
        policy=policy if args.engine is None else None,
        engine=args.engine,
        sampling=SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature),
        sandbox=args.sandbox,
        run_dir=args.run_dir,
        max_concurrency=args.max_concurrency,
    )
    try:
        finished = []
        for rollout in service.as_completed(service.request(draw) for draw in _draws(service, args)):
            finished.append(rollout)
            print(report(rollout, verbose=args.verbose), flush=True)
        print(summary(finished))
    finally:
        service.close()


@dataclass(frozen=True)
class ProxyArgs:
    """What answers, and where."""

    engine: str
    """"scripted:FILE", "torch:POLICY" (tiny, smollm2 or a folder) or an import path."""
    port: int = 8080
    """Where harnesses connect; 0 takes a free one."""
    host: str = "127.0.0.1"
    """The address that port is opened on."""
    advertise: str | None = None
    """The host name written into base URLs, where harnesses do not reach us by --host."""
    admin_port: int = 0
    """Of the admin API, on 127.0.0.1; 0 takes a free one."""
    admin_token_file: Path | None = None
    """Its first line is the admin token; without it a random one is printed."""
    max_tokens: int = 1024
    """Sampled tokens of one model call."""
    temperature: float = 1.0
    """Of the sampling, whatever the harness asks for."""
    run_dir: Path | None = None
    """Keep every call in this folder."""


@app.command(name="proxy")
def proxy_command(args: OmitArgPrefixes[FlagCreatePairsOff[ProxyArgs]]) -> None:
    """Run the proxy alone, for a harness that you start yourself: POST /rollouts on its admin port opens one."""
    asyncio.run(_serve_proxy(args))


@app.command(name="install")
def install_command(name: Positional[str]) -> None:
    """Put a harness into the cache, or every one: clawgym install pi|claude-code|…|all.

    Args:
        name: which; options as in "claude-code?version=2.0.76".
    """
    logging.getLogger("harness_adapters").setLevel(logging.INFO)
    everything = [spec for spec in registry.HARNESSES if spec not in registry.NEEDS_OPTIONS]
    for spec in (*everything, *registry.MCP_SERVERS) if name == "all" else (name,):
        registry.installable(spec).install(cache_dir())


@app.command(name="policy")
def policy_command(action: Positional[Literal["build"]], name: Positional[str]) -> None:
    """Make an embedded policy in the cache: clawgym policy build tiny|smollm2.

    Args:
        action: build it anew, replacing an older one.
        name: which.
    """
    print(f"{action}ing {name!r} ...", flush=True)
    print(registry.load("clawgym_env.policy:build_policy")(name, cache_dir()))


@app.command(name="tasks")
def tasks_command(action: Positional[Literal["check"]], path: Positional[str]) -> None:
    """Read every task and say what is wrong with it: clawgym tasks check PATH.

    Args:
        action: check.
        path: a folder of tasks, or a name such as "bundled:level=1".
    """
    tasks = load_tasks(path)
    count = sum(1 for task in tasks for file in (*task.files, *task.hidden_files) if file.read() is not None)
    print(f"{len(tasks)} tasks with {count} files: sound as far as reading tells")


def report(rollout: Rollout, *, verbose: bool = False) -> str:
    """Return what a rollout came to, as text.

    Args:
        verbose: with the tree and what harness and grader printed.
    """
    tree, timing = rollout.tree, rollout.timing
    phases = " ".join(f"{name} {seconds:.1f}" for name, seconds in timing.items() if name != "total")
    lines = [
        f"{rollout.task_id}  {rollout.harness}  {grade_line(rollout)}",
        f"  calls {len(tree)}  kept trajectories {len(tree.trajectories())}  "
        f"tokens {tree.num_prompt_tokens} prompt + {tree.num_completion_tokens} sampled  "
        f"time {timing.get('total', 0.0):.1f} s ({phases})",
    ]
    if rollout.exclusion is not None:
        lines.append(f"  excluded from training: {rollout.exclusion}")
    if verbose:
        lines += _section("tree", tree.outline())
        lines += _section("answer", rollout.response)
        lines += _section(f"harness (exit code {rollout.harness_exit_code})", rollout.harness_output)
        lines += _section("error", rollout.error)
        lines += _section("grader", rollout.grade.output if rollout.grade is not None else "")
    return "\n".join(lines)


def summary(rollouts: Sequence[Rollout]) -> str:
    """Return the mean over the graded rollouts, as text."""
    graded = [rollout.reward for rollout in rollouts if rollout.graded]
    mean = f"mean reward {sum(graded) / len(graded):.3f}" if graded else "no grade"
    return f"{len(rollouts)} rollouts, {len(graded)} graded, {mean}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        app.cli(args=argv, prog="clawgym", description=__doc__)
    except (ClawGymError, pydantic.ValidationError, ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_gone()
        print(f"clawgym: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("clawgym: interrupted; everything is closed", file=sys.stderr)
        return INTERRUPTED
    return 0


async def _serve_proxy(args: ProxyArgs) -> None:
    from clawgym_env.proxy.standalone import standalone_proxy, until_stopped  # the other commands start without

    token = None if args.admin_token_file is None else _first_line(args.admin_token_file)
    async with AsyncExitStack() as open_things:
        store = None if args.run_dir is None else open_things.enter_context(RolloutStore(args.run_dir))
        engine = registry.engine(args.engine, cache_dir())
        open_things.push_async_callback(engine.close)
        proxy = await open_things.enter_async_context(
            standalone_proxy(
                engine,
                host=args.host,
                port=args.port,
                advertise=args.advertise,
                admin_port=args.admin_port,
                token=token,
                sampling=SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature),
                store=store,
            )
        )
        print(f"models  {proxy.base_url}")
        print(f"admin   {proxy.admin_url}")
        if token is None:
            print(f"token   {proxy.token}")
        sys.stdout.flush()
        await until_stopped()


def _first_line(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    if not lines or not lines[0].strip():
        raise ValueError(f"Expected a token on the first line of {str(file)!r}, got none.")
    return lines[0].strip()


def _draws(service: RolloutService, args: RolloutArgs) -> Iterator[Draw]:
    sampler = GroupSampler(service.tasks, service.harnesses)
    sampler.reseed(args.seed)
    given = {"max_calls": args.max_calls, "wall_clock_s": args.wall_clock}
    changes = {name: value for name, value in given.items() if value is not None}
    for index in range(min(args.limit, len(service.tasks))):
        task = service.tasks[index]
        limits = type(task.limits).model_validate({**task.limits.model_dump(), **changes})
        draw = sampler.draw(task.id)
        yield dataclasses.replace(draw, task=task.model_copy(update={"limits": limits}))


def _section(title: str, text: str) -> list[str]:
    return [f"  -- {title}", *(f"  {line}" for line in text.rstrip().splitlines())] if text.strip() else []


def _reader_gone() -> int:
    # `clawgym rollout | head`: keep the interpreter from flushing into the closed pipe at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


if __name__ == "__main__":
    sys.exit(main())
