"""Whether a server has the trainer's weights: the log-probabilities of a few sampled tokens, there and here.

Asked after every weight update, on the way that rollouts take: the prompt is read, tokens are decoded, processed
log-probabilities come back. It sees weights that were mixed, not loaded, or loaded wrongly; an update too small to
move any log-probability by the tolerance it cannot see, and need not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.vllm.errors import ForeignWeights, WeightSyncError
from clawgym_env.engine.vllm.server import VllmServer

if TYPE_CHECKING:
    from clawgym_env.policy import Policy

PROMPT_TOKENS = 48
"""Three blocks of the cache of a server on a GPU: what is wrong in there is seen, too."""
SAMPLED_TOKENS = 4
TOLERANCE = 1e-3
"""Nats, of a policy in float32 at a server in float32; 2e-5 was measured on a CPU."""
HALF_TOLERANCE = 0.5
"""Nats, of 16 bits; up to 0.4 was measured between two programs with the same weights."""


class Probe:
    """A fixed prompt, and what the policy thinks of its continuation."""

    def __init__(self, policy: Policy, *, tolerance: float | None) -> None:
        import torch

        self._policy = policy
        half = next(policy.module.parameters()).dtype in (torch.bfloat16, torch.float16)
        self.tolerance = tolerance if tolerance is not None else HALF_TOLERANCE if half else TOLERANCE
        vocabulary = int(policy.module.config.get_text_config().vocab_size)
        length = min(PROMPT_TOKENS, policy.context_length - SAMPLED_TOKENS)
        self._prompt: list[int] = np.random.default_rng(0).integers(vocabulary, size=length).tolist()

    def check(self, server: VllmServer, model: str, *, weights: str) -> float:
        """Compare a server with the trainer and return the largest difference, in nats.

        Args:
            weights: what the server calls the weights it was given; also the salt of its cache.

        Raises:
            WeightSyncError: it has others.
        """
        sampling = SamplingParams(seed=0)
        choice = server.sample(model, self._prompt, sampling, SAMPLED_TOKENS, cache_salt=weights)
        names = {span.version for span in choice.weight_versions or ()}
        if names != {weights}:
            raise ForeignWeights(f"Expected weights {weights!r} at {server.url}, got {sorted(names)}.")
        there = np.array([token.logprob for token in choice.tokens], dtype=np.float32)
        here = self._logprobs(choice.token_ids)
        difference = float(np.abs(there - here).max()) if there.shape == here.shape else float("inf")
        if not difference <= self.tolerance:  # NaN is no agreement either
            raise WeightSyncError(
                f"Expected log-probabilities within {self.tolerance:g} nats of the trainer's from {server.url} after a "
                f"weight update, got one off by {difference:.4g}. Start the server with the policy's own --dtype, or "
                "say how much may differ: vllm:URL?tolerance=NATS."
            )
        return difference

    def _logprobs(self, sampled: list[int]) -> npt.NDArray[np.float32]:
        import torch

        module = self._policy.module
        with torch.inference_mode():
            ids = torch.tensor([[*self._prompt, *sampled]], device=next(module.parameters()).device)
            logits = module(input_ids=ids, logits_to_keep=len(sampled) + 1).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, -1).gather(-1, ids[0, len(self._prompt) :, None])[:, 0]
        values: npt.NDArray[np.float32] = chosen.cpu().numpy()
        return values
