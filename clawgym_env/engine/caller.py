"""An engine that samples nothing: somebody outside says what the model's reply is.

Stands where the policy's engine stands, behind the real proxy; the call clock (`envs.call`) takes the calls that wait
here to the caller of `step`, one at a time. Invariant: calls wait in the order in which they were asked, and one that
its client has given up does not wait any more.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import CallInHand, Generation, SamplingParams, TokenIds, VersionSpan, call_in_hand
from clawgym_env.errors import ClawGymError, EngineError
from clawgym_env.policy import BYTES, PolicyText, load_text

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.trace.calls import CallKind

DEFAULT_WINDOW = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class AskedCall:
    """A model call that waits for its reply."""

    call: CallInHand
    kind: CallKind
    """By what was known when it was asked."""
    prompt_token_ids: TokenIds
    """Shape [p], read-only."""
    sampling: SamplingParams
    """The budget and the seed of this call are in it."""
    context: contextvars.Context
    """Of the proxy's task, for an engine that samples on the caller's behalf."""
    reply: asyncio.Future[Generation]

    def settle(self, outcome: Generation | ClawGymError) -> None:
        """Reply, or fail as an engine fails; nothing happens where nobody waits any more."""
        if self.reply.done():
            return
        if isinstance(outcome, Generation):
            self.reply.set_result(outcome)
        else:
            self.reply.set_exception(outcome)


class CallerEngine:
    """Satisfies `engine.base.Engine`; used on one event loop."""

    def __init__(
        self,
        policy: str | Path | PolicyText = BYTES,
        *,
        context_length: int = DEFAULT_WINDOW,
        cache: Path | None = None,
    ) -> None:
        """Load nothing yet.

        Args:
            policy: whose tokens the conversations are written in: "bytes" (ChatML over 256 bytes, needs no file),
                "tiny", "smollm2", a Hugging Face folder (no weights are loaded), or loaded.
            context_length: tokens of prompt and reply together that harnesses are told of.
            cache: where built policies are kept; the user's own by default.
        """
        self.num_asked = 0
        """Calls that were ever asked; a call whose reply was an error is asked once more."""
        self._policy = policy
        self._context_length = context_length
        self._cache = cache
        self._waiting: deque[AskedCall] = deque()
        self._arrived = asyncio.Event()

    @cached_property
    def text(self) -> PolicyText:
        """How prompts are written and replies read, loaded at the first use.

        Raises:
            PolicyNotBuilt, EngineError: as `policy.load_text`.
        """
        if isinstance(self._policy, PolicyText):
            return self._policy
        return load_text(self._policy, cache=self._cache or cache_dir())

    @property
    def renderer(self) -> Renderer:
        return self.text.renderer

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def policy_version(self) -> int:
        return 0

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Wait for the reply.

        Raises:
            ClawGymError: the caller could not reply, and says so.
        """
        call = call_in_hand()
        prompt = np.array(prompt_token_ids, dtype=np.int32)
        prompt.flags.writeable = False
        reply: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        asked = AskedCall(call, call.kind(), prompt, sampling, contextvars.copy_context(), reply)
        self.num_asked += 1
        self._waiting.append(asked)
        self._arrived.set()
        try:
            return await reply
        finally:
            self._waiting.remove(asked)

    async def next_call(self) -> AskedCall:
        """Wait for a call that has no reply yet, and return the one that was asked first."""
        while (asked := next((one for one in self._waiting if not one.reply.done()), None)) is None:
            self._arrived.clear()
            await self._arrived.wait()
        return asked

    def generation(self, reply: str | TokenIds, sampling: SamplingParams) -> Generation:
        """Return a reply as if the policy had sampled it, marked as given.

        It ends at the first id that closes a turn. Text gets one where it has none. Ids that have none, and replies
        longer than the budget, were cut: their finish reason is "length".
        """
        stops = self.renderer.get_stop_token_ids()
        ids = self.text.tokenizer.encode_sampled(reply) if isinstance(reply, str) else reply.tolist()
        end = next((position for position, token in enumerate(ids) if token in stops), None)
        if end is None and isinstance(reply, str):
            end = len(ids)
            ids.append(stops[0])
        finish: Literal["stop", "length"] = "length" if end is None else "stop"
        ids = ids if end is None else ids[: end + 1]
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], "length"
        return Generation(
            token_ids=np.array(ids, dtype=np.int32),
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason=finish,
            policy_versions=(VersionSpan(0, 0, len(ids)),),
            sampling=sampling.model_copy(update={"given": True}),
        )

    def update_weights(self, apply: Callable[[], None]) -> int:
        raise EngineError("Expected an engine over weights, got the caller of step. Train with a policy's engine.")

    async def pause(self) -> None:
        """Nothing decodes."""

    async def resume(self) -> None:
        """Nothing decodes."""

    async def close(self) -> None:
        """Nothing is held."""
