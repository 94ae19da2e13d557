"""Real vLLM servers for the opt-in tests, where `CLAWGYM_VLLM_PYTHON` names a Python that has vLLM."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clawgym_env.cache import cache_dir
from clawgym_env.engine.vllm.launch import Launch, find_vllm, running
from clawgym_env.policy import policy_folder

PYTHON = os.environ.get("CLAWGYM_VLLM_PYTHON")
NEEDS_VLLM = pytest.mark.skipif(PYTHON is None, reason="CLAWGYM_VLLM_PYTHON names no Python with a vLLM")
START_S = 900.0


@contextmanager
def vllm_server(policy: str, log: Path, *flags: str) -> Iterator[str]:
    """Serve a built policy; yield the server's URL."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    launch = Launch(
        python=Path(str(PYTHON)),
        cpu=find_vllm(Path(str(PYTHON))),
        folder=policy_folder(policy, cache_dir()),
        port=port,
        context_length=2048,
        max_num_seqs=16,
        more=flags,
    )
    with log.open("wb") as out, running(launch, log=out, start_s=START_S):
        yield launch.url
