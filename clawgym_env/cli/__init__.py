"""The `clawgym` command: run, evaluate, examine a harness, serve the proxy alone, install, build, check, clean up.

Every subcommand is a function whose signature is its command line, in a module beside this one. What goes wrong on
purpose is one line on stderr and exit code 2; Ctrl-C closes what is open and exits with 130, SIGTERM with 143.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType

import pydantic
import tyro

from clawgym_env.cli import eval as evaluation
from clawgym_env.cli import fidelity, image, proxy, reap, rollout, setup, tasks
from clawgym_env.errors import ClawGymError

COMMANDS: Mapping[str, Callable[..., int | None]] = MappingProxyType(
    {
        "rollout": rollout.rollout_command,
        "eval": evaluation.eval_command,
        "install": setup.install_command,
        "image": image.image_command,
        "policy": setup.policy_command,
        "tasks": tasks.tasks_command,
        "fidelity": fidelity.fidelity_command,
        "proxy": proxy.proxy_command,
        "reap": reap.reap_command,
    }
)
INTERRUPTED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM, which closes what is open just as Ctrl-C does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        with _sigterm_interrupts():
            code = _app().cli(args=argv, prog="clawgym", description=__doc__)
    except (ClawGymError, pydantic.ValidationError, ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_gone()
        print(f"clawgym: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("clawgym: interrupted; everything is closed", file=sys.stderr)
        return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED
    return code or 0


def _app() -> tyro.extras.SubcommandApp:
    app = tyro.extras.SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(name=name)(command)
    return app


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated

    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reader_gone() -> int:
    # `clawgym rollout | head`: keep the interpreter from flushing into the closed pipe at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
