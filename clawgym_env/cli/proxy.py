"""`clawgym proxy`: the proxy alone, for harnesses that somebody else starts."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from clawgym_env import registry
from clawgym_env._loop import new_event_loop
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.errors import UsageError
from clawgym_env.trace.store import RolloutStore


@dataclass(frozen=True)
class ProxyArgs:
    """What answers, and where."""

    engine: str
    """"scripted:FILE", "torch:POLICY" (tiny, smollm2 or a folder), "vllm:URL", "openai:URL#MODEL" (relayed; its key is
    taken from CLAWGYM_RELAY_API_KEY) or an import path."""
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


def proxy_command(args: OmitArgPrefixes[FlagCreatePairsOff[ProxyArgs]]) -> None:
    """Run the proxy alone, for a harness that you start yourself: POST /rollouts on its admin port opens one."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_serve_proxy(args))


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
        raise UsageError(f"Expected a token on the first line of {str(file)!r}, got none. Write one into it.")
    return lines[0].strip()
