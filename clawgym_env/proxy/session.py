"""One rollout's side of the proxy: what a model call goes through between the wire and the engine.

`app` finds the session by its key, `streaming` waits on the `PendingCall` it gives out, the runner watches
`exhausted` and takes the tree from `settle`. Invariants: a reply leaves only after its call is recorded; a request
that is still being answered is never sampled twice; a spent budget holds calls instead of failing them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from clawgym_env.engine.base import CALL_IN_HAND, CallInHand, Engine, Generation, RelayingEngine, SamplingParams
from clawgym_env.errors import ClawGymError, ContextOverflow, EngineError, ProxyError
from clawgym_env.messages import ChatRequest, Completion, FinishReason, Json, Message, ToolCall
from clawgym_env.proxy.bodies import BodyReader
from clawgym_env.proxy.wire import write_json
from clawgym_env.proxy.work import Work
from clawgym_env.rendering import parse_reply
from clawgym_env.rollout import StopReason
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.builder import LongRendering, PreparedCall, TreeBuilder
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.matching import RequestView
from clawgym_env.trace.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from clawgym_env.harness import HarnessAdapter
    from clawgym_env.proxy.wire import WireDialect

logger = logging.getLogger(__name__)

T = TypeVar("T")

STARVED_BUDGET = 16
"""Clients whose window is nearly full ask for 1 token; a reply under such a budget is no fair sample."""
SHORT_BODY = 256 << 10
"""Bytes. A body with more that is new is read on a worker thread; up to it a library in C spends a millisecond."""
SHORT_OBJECTS = 4096
"""Or one with more objects that are new, as near as their braces tell: what Python spends on them."""
SHORT_HISTORY = 1000
"""Messages. Longer conversations are placed on a worker thread."""
SHORT_TEXT = 8 << 10
"""Characters. More new text than this is rendered on a worker thread: it takes a millisecond or two to tokenise."""
MAX_BODY_BYTES = 64 << 20
"""Of all request bodies of one rollout that are being answered; further ones wait unread. An agent's own code may
send what it likes to its key, and must not fill the controller's memory."""
MAX_OVERFLOWS = 32
"""Refusals in a row after which the rollout is over: OpenHands condenses and retries for ever."""
REQUEST_LOG = 256
RECORDED_BYTES = 16 << 10
"""Of one request, for the log, as JSON; what does not fit is left out."""
UNKNOWN_FIELDS = 256
"""Names kept of one rollout."""
MAX_NAME = 1000
"""Characters of a model's name, which every event of a stream repeats, and of a field's that is kept."""
CHARS_PER_TOKEN = 32
"""Far more than any tokeniser packs into a token of a real text. What is longer than the window by this measure is
refused uncounted: to tokenise 30 MB takes a worker most of a minute, and gigabytes."""
USUAL_CHARS_PER_TOKEN = 4
PARSER_TAIL = 256
"""How many prompt ids a reply parser gets: enough for the last turn's header and a prefilled channel."""
GENERATE_ATTEMPTS = 2
VERDICT_S = 10.0
"""How long a relayed call keeps the headers of its stream back: by then an API has said whether the prompt fits."""


class SessionClosed(ClawGymError):
    """The rollout is over: its key is dead and what was in flight is lost."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What a client asked for and did not get: sampling is the policy's."""

    model: str
    max_tokens: int | None
    client_sampling: Mapping[str, Json]


@dataclass(slots=True, eq=False)
class PendingCall:
    """A request being answered; several identical requests may wait on it."""

    request: ChatRequest
    digest: bytes
    id: str
    """Of the completion, without the dialect's prefix."""
    rendered: asyncio.Future[int]
    """Number of prompt tokens; or `ContextOverflow`, `EngineError`, `SessionClosed`."""
    completed: asyncio.Future[Completion]
    """Set when the call is recorded; or the same errors."""
    task: asyncio.Task[None] | None = None
    index: int | None = None
    """In the tree, once recorded."""
    waiters: int = 0
    grace: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """Whether nothing more happens to it: answered or failed, and nobody reads the reply any more."""
        return self.completed.done() and self.waiters == 0

    def fail(self, error: Exception) -> None:
        for future in (self.rendered, self.completed):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting; that is no bug


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Timing knobs of all sessions of a server. Seconds."""

    retry_grace_s: float = 30.0
    """How long a turn goes on generating for a client that has hung up."""
    keep_alive_s: float = 5.0
    """Between two keep-alives of a stream."""


@dataclass(slots=True)
class _Counters:
    calls: int = 0
    rewritten: int = 0
    sampled_tokens: int = 0
    overflows_in_a_row: int = 0
    by_parent: dict[int | None, int] = field(default_factory=dict)


class RolloutSession:
    """All model calls of one rollout. Made by `ProxyServer.open_session`; used on that server's event loop."""

    def __init__(
        self,
        key: str,
        *,
        engine: Engine,
        sampling: SamplingParams,
        limits: Limits,
        seed: int,
        work: Work,
        adapter: HarnessAdapter | None = None,
        on_call: Callable[[ModelCall], Awaitable[None]] | None = None,
        on_close: Callable[[], None] | None = None,
        settings: SessionSettings = SessionSettings(),
    ) -> None:
        self.key = key
        self.settings = settings
        self.context_length = engine.context_length
        self.exhausted: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        """Resolves when a budget is spent (or the engine is lost) and the harness should be ended."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.window_cut = False
        """Whether the latest call's reply was cut because prompt and reply filled the window."""
        self.engine_error: ClawGymError | None = None
        """The failure of our own that some call could not be answered for."""
        self.last_request_at: float | None = None
        """`time.monotonic()` of the latest request."""
        self.unknown_fields: set[str] = set()
        self.requests: deque[RequestRecord] = deque(maxlen=REQUEST_LOG)
        """The latest requests, for the log."""
        self._engine = engine
        self._relay = engine if isinstance(engine, RelayingEngine) else None
        self._sampling = sampling
        self._limits = limits
        self._seed = seed
        self._work = work
        self._adapter = adapter
        self._on_call = on_call
        self._on_close = on_close
        self._builder = TreeBuilder(
            engine.renderer,
            classify=None if adapter is None else adapter.classify,
            transient_suffix=None if adapter is None else adapter.transient_suffix,
        )
        self._bodies = BodyReader()
        self._building = asyncio.Lock()
        self._counters = _Counters()
        self._joinable: dict[bytes, PendingCall] = {}
        self._pending: set[PendingCall] = set()
        self._body_bytes = 0
        self._waiting_bodies: list[asyncio.Future[None]] = []
        self._spent: StopReason | None = None
        self._started_at: float | None = None
        self._changed_at = time.monotonic()
        self._tree: PrefixTree | None = None

    @property
    def num_calls(self) -> int:
        """Recorded calls."""
        return self._counters.calls

    @property
    def num_rewritten_calls(self) -> int:
        """Recorded calls whose request the adapter's `rewrite` had changed."""
        return self._counters.rewritten

    def conversation(self) -> tuple[Message, ...]:
        """Return what the main agent and its user said, over all sessions and compactions, system prompts left out."""
        return self._builder.conversation(self.snapshot())

    @property
    def num_sampled_tokens(self) -> int:
        """Sampled tokens over all recorded calls."""
        return self._counters.sampled_tokens

    @property
    def overflowed(self) -> bool:
        """Whether the latest call was refused because it did not fit; a later one that fits clears it."""
        return self._counters.overflows_in_a_row > 0

    async def read(self, dialect: WireDialect, body: bytes, path: str = "") -> tuple[ChatRequest, bytes]:
        """Do `read_request`, out of the way of others where the body is long."""
        run = self._work.short if _is_short(body, self._bodies.num_known(body)) else self._work.long
        return await run(lambda: self.read_request(dialect, body, path))

    def read_request(self, dialect: WireDialect, body: bytes, path: str = "") -> tuple[ChatRequest, bytes]:
        """Parse a body, apply the adapter's rewrites and name the result. Thread-safe.

        Returns:
            The canonical request and its digest: equal digests are the same request.

        Raises:
            ProxyError: the body is no request of this dialect, nests too deeply, or is of a size no harness sends.
        """
        with _bounded_depth():
            sent = dialect.parse_request(body, path, self._bodies)
            self._require_usual_size(sent)
            request = sent if self._adapter is None else self._adapter.rewrite(sent)
            transcript = self._builder.transcribe(request)
            request = dataclasses.replace(
                request,
                # Those of the transcript: what was sent before is shared with earlier calls.
                messages=transcript.messages,
                rewritten=request is not sent and request != sent,
                client_sampling=_recorded(request.client_sampling),
                unknown_fields=tuple(name for name in request.unknown_fields if len(name) <= MAX_NAME)[:UNKNOWN_FIELDS],
            )
        kinds = [(tool.kind, tool.namespace) for tool in request.tools]
        rest = repr((request.dialect, request.model, kinds, request.max_tokens, request.stop)).encode()
        return request, hashlib.blake2b(transcript.letters[-1] + transcript.tools + rest, digest_size=16).digest()

    @asynccontextmanager
    async def body_room(self, size: int) -> AsyncIterator[Callable[[int], None]]:
        """Wait until a request body of at most `size` bytes fits beside those in flight, and keep its place.

        Yields:
            What to call with its true size, once that is known: a chunked body may be anything before.

        Raises:
            SessionClosed: the rollout is over.
        """
        while self._body_bytes and self._body_bytes + size > MAX_BODY_BYTES and not self.closed.done():
            freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_bodies.append(freed)
            await asyncio.wait({freed, self.closed}, return_when=asyncio.FIRST_COMPLETED)
        self._require_open()
        kept = 0

        def keep(true_size: int) -> None:
            nonlocal kept
            self._body_bytes += true_size - kept
            kept = true_size
            waiting, self._waiting_bodies = self._waiting_bodies, []
            for freed in waiting:
                if not freed.done():
                    freed.set_result(None)

        keep(size)
        try:
            yield keep
        finally:
            keep(0)

    def submit(
        self, request: ChatRequest, digest: bytes, headers: Mapping[str, str], *, size: int
    ) -> PendingCall | None:
        """Join the call that is answering this very request, or start one.

        Args:
            size: bytes of the body: what is far longer than the window is refused uncounted.

        Returns:
            The call, or None when the budget is spent: then the request must be held until the session closes.

        Raises:
            SessionClosed: the rollout is over.
        """
        self._require_open()
        now = time.monotonic()
        self.last_request_at = self._changed_at = now
        self.unknown_fields.update(request.unknown_fields[: UNKNOWN_FIELDS - len(self.unknown_fields)])
        self.requests.append(RequestRecord(request.model, request.max_tokens, request.client_sampling))
        joined = self._joinable.get(digest)
        if joined is not None:
            return joined
        reason = self._spent_budget()
        if reason is not None:
            self._spend(reason)
            return None
        if self._started_at is None:
            self._started_at = now
        loop = asyncio.get_running_loop()
        call = PendingCall(
            request, digest, self._mint(b"completion", digest, now), loop.create_future(), loop.create_future()
        )
        self._joinable[digest] = call
        self._pending.add(call)
        call.task = loop.create_task(self._answer(call, dict(headers), arrived_s=now - self._started_at, size=size))
        call.task.add_done_callback(functools.partial(self._ended, call))
        return call

    @contextmanager
    def attached(self, call: PendingCall) -> Iterator[None]:
        """Keep a call generating while a client waits for it."""
        call.waiters += 1
        if call.grace is not None:
            call.grace.cancel()
            call.grace = None
        try:
            yield
        finally:
            call.waiters -= 1
            self._changed_at = time.monotonic()
            if call.waiters == 0 and not call.completed.done() and call.task is not None:
                loop = asyncio.get_running_loop()
                call.grace = loop.call_later(self.settings.retry_grace_s, call.task.cancel)
            self._forget(call)

    def mark_delivered(self, call: PendingCall) -> None:
        """Note that some client has every byte of the reply: the same request again is a new sample."""
        if self._joinable.get(call.digest) is call:
            del self._joinable[call.digest]
        if call.index is not None and self._tree is None:
            self._builder.mark_delivered(call.index, self._clock())

    async def count_tokens(self, request: ChatRequest, headers: Mapping[str, str], *, size: int) -> int:
        """Return how many prompt tokens a request would have. Records nothing.

        Raises:
            ContextOverflow: far more than the window holds.
            ProxyError: the conversation cannot be rendered.
            SessionClosed: the rollout is over.
        """
        self._require_open()
        async with self._building:
            prepared = await self._prepare(request, headers, arrived_s=self._clock(), size=size)
        return self._num_prompt_tokens(prepared)

    async def settle(self, *, quiet_s: float = 0.2, timeout_s: float = 10.0) -> PrefixTree:
        """End the session when nothing is pending and nothing has happened for `quiet_s`, at most `timeout_s` from now.

        A turn that no client waits for any more is given up at once. Idempotent.
        """
        deadline = time.monotonic() + timeout_s
        while self._tree is None:
            for call in list(self._pending):
                if call.waiters == 0 and call.task is not None:
                    call.task.cancel()
            now = time.monotonic()
            quiet = not self._pending and now - self._changed_at >= quiet_s
            if quiet or now >= deadline:
                await self.close()
                self._tree = self._builder.freeze()
                break
            await asyncio.sleep(min(0.02, quiet_s))
        return self._tree

    def snapshot(self) -> PrefixTree:
        """Return the tree of the calls recorded so far; the session goes on. Kinds and states may still change."""
        return self._tree if self._tree is not None else self._builder.freeze()

    async def close(self) -> None:
        """Kill the key, give up what is in flight, let go of held calls. Idempotent."""
        if not self.closed.done():
            self.closed.set_result(None)
            if self._on_close is not None:
                self._on_close()
        tasks = [call.task for call in self._pending if call.task is not None and not call.task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _answer(self, call: PendingCall, headers: Mapping[str, str], *, arrived_s: float, size: int) -> None:
        """Take one call from request to recorded reply."""
        try:
            completion = await self._sample(call, headers, arrived_s=arrived_s, size=size)
        except ContextOverflow as overflow:
            self._counters.overflows_in_a_row += 1
            self.window_cut = False
            call.fail(overflow)
            if self._counters.overflows_in_a_row >= MAX_OVERFLOWS:
                self._spend(StopReason.CONTEXT_LENGTH)
        except ProxyError as error:
            call.fail(error)
        except Exception as error:  # the boundary: whatever broke is ours and ends the rollout, never the server
            if not isinstance(error, EngineError):
                logger.exception("A model call failed.")
            failure = error if isinstance(error, ClawGymError) else EngineError(f"{type(error).__name__}: {error}")
            call.fail(failure)
            self.fail(failure)
        else:
            call.completed.set_result(completion)

    def fail(self, error: ClawGymError) -> None:
        """Note a failure of our own: the rollout is over, and the harness is not to blame."""
        self.engine_error = error
        self._spend(StopReason.ENGINE_ERROR)

    def _ended(self, call: PendingCall, task: asyncio.Task[None]) -> None:
        """Tidy up when a call's task is over, cancelled ones (which may never have begun) included."""
        call.fail(SessionClosed("The call was given up: its client left or its rollout is over."))
        if call.completed.exception() is not None and self._joinable.get(call.digest) is call:
            del self._joinable[call.digest]
        self._changed_at = time.monotonic()
        self._forget(call)

    async def _sample(
        self, call: PendingCall, headers: Mapping[str, str], *, arrived_s: float, size: int
    ) -> Completion:
        async with self._building:  # the builder is no concurrent structure, and prepare may run on a thread
            prepared = await self._prepare(call.request, headers, arrived_s=arrived_s, size=size)
        prompt_tokens = self._num_prompt_tokens(prepared)
        window = self.context_length - prompt_tokens
        if self._relay is not None:
            window = self.context_length  # what fits is for the API to say
        if window < 1:
            raise ContextOverflow(prompt_tokens, self.context_length)
        sampling = self._call_sampling(call.request, prepared, window)
        CALL_IN_HAND.set(self._in_hand(call, prepared))
        with self._accepting(call, prompt_tokens):
            generation = await self._generate(prepared, sampling)
        generated_s = self._clock()
        completion = self._complete(call, prepared, generation)
        self._accept(call, completion.prompt_tokens)
        budget = call.request.max_tokens
        allowed = self._sampling.max_tokens if budget is None else min(self._sampling.max_tokens, budget)
        self.window_cut = generation.finish_reason == "length" and (
            window < allowed if generation.relayed is None else completion.completion_tokens < allowed
        )
        async with self._building:
            call.index = self._builder.commit(
                prepared,
                generation,
                completion,
                generation.sampling or sampling,
                generated_s=generated_s,
                starved=budget is not None and budget < STARVED_BUDGET,
            )
        self._counters.calls += 1
        self._counters.rewritten += call.request.rewritten
        self._counters.sampled_tokens += completion.completion_tokens
        if self._on_call is not None:
            try:
                await self._on_call(self._builder.call(call.index))
            except Exception as error:
                raise EngineError(
                    f"The rollout store did not take a call: {type(error).__name__}: {error}. Look at its disk."
                ) from error
        return completion

    @contextmanager
    def _accepting(self, call: PendingCall, prompt_tokens: int) -> Iterator[None]:
        """Accept a call that the engine is asked for: at once, or where an API judges the prompt, when that is over."""
        if self._relay is None:
            self._accept(call, prompt_tokens)
            yield
            return
        verdict = asyncio.get_running_loop().call_later(VERDICT_S, self._accept, call, prompt_tokens)
        try:
            yield
        finally:
            verdict.cancel()

    def _accept(self, call: PendingCall, prompt_tokens: int) -> None:
        """Let a client have its headers: the prompt fits. Idempotent."""
        if not call.rendered.done():
            self._counters.overflows_in_a_row = 0
            call.rendered.set_result(prompt_tokens)

    def _num_prompt_tokens(self, prepared: PreparedCall) -> int:
        ids = prepared.prompt_token_ids
        return len(ids) if self._relay is None else self._relay.estimated_tokens(ids)

    async def _prepare(
        self, request: ChatRequest, headers: Mapping[str, str], *, arrived_s: float, size: int
    ) -> PreparedCall:
        """Place a request and make its prompt. `self._building` must be held."""
        placed: RequestView | None = None

        def prepare(most: int | None = None) -> PreparedCall:
            nonlocal placed
            with _bounded_depth():
                if size > CHARS_PER_TOKEN * self.context_length:
                    self._require_countable(request)
                placed = placed or self._builder.place(request)
                return self._builder.prepare(request, headers, arrived_s=arrived_s, view=placed, most=most)

        if len(request.messages) <= SHORT_HISTORY:
            with suppress(LongRendering):
                return await self._work.short(lambda: prepare(SHORT_TEXT))
        return await self._work.long(prepare)

    def _require_countable(self, request: ChatRequest) -> None:
        length = sum(message.num_characters for message in request.messages)
        length += sum(tool.num_characters for tool in request.tools)
        if length > CHARS_PER_TOKEN * self.context_length:
            raise ContextOverflow(length // USUAL_CHARS_PER_TOKEN, self.context_length)

    def _call_sampling(self, request: ChatRequest, prepared: PreparedCall, window: int) -> SamplingParams:
        """Return the policy's own sampling, clamped to what is left, with a seed no other call of the rollout has."""
        parent = prepared.lineage_parent
        ordinal = self._counters.by_parent.get(parent, 0)
        self._counters.by_parent[parent] = ordinal + 1
        name = f"{self._seed}/{parent}/{ordinal}".encode()
        seed = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1
        budget = min(self._sampling.max_tokens, window)
        if request.max_tokens is not None:
            budget = min(budget, request.max_tokens)
        return self._sampling.model_copy(update={"max_tokens": budget, "seed": seed})

    def _in_hand(self, call: PendingCall, prepared: PreparedCall) -> CallInHand:
        parent = prepared.lineage_parent
        return CallInHand(
            id=call.id,
            parent_id=None if parent is None else self._builder.call(parent).id,
            request=call.request,
            kind=functools.partial(self._builder.kind_of, prepared),
            snapshot=self.snapshot,
        )

    async def _generate(self, prepared: PreparedCall, sampling: SamplingParams) -> Generation:
        """Ask the engine, a second time when the first fails: the client may already have its headers."""
        failure = EngineError("The engine was not asked.")
        for _ in range(GENERATE_ATTEMPTS if self._relay is None else 1):  # which tries again itself
            try:
                generation = await self._engine.generate(prepared.prompt_token_ids, sampling)
            except EngineError as error:
                failure = error
                continue
            if generation.finish_reason == "abort":
                failure = EngineError("Expected a whole turn, got one that the engine had aborted.")
            elif len(generation.token_ids) != len(generation.logprobs):
                lengths = f"{len(generation.token_ids)} ids and {len(generation.logprobs)}"
                failure = EngineError(f"Expected a log-probability for every sampled id, got {lengths}.")
            else:
                return generation
        raise failure

    def _complete(self, call: PendingCall, prepared: PreparedCall, generation: Generation) -> Completion:
        """Read the turn once; every client that waits gets this."""
        request, relayed = call.request, generation.relayed
        said = self._parsed(call, prepared, generation) if relayed is None else relayed.message
        content, stop_sequence = cut_at_stop(said.content, request.stop)
        calls = said.tool_calls if stop_sequence is None else ()
        finish: FinishReason = generation.finish_reason
        if stop_sequence is not None:
            finish = "stop"
        elif calls and finish == "stop":
            finish = "tool_calls"
        return Completion(
            id=call.id,
            model=request.model,
            content=content,
            reasoning=said.reasoning,
            tool_calls=calls,
            finish_reason=finish,
            prompt_tokens=len(prepared.prompt_token_ids) if relayed is None else relayed.usage.prompt_tokens,
            completion_tokens=len(generation.token_ids) if relayed is None else relayed.usage.completion_tokens,
            stop_sequence=stop_sequence,
        )

    def _parsed(self, call: PendingCall, prepared: PreparedCall, generation: Generation) -> Message:
        """Return what was sampled as a message, its tool calls under ids of ours."""
        prompt_tail = prepared.prompt_token_ids[-PARSER_TAIL:].tolist()
        reply = parse_reply(self._engine.renderer, generation.token_ids.tolist(), call.request.tools, prompt_tail)
        calls = tuple(
            ToolCall("call" + self._mint(call.id.encode(), b"%d" % i), name, arguments)
            for i, (name, arguments) in enumerate(reply.tool_calls)
        )
        return Message("assistant", reply.content, reply.reasoning, calls)

    def _spent_budget(self) -> StopReason | None:
        if self._spent is not None:
            return self._spent
        running = sum(not call.completed.done() for call in self._pending)
        if self._counters.calls + running >= self._limits.max_calls:
            return StopReason.MAX_CALLS
        if self._counters.sampled_tokens >= self._limits.max_total_tokens:
            return StopReason.TOKEN_BUDGET
        return None

    def _spend(self, reason: StopReason) -> None:
        """Accept no new call; say so to the runner once the calls in flight are through."""
        if self._spent is None:
            self._spent = reason
        self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if self._spent is not None and not self._pending and not self.exhausted.done():
            self.exhausted.set_result(self._spent)

    def _forget(self, call: PendingCall) -> None:
        if call.over:
            self._pending.discard(call)
            self._tell_if_idle()

    def _require_usual_size(self, request: ChatRequest) -> None:
        if len(request.model) > MAX_NAME:
            raise ProxyError(f"Expected a model of at most {MAX_NAME} characters, got {len(request.model)}.")
        if len(request.messages) > self.context_length:  # before a million of them are digested and remembered
            raise ProxyError(
                f"Expected at most {self.context_length} messages, one for each token of the window, got "
                f"{len(request.messages)}."
            )

    def _require_open(self) -> None:
        if self.closed.done():
            raise SessionClosed("The rollout of this key is over.")

    def _clock(self) -> float:
        """Seconds since the first call arrived."""
        return 0.0 if self._started_at is None else time.monotonic() - self._started_at

    def _mint(self, *parts: object) -> str:
        """Return an id of letters and digits only: some harnesses strip everything else."""
        name = repr((self.key, parts)).encode()
        return hashlib.blake2b(name, digest_size=12).hexdigest()


@contextmanager
def _bounded_depth() -> Iterator[None]:
    """Turn what nests too deeply to be read into the client's error."""
    try:
        yield
    except RecursionError as error:
        raise ProxyError("Expected values of at most some hundred levels, got deeper ones.") from error


def _is_short(body: bytes, start: int) -> bool:
    return len(body) - start <= SHORT_BODY and body.count(b"{", start) <= SHORT_OBJECTS


def _recorded(sampling: Mapping[str, Json]) -> dict[str, Json]:
    """Return what is kept of a client's sampling parameters: its body may hold megabytes under their names."""
    kept: dict[str, Json] = {}
    room = RECORDED_BYTES
    for name, value in sampling.items():
        size = len(name) + len(write_json(value))
        if size <= room:
            kept[name] = value
            room -= size
    return kept


def cut_at_stop(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Cut `text` before the earliest of the client's stop sequences; return it and the sequence found."""
    found = [(position, stop) for stop in stops if (position := text.find(stop)) >= 0]
    if not found:
        return text, None
    position, stop = min(found)
    return text[:position], stop
