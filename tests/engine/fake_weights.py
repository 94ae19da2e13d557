"""A fake vLLM server that really has weights: it loads what it is told to, remembers prefixes, and can go wrong.

It shows the four traps of the real one (`cache` outlives an update unless it is cleared or salted; a load that fails
half-way leaves a mix; a reply may span two versions; a reload does not change the name of the weights).
"""

from __future__ import annotations

import copy
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fake_vllm import Body, FakeVllm, reply
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from clawgym_env.policy import Policy, load_text

LENGTH = 640


def make_policy(folder: Path, seed: int = 0) -> Policy:
    """Return a policy of a few thousand weights that speaks like the folder."""
    text = load_text(folder, cache=Path("nowhere"))
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    module = LlamaForCausalLM(config).eval()
    return Policy(module, text.tokenizer, text.renderer, "fake", None, LENGTH, renderer_kind=text.renderer_kind)


def moved(policy: Policy, by: float = 0.1) -> None:
    """Take a step."""
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)


@dataclass
class Weights:
    """The model of one fake server."""

    module: Any
    clears: bool = True
    """Whether a pause really forgets the cache."""
    salts: bool = True
    """Whether the cache is really apart for each salt."""
    breaks_after: int | None = None
    """Tensors that a load puts in before it fails."""
    cache: dict[tuple[str | None, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)
    """Logits after a prompt, as of the weights that read it."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def of(cls, policy: Policy) -> Weights:
        return cls(copy.deepcopy(policy.module))

    def load(self, folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        own = dict(self.module.named_parameters())
        assert tensors.keys() == own.keys(), "weights have the names of a checkpoint, tied ones once"
        with torch.no_grad():
            for count, (name, tensor) in enumerate(tensors.items()):
                if count == self.breaks_after:
                    raise RuntimeError("out of memory")
                own[name].copy_(tensor)

    def clear(self) -> None:
        if self.clears:
            self.cache.clear()

    def sample(self, body: Body) -> tuple[list[int], list[float]]:
        """Return the likeliest tokens and their log-probabilities, the first from the cache where it can."""
        prompt, count = body["token_ids"], body["sampling_params"]["max_tokens"]
        key = (body.get("cache_salt") if self.salts else None, tuple(prompt))
        ids, logprobs = list(prompt), []
        with self.lock, torch.inference_mode():
            for step in range(count):
                if step or key not in self.cache:
                    logits = torch.log_softmax(self.module(input_ids=torch.tensor([ids])).logits[0, -1], -1)
                    if not step:
                        self.cache[key] = logits
                logits = logits if step else self.cache[key]
                ids.append(int(logits.argmax()))
                logprobs.append(float(logits.max()))
        return ids[len(prompt) :], logprobs


def fake_server(policy: Policy, folder: Path) -> tuple[FakeVllm, Weights]:
    """Return a server of a policy, not serving yet, and its weights."""
    weights = Weights.of(policy)

    def answer(body: Body) -> Body:
        ids, logprobs = weights.sample(body)
        stops = set(body["sampling_params"]["stop_token_ids"])
        if stop := next((i for i, token in enumerate(ids) if token in stops), None):
            ids, logprobs = ids[: stop + 1], logprobs[: stop + 1]
        finish = "stop" if stops & set(ids) else "length"
        return reply(ids, logprobs, finish, [(server.weights, 0, len(ids))])

    server = FakeVllm(str(folder), answer, dev_mode=True, window=LENGTH)
    server.reload, server.clear = weights.load, weights.clear
    return server, weights
