"""What can be set of the engine over vLLM servers; each is an option behind the question mark of `vllm:URL?...`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """How the servers are used."""

    max_concurrency: int = 256
    """Calls in flight at one server; more wait here, where they cost nothing. More than `--max-num-seqs` is no gain."""
    reconnect_s: float = 120.0
    """How long a server that is lost is waited for, in seconds: a restart takes a minute or two."""
    sync: Literal["file", "nccl"] = "file"
    """How new weights travel: through a folder that the servers read too, or by NCCL between GPUs."""
    weights: Path | None = None
    """The folder of `sync="file"`, the same path here and at the servers; by default a new one in memory (/dev/shm)."""
    tolerance: float | None = None
    """Nats by which a server may differ from the trainer after a sync. By default 1e-3 for a policy in float32 and 0.5
    for one in 16 bits, whose log-probabilities differ between any two programs."""
    sleep: bool = False
    """Whether the servers free their GPU memory while the trainer works on the same GPU (`--enable-sleep-mode`)."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ValueError(f"Expected max_concurrency of at least 1, got {self.max_concurrency}.")
