"""The embedded engine: continuous batching over the trainer's own parameters, in this process.

The proxy awaits `generate` on its event loop; one decode thread advances all running sequences together, a step at a
time. Requests join and leave between steps, prompts are read in chunks beside the decoding ones. The weights are the
trainer's (`update_weights` keeps the thread out while they change), so an optimizer step is the weight sync.
Invariant: a token's log-probability is the one it was drawn with, equal to the trainer's own forward in fp32 within
1e-4 nats, and the prefix cache never holds keys and values of older weights.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds, VersionSpan
from clawgym_env.engine.decoder import Decoder
from clawgym_env.engine.kv_cache import KVCache, Slot, capacity_for, decode_order
from clawgym_env.engine.prefix_cache import PrefixCache
from clawgym_env.engine.sampler import sample
from clawgym_env.errors import ContextOverflow, EngineError

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.policy import Policy

logger = logging.getLogger(__name__)

WORTH_WAITING = 64
"""Prompt tokens shared with a prompt being read right now, beyond what is cached, that make a request wait for it."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """One call in flight. Owned by the decode thread but for `aborted`."""

    prompt: TokenIds
    sampling: SamplingParams
    max_new: int
    random: Random
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Generation]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    slot: Slot | None = None
    epoch: int = 0
    """Of the weights that its first keys and values were computed with."""
    aborted: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    def ids(self, start: int, stop: int) -> list[int]:
        size = len(self.prompt)
        prompt: list[int] = self.prompt[start:stop].tolist()
        return prompt + self.tokens[max(start - size, 0) : max(stop - size, 0)]

    def append(self, token: int, logprob: float, version: int) -> None:
        index = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1] = VersionSpan(version, self.spans[-1].start, index + 1)
        else:
            self.spans.append(VersionSpan(version, index, index + 1))


class TorchEngine:
    """Answers model calls with a policy that lives in this process."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_batch: int = 64,
        prefill_chunk: int = 512,
        kv_cache_bytes: int = 4 << 30,
        prefix_cache_bytes: int = 1 << 30,
    ) -> None:
        """Prepare the engine; the decode thread starts with the first call.

        Args:
            policy: shared with the learner, never copied.
            max_batch: sequences decoded together; more wait their turn.
            prefill_chunk: prompt tokens read per step, beside the decoding sequences. Smaller delays those less.
            kv_cache_bytes: running sequences start only while their rows fit (one always may).
            prefix_cache_bytes: keys and values of past prompts kept for reuse.

        Raises:
            EngineError: the architecture is not supported, or the policy has an open engine already.
        """
        self._policy = policy
        self._decoder = Decoder(policy.module)
        policy.claim(self)
        self._epoch = policy.epoch
        self._kv = KVCache(self._decoder.shape)
        bytes_per_token = self._decoder.shape.bytes_per_token
        self._prefix = PrefixCache(max_bytes=prefix_cache_bytes, bytes_per_token=bytes_per_token)
        self._stop_ids = frozenset(policy.renderer.get_stop_token_ids())
        self._max_batch = max_batch
        self._prefill_chunk = prefill_chunk
        self._kv_cache_tokens = kv_cache_bytes // bytes_per_token
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._arrivals: list[_Sequence] = []
        # Guards `_arrivals` and the four flags below; everything else belongs to whoever is "stepping".
        self._changed = threading.Condition()
        self._stepping = False
        self._holds = 0
        self._paused = False
        self._closed = False
        self._failure: BaseException | None = None
        self._update_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def renderer(self) -> Renderer:
        """The policy's renderer."""
        return self._policy.renderer

    @property
    def context_length(self) -> int:
        """Tokens of prompt and reply together."""
        return self._policy.context_length

    @property
    def policy_version(self) -> int:
        """Counts weight updates, from 0."""
        return self._policy.version

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Sample one turn. Cancelling the task aborts the sequence and frees its memory.

        Raises:
            ContextOverflow: no room for a single new token.
            EngineError: the prompt holds no or unknown ids, or the engine is closed or dead.
        """
        sequence = self._sequence(prompt_token_ids, sampling)
        with self._changed:
            self._check_alive()
            self._arrivals.append(sequence)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="clawgym-torch-engine", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        try:
            return await sequence.future
        finally:
            sequence.aborted = True  # after an answer this changes nothing

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Run `apply` between two decode steps, drop the prefix cache, count the version up and return it.

        An error of `apply` is raised here; the version is counted up all the same, since weights may have moved.

        Raises:
            EngineError: this engine is closed and another one samples from the policy now.
        """
        self._policy.check_sole(self)
        with self._update_lock, self._held():
            try:
                apply()
            finally:
                self._policy.epoch += 1
                self._policy.version += 1
                self._forget_older()
        return self._policy.version

    async def pause(self) -> None:
        """Stop decoding at the next step boundary; running sequences keep their state."""
        with self._changed:
            self._paused = True
        await asyncio.to_thread(self._wait_for_boundary)

    async def resume(self) -> None:
        """Go on after `pause`."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    async def close(self) -> None:
        """End the decode thread and let go of the policy; calls still running raise `EngineError`. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._policy.release(self)

    def _sequence(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> _Sequence:
        prompt = np.array(prompt_token_ids, dtype=np.int32)
        if prompt.ndim != 1 or not len(prompt):
            raise EngineError(f"Expected a flat prompt of at least one token, got shape {prompt.shape}.")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self._decoder.vocab_size:
            raise EngineError(
                f"Expected token ids in [0, {self._decoder.vocab_size}), got {prompt.min()} to {prompt.max()}. "
                "Render with this policy's own renderer."
            )
        room = self.context_length - len(prompt)
        if room < 1:
            raise ContextOverflow(len(prompt), self.context_length)
        loop = asyncio.get_running_loop()
        return _Sequence(
            prompt, sampling, min(sampling.max_tokens, room), Random(sampling.seed), loop, loop.create_future()
        )

    def _forget_older(self) -> None:
        """Drop what was computed with other weights than the present ones."""
        if self._epoch != self._policy.epoch:
            self._prefix.clear()
            self._epoch = self._policy.epoch

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(f"The torch engine died: {self._failure!r}. Make a new one.") from self._failure
        if self._closed:
            raise EngineError("Expected an open engine, got a closed one.")

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Keep the decode thread at a step boundary."""
        with self._changed:
            self._holds += 1
        try:
            self._wait_for_boundary()
            yield
        finally:
            with self._changed:
                self._holds -= 1
                self._changed.notify_all()

    def _wait_for_boundary(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._stepping)

    # The decode thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._begin_step():
                    try:
                        self._step()
                    finally:
                        with self._changed:
                            self._stepping = False
                            self._changed.notify_all()
        except BaseException as error:
            logger.exception("The torch engine died")
            with self._changed:
                self._failure = error
        finally:
            self._fail_all()

    def _begin_step(self) -> bool:
        """Wait for something to do; False when closed."""
        with self._changed:
            self._changed.wait_for(self._may_step)
            if self._closed:
                return False
            self._waiting += self._arrivals
            self._arrivals.clear()
            self._stepping = True
            return True

    def _may_step(self) -> bool:
        if self._closed:
            return True
        return not self._holds and not self._paused and bool(self._arrivals or self._waiting or self._running)

    def _step(self) -> None:
        self._drop_aborted()
        self._admit()
        if not self._running:
            return
        decodes, chunks = self._plan()
        token_ids: list[int] = []
        positions: list[int] = []
        ready: list[_Sequence] = []
        last: list[int] = []
        for sequence, count in [(s, 1) for s in decodes] + chunks:
            start = _slot(sequence).length
            token_ids += sequence.ids(start, start + count)
            positions += range(start, start + count)
            if start + count == sequence.length:
                ready.append(sequence)
                last.append(len(token_ids) - 1)
        attend = self._kv.attention([_slot(s) for s in decodes], [(_slot(s), n) for s, n in chunks])
        logits = self._decoder.forward(token_ids, positions, last, attend)
        for sequence, count in [(s, 1) for s in decodes] + chunks:
            _slot(sequence).length += count
        for sequence in decodes + [s for s, _ in chunks]:
            if _slot(sequence).length == len(sequence.prompt):
                self._remember(sequence)
        if ready:
            self._advance(ready, logits)

    def _plan(self) -> tuple[list[_Sequence], list[tuple[_Sequence, int]]]:
        """Split the running sequences into those that decode and prompt chunks within the budget.

        Prompts share the budget evenly and leave what they do not need to longer ones: a short prompt never waits
        for a long one to be read.
        """
        pending = {sequence: sequence.length - _slot(sequence).length for sequence in self._running}
        decodes = [sequence for sequence in self._running if pending[sequence] == 1]
        for sequence in decodes:
            self._kv.reserve(_slot(sequence), sequence.length)
        decodes.sort(key=lambda sequence: decode_order(_slot(sequence)))
        reading = sorted((s for s in self._running if pending[s] > 1), key=pending.__getitem__)
        chunks: list[tuple[_Sequence, int]] = []
        budget = self._prefill_chunk
        for place, sequence in enumerate(reading):
            count = min(pending[sequence], -(-budget // (len(reading) - place)))
            if count:
                chunks.append((sequence, count))
            budget -= count
        return decodes, chunks

    def _advance(self, ready: Sequence[_Sequence], logits: torch.Tensor) -> None:
        tokens, logprobs = sample(logits, [s.sampling for s in ready], [s.random for s in ready])
        for sequence, token, logprob in zip(ready, tokens, logprobs, strict=True):
            if logprob != logprob:
                error = EngineError("Expected finite logits, got NaN. The weights have diverged.")
                self._retire(sequence, error)
                continue
            sequence.append(token, logprob, self._policy.version)
            if token in self._stop_ids:
                self._finish(sequence, "stop")
            elif len(sequence.tokens) == sequence.max_new:
                self._finish(sequence, "length")

    def _admit(self) -> None:
        """Start waiting sequences, oldest first, while rows and memory last."""
        self._forget_older()
        reading = [s for s in self._running if _slot(s).length < len(s.prompt)]
        reserved = sum(_slot(s).capacity for s in self._running)
        postponed: list[_Sequence] = []
        for index, sequence in enumerate(self._waiting):
            needed = capacity_for(len(sequence.prompt) + 1)
            full = len(self._running) == self._max_batch or reserved + needed > self._kv_cache_tokens
            if full and self._running:
                postponed += self._waiting[index:]
                break
            # The last prompt token is always computed: its logits are the point.
            pages = self._prefix.match(sequence.prompt[:-1])
            cached = len(pages) * self._prefix.page_size
            if any(_shared(sequence.prompt, other.prompt) > cached + WORTH_WAITING for other in reading):
                postponed.append(sequence)
                continue
            sequence.slot = self._kv.allocate(len(sequence.prompt) + 1)
            sequence.epoch = self._epoch
            if pages:
                self._kv.write(sequence.slot, 0, torch.cat(pages, dim=3))
                sequence.slot.length = cached
            self._running.append(sequence)
            reading.append(sequence)
            reserved += needed
        self._waiting = postponed

    def _remember(self, sequence: _Sequence) -> None:
        if sequence.epoch == self._policy.epoch:
            slot = _slot(sequence)
            ids = np.array(sequence.ids(0, slot.length), dtype=np.int32)
            self._prefix.insert(ids, lambda start, stop: self._kv.read(slot, start, stop))

    def _finish(self, sequence: _Sequence, reason: Literal["stop", "length"]) -> None:
        self._remember(sequence)
        generation = Generation(
            token_ids=np.array(sequence.tokens, dtype=np.int32),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            finish_reason=reason,
            policy_versions=tuple(sequence.spans),
        )
        self._retire(sequence, generation)

    def _retire(self, sequence: _Sequence, outcome: Generation | EngineError | None) -> None:
        if sequence.slot is not None:
            self._kv.free(sequence.slot)
            sequence.slot = None
            self._running.remove(sequence)
        if outcome is not None:
            _resolve(sequence, outcome)

    def _drop_aborted(self) -> None:
        self._waiting = [s for s in self._waiting if not s.aborted]
        for sequence in [s for s in self._running if s.aborted]:
            self._retire(sequence, None)

    def _fail_all(self) -> None:
        reason = f"the torch engine died: {self._failure!r}" if self._failure is not None else "the engine was closed"
        with self._changed:
            orphans = self._running + self._waiting + self._arrivals
            self._running, self._waiting, self._arrivals = [], [], []
        for sequence in orphans:
            _resolve(sequence, EngineError(f"Expected an answer, but {reason}."))
        self._prefix.clear()
        self._kv = KVCache(self._decoder.shape)
        self._policy.release(self)  # here too: an engine that died is never closed by some


def _slot(sequence: _Sequence) -> Slot:
    assert sequence.slot is not None, "only running sequences have a slot"
    return sequence.slot


def _shared(a: TokenIds, b: TokenIds) -> int:
    """Return the length of the common prefix."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def _resolve(sequence: _Sequence, outcome: Generation | EngineError) -> None:
    def deliver() -> None:
        if sequence.future.done():
            return
        if isinstance(outcome, EngineError):
            sequence.future.set_exception(outcome)
        else:
            sequence.future.set_result(outcome)

    try:
        sequence.loop.call_soon_threadsafe(deliver)
    except RuntimeError:
        logger.debug("The caller's event loop has ended before its answer came")
