"""The `clawgym` command: see what is here, run, evaluate, examine a harness, serve, install, build, check, clean up.

Every subcommand is a function whose signature is its command line, in a module beside this one. What goes wrong is one
line on stderr: exit code 2 where the command line asks for what cannot be, 1 where it failed here or its result is bad.
CLAWGYM_DEBUG=1 shows the traceback too. Ctrl-C closes what is open and exits with 130, SIGTERM with 143.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, MappingProxyType

import tyro

from clawgym_env import registry
from clawgym_env.cli import _errors, doctor
from clawgym_env.doctor.machine import elsewhere
from clawgym_env.errors import ClawGymError

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "doctor": "clawgym_env.cli.doctor:doctor_command",
        "rollout": "clawgym_env.cli.rollout:rollout_command",
        "eval": "clawgym_env.cli.eval:eval_command",
        "install": "clawgym_env.cli.setup:install_command",
        "image": "clawgym_env.cli.image:image_command",
        "policy": "clawgym_env.cli.setup:policy_command",
        "tasks": "clawgym_env.cli.tasks:tasks_command",
        "fidelity": "clawgym_env.cli.fidelity:fidelity_command",
        "proxy": "clawgym_env.cli.proxy:proxy_command",
        "serve": "clawgym_env.cli.serve:serve_command",
        "reap": "clawgym_env.cli.reap:reap_command",
    }
)
INTERRUPTED, TERMINATED = 130, 143
DEBUG = "CLAWGYM_DEBUG"


class Terminated(KeyboardInterrupt):
    """SIGTERM, which closes what is open just as Ctrl-C does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s", stream=sys.stderr)
    try:
        with _sigterm_interrupts():
            return _run(sys.argv[1:] if argv is None else argv) or 0
    except Exception as error:
        if not _errors.on_purpose(error):
            raise
        if isinstance(error, BrokenPipeError):
            return _reader_gone()
        if os.environ.get(DEBUG, "0") not in ("", "0"):
            traceback.print_exception(error)
        print(f"clawgym: {_errors.line(error)}", file=sys.stderr)
        return _errors.exit_code(error)
    except KeyboardInterrupt as interrupt:
        print("clawgym: interrupted; everything is closed", file=sys.stderr)
        return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def _run(argv: Sequence[str]) -> int | None:
    if (system := platform.system()) != "Linux":  # where most commands cannot even be imported
        if argv[:1] != ["doctor"]:
            raise ClawGymError(f"Expected Linux, got {system}. {elsewhere(system)}")
        return tyro.cli(doctor.doctor_command, args=argv[1:], prog="clawgym doctor")
    app = tyro.extras.SubcommandApp()
    for name, command in COMMANDS.items():
        app.command(name=name)(registry.load(command))
    code: int | None = app.cli(args=argv, prog="clawgym", description=__doc__)
    return code


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
