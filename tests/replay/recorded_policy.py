"""The policy of a replay: it says what the recording's server said, spelled as no renderer would spell it.

A stored reply that were rendered again instead of spliced by its ids would show up as other tokens at once.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from recordings import Reply
from renderers.base import Renderer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds, VersionSpan
from clawgym_env.messages import ToolCall
from clawgym_env.rendering import make_renderer
from clawgym_env.tokenizer import CHATML_SPECIALS, TextTokenizer

TAG = re.compile(r"(</?(?:tool_call|think)>)")


@functools.cache
def qwen3() -> tuple[TextTokenizer, Renderer]:
    """Make tokenizer and renderer of a family that thinks and calls tools, over bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHATML_SPECIALS])
    # Not special, as in the real vocabulary: the renderer writes them as text.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    text = TextTokenizer(tokenizer, eos_token="<|im_end|>")
    return text, make_renderer(text, "qwen3")


def sampled(reply: Reply) -> list[int]:
    """Return the ids of a turn that reads as `reply`, with two spaces where a renderer puts one."""
    pieces = [f"<think>\n{reply.reasoning}\n</think>\n\n"] if reply.reasoning else []
    pieces.append(reply.text)
    for call in reply.calls:
        name = f"{call.namespace}__{call.name}" if call.namespace else call.name
        pieces.append(f'\n<tool_call>\n{{"name":  "{name}",  "arguments":  {call.arguments}')
        pieces.append("}\n</tool_call>" if is_object(call.arguments) else "</tool_call>")
    tokenizer, renderer = qwen3()
    ids: list[int] = []
    for piece in TAG.split("".join(pieces)):
        tag = tokenizer.convert_tokens_to_ids(piece) if TAG.fullmatch(piece) else None
        ids += [tag] if isinstance(tag, int) else tokenizer.encode(piece)
    return ids if reply.cut else [*ids, renderer.get_stop_token_ids()[0]]


def is_object(arguments: str) -> bool:
    """Whether a call's arguments are what they should be."""
    return ToolCall("", "", arguments).parsed_arguments() is not None


@dataclass(frozen=True)
class Sample:
    """What the engine was asked and what it drew."""

    prompt: TokenIds
    generation: Generation


@dataclass
class RecordedPolicy:
    """An engine that waits for the replay to tell it what to say. Satisfies `engine.base.Engine`."""

    renderer: Renderer = field(default_factory=lambda: qwen3()[1])
    context_length: int = 1 << 24
    policy_version: int = 0
    samples: list[Sample] = field(default_factory=list)
    waiting: list[asyncio.Future[Reply]] = field(default_factory=list)
    """One for each call, in order; the replay resolves them."""

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Draw the reply the replay names. The client's token budget is not kept, as the recorded server did not."""
        prompt = np.array(prompt_token_ids, dtype=np.int32)
        told: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self.waiting.append(told)
        reply = await told
        token_ids = np.array(sampled(reply), dtype=np.int32)
        # No two calls share a log-probability, so a mixed-up reply cannot pass for another with the same text.
        logprobs = -(np.arange(len(token_ids), dtype=np.float32) + 1) / 4096 - len(self.samples)
        span = VersionSpan(self.policy_version, 0, len(token_ids))
        generation = Generation(token_ids, logprobs.astype(np.float32), "length" if reply.cut else "stop", (span,))
        self.samples.append(Sample(prompt, generation))
        return generation

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Never called: nothing is learned here."""
        raise NotImplementedError

    async def pause(self) -> None:
        """Nothing runs."""

    async def resume(self) -> None:
        """Nothing was paused."""

    async def close(self) -> None:
        """Nothing is held."""
