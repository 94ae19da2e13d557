"""The `clawgym` command: run rollouts or the proxy alone, examine a harness, install, build, check.

Every subcommand is a function whose signature is its command line, in a module beside this one. What goes wrong on
purpose is one line on stderr and exit code 2; Ctrl-C closes what is open and exits with 130.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import pydantic
import tyro

from clawgym_env.cli import fidelity, proxy, rollout, setup
from clawgym_env.errors import ClawGymError

COMMANDS: Mapping[str, Callable[..., int | None]] = MappingProxyType(
    {
        "rollout": rollout.rollout_command,
        "install": setup.install_command,
        "policy": setup.policy_command,
        "tasks": setup.tasks_command,
        "fidelity": fidelity.fidelity_command,
        "proxy": proxy.proxy_command,
    }
)
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        code = _app().cli(args=argv, prog="clawgym", description=__doc__)
    except (ClawGymError, pydantic.ValidationError, ValueError, OSError, ImportError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_gone()
        print(f"clawgym: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("clawgym: interrupted; everything is closed", file=sys.stderr)
        return INTERRUPTED
    return code or 0


def _app() -> tyro.extras.SubcommandApp:
    app = tyro.extras.SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(name=name)(command)
    return app


def _reader_gone() -> int:
    # `clawgym rollout | head`: keep the interpreter from flushing into the closed pipe at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
