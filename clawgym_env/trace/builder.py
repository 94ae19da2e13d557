"""Builds the prefix tree of one rollout while it runs: finds each call's parent, makes its exact prompt.

The proxy calls `prepare` when a request arrives and `commit` when the engine has answered. Invariant: the next
prompt is the parent's prompt, its *sampled* ids and a bridge of the new messages only. What is not provably the
continuation of a stored reply is rendered from scratch as context, on a new token branch, with the reason named.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds
from clawgym_env.messages import ChatRequest, Completion, Message, ToolSpec
from clawgym_env.rendering import message_dicts, tool_dicts
from clawgym_env.trace.calls import CallKind, CallTiming, ModelCall
from clawgym_env.trace.classify import CallFacts, assign_kinds, assign_states, marked_kind, worded_kind
from clawgym_env.trace.conversation import Spoken, conversation
from clawgym_env.trace.digests import Digest
from clawgym_env.trace.matching import LineageIndex, RequestView, view_request
from clawgym_env.trace.prefix_tree import PrefixTree, read_tokens
from clawgym_env.trace.transcript import Transcript, Transcripts

if TYPE_CHECKING:
    from renderers.base import Renderer

Classify = Callable[[ChatRequest, Mapping[str, str]], CallKind | None]
TransientSuffix = Callable[[Sequence[Message]], int]

_Scalar = TypeVar("_Scalar", np.int32, np.float32)

RELATIVES = 4
"""How many sibling calls a prompt is compared with to find shared tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedCall:
    """A request with its place in the tree and its exact prompt, before the engine has answered."""

    request: ChatRequest
    prompt_token_ids: TokenIds
    """Shape [p]."""
    lineage_parent: int | None
    prefix_parent: int | None
    prefix_len: int
    drift_reason: str | None
    arrived_s: float
    view: RequestView
    declared: CallKind | None
    """The adapter's word on the kind."""
    marked: CallKind | None
    """What the wording gives away."""
    turn_ends: tuple[tuple[Digest, int], ...]
    """Where in the prompt the stored replies it holds end; later prompts go on from there."""


class _Prompt:
    """A prompt in the making, with room to grow: what is put behind it costs its own length only."""

    def __init__(self, tokens: Sequence[int] | TokenIds, *, last: int = -1, origin: tuple[int, int] = (-1, 0)) -> None:
        self.last = last
        """Position of the message whose reply the tokens end with; -1 for none."""
        self.origin = origin
        """(call, length): the prompt begins with history(call)[:length]."""
        self.turn_ends: list[tuple[Digest, int]] = []
        self._buffer: TokenIds = np.empty(len(tokens) + len(tokens) // 8 + 1024, dtype=np.int32)
        self._length = 0
        self.append(tokens)

    @property
    def tokens(self) -> TokenIds:
        return self._buffer[: self._length]

    def append(self, tokens: Sequence[int] | TokenIds) -> None:
        end = self._length + len(tokens)
        if end > len(self._buffer):
            grown: TokenIds = np.empty(2 * end, dtype=np.int32)
            grown[: self._length] = self.tokens
            self._buffer = grown
        self._buffer[self._length : end] = tokens
        self._length = end


class LongRendering(Exception):
    """A prompt would take more rendering than was allowed."""


class _Rendering:
    """The renderer, with the tools of one request, as far as that may be rendered."""

    def __init__(self, renderer: Renderer, tools: Sequence[ToolSpec], most: int | None) -> None:
        self._renderer = renderer
        self._offered = tools
        self._tools = tool_dicts(tools)
        self._left = most

    def afresh(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt of a conversation."""
        self._spend((*self._offered, *messages))
        return self._renderer.render_ids(message_dicts(messages), tools=self._tools, add_generation_prompt=True)

    def bridge(self, behind: list[int], reply: list[int], messages: Sequence[Message]) -> list[int] | None:
        """Return the ids that lead from a sampled reply to the next one; None when the renderer cannot prove them.

        Args:
            behind: the prompt before the reply, from its last turn close on.
            messages: the reply's own first, so that a tool result knows the name of its tool.
        """
        self._spend(messages[1:])
        new = message_dicts(messages)[1:]
        bridged = self._renderer.bridge_to_next_turn(behind, reply, new, tools=self._tools)
        known = len(behind) + len(reply)
        if bridged is None or bridged.token_ids[:known] != [*behind, *reply]:
            return None
        return bridged.token_ids[known:]

    def _spend(self, texts: Sequence[Message | ToolSpec]) -> None:
        if self._left is None:
            return
        try:
            self._left -= sum(text.num_characters for text in texts)
        except RecursionError as error:
            raise LongRendering from error
        if self._left < 0:
            raise LongRendering


@dataclass(slots=True, eq=False)
class _Node:
    """What `freeze` needs to know of a committed call."""

    call: ModelCall
    declared: CallKind | None
    marked: CallKind | None
    tool_names: tuple[str, ...]
    segment: int
    echoes_parent: bool
    spoken: Spoken
    delivered_s: float | None = None


class TreeBuilder:
    """One rollout's tree in the making. Not thread-safe, but `prepare` only reads."""

    def __init__(
        self,
        renderer: Renderer,
        *,
        classify: Classify | None = None,
        transient_suffix: TransientSuffix | None = None,
    ) -> None:
        """Start an empty tree.

        Args:
            renderer: must be able to bridge (see `rendering.make_renderer`).
            classify: the adapter's word on a call's kind; None leaves all to the generic rules.
            transient_suffix: how many trailing messages of a request the next one will not contain.
        """
        self._renderer = renderer
        self._classify = classify
        self._transient_suffix = transient_suffix
        self._stops = frozenset(renderer.get_stop_token_ids())
        self._nodes: list[_Node] = []
        self._calls: list[ModelCall] = []
        self._index = LineageIndex()
        self._transcripts = Transcripts()
        self._worded_kind = functools.lru_cache(maxsize=8)(worded_kind)
        """System prompts come with every call; those of main agent, sub-agents and side calls are remembered."""
        self._children: dict[int | None, list[int]] = {}
        self._continued: set[int] = set()
        """Segments with more than tries at their opening call."""
        self._turn_ends: dict[Digest, tuple[int, int]] = {}
        """Exact history up to and including a reply, to (call, length): history(call)[:length] holds its tokens."""
        self._latest_prompt: tuple[int, TokenIds] = (-1, np.empty(0, dtype=np.int32))
        """Of the latest call: most requests go on from it."""

    def __len__(self) -> int:
        return len(self._calls)

    def call(self, index: int) -> ModelCall:
        """Return a committed call; its kind and state are provisional until `freeze`."""
        return self._calls[index]

    def transcribe(self, request: ChatRequest) -> Transcript:
        """Digest a request, at the cost of its new messages. Thread-safe."""
        return self._transcripts.of(request)

    def place(self, request: ChatRequest) -> RequestView:
        """Find the request's place among the calls so far. Reads the builder only."""
        transient = 0 if self._transient_suffix is None else self._transient_suffix(request.messages)
        view = view_request(request, transient=transient, transcript=self.transcribe(request))
        self._index.place(view)
        return view

    def prepare(
        self,
        request: ChatRequest,
        headers: Mapping[str, str],
        *,
        arrived_s: float,
        view: RequestView | None = None,
        most: int | None = None,
    ) -> PreparedCall:
        """Make the request's prompt. Reads the builder only.

        Args:
            arrived_s: seconds since the rollout's first call.
            view: what `place` has returned for this request, where nothing was committed since.
            most: characters that may be rendered.

        Raises:
            LongRendering: it would take more than `most`.
        """
        view = view or self.place(request)
        prompt, drift = self._prompt(view, _Rendering(self._renderer, request.tools, most))
        prefix_parent, prefix_len = self._shared_prefix(prompt, view)
        return PreparedCall(
            request=request,
            prompt_token_ids=prompt.tokens,
            lineage_parent=view.parent,
            prefix_parent=prefix_parent,
            prefix_len=prefix_len,
            drift_reason=drift,
            arrived_s=arrived_s,
            view=view,
            declared=None if self._classify is None else self._classify(request, headers),
            marked=marked_kind(
                request, opens=view.parent is None, new_system=view.new_system, worded=self._worded_kind
            ),
            turn_ends=tuple(prompt.turn_ends),
        )

    def commit(
        self,
        prepared: PreparedCall,
        generation: Generation,
        completion: Completion,
        sampling: SamplingParams,
        *,
        generated_s: float,
        starved: bool = False,
    ) -> int:
        """Add an answered call and return its index.

        Args:
            completion: exactly what the harness is told; its tool-call ids are how the next request is recognised.
            generated_s: seconds since the rollout's first call.
            starved: the client's own budget left no room for a fair sample.

        Raises:
            ValueError: ids, log-probabilities and version spans of the generation do not fit together.
        """
        index = len(self._calls)
        view, parent = prepared.view, prepared.lineage_parent
        call = ModelCall(
            id=completion.id,
            index=index,
            lineage_parent=parent,
            prefix_parent=prepared.prefix_parent,
            prefix_len=prepared.prefix_len,
            delta_token_ids=_frozen(prepared.prompt_token_ids[prepared.prefix_len :]),
            token_ids=_frozen(generation.token_ids),
            logprobs=_frozen(generation.logprobs),
            policy_versions=generation.policy_versions,
            sampling=sampling,
            finish_reason=completion.finish_reason,
            kind=prepared.declared or prepared.marked or ("main" if parent is None else self._calls[parent].kind),
            state="live",
            dialect=prepared.request.dialect,
            drift_reason=prepared.drift_reason,
            request_hash=view.transcript.request_hash,
            role_hash=view.role_hash,
            starved=starved,
            timing=CallTiming(prepared.arrived_s, generated_s, None),
            api_usage=None if generation.relayed is None else generation.relayed.usage,
            routed_experts=generation.routed_experts,
        )
        call.validate()
        tool_names = _tool_names(prepared.request)
        segment = self._segment(index, view)
        spoken = _spoken(view, prepared.declared or prepared.marked, completion, segment)
        self._nodes.append(
            _Node(call, prepared.declared, prepared.marked, tool_names, segment, view.echoes_parent, spoken)
        )
        self._calls.append(call)
        self._latest_prompt = (index, prepared.prompt_token_ids)
        self._children.setdefault(parent, []).append(index)
        self._index.add(view, completion)
        for key, length in prepared.turn_ends:
            self._turn_ends.setdefault(key, (index, length))
        self._turn_ends[view.exact_with_reply(index)] = (index, call.history_len)
        return index

    def mark_delivered(self, index: int, delivered_s: float) -> None:
        """Note that the harness has every byte of a reply. Seconds since the rollout's first call."""
        self._nodes[index].delivered_s = delivered_s
        self._index.mark_delivered(index)

    def freeze(self) -> PrefixTree:
        """Decide kind and state of every call and return the finished tree."""
        facts = self._facts()
        kinds = assign_kinds(facts)
        states = assign_states(facts, kinds)
        return PrefixTree(
            [
                dataclasses.replace(
                    node.call,
                    kind=kind,
                    state=state,
                    timing=dataclasses.replace(node.call.timing, delivered_s=node.delivered_s),
                )
                for node, kind, state in zip(self._nodes, kinds, states, strict=True)
            ]
        )

    def kind_of(self, prepared: PreparedCall) -> CallKind:
        """Return the kind a call that is not answered yet would have if it was the last."""
        view = prepared.view
        facts = CallFacts(
            lineage_parent=prepared.lineage_parent,
            segment=len(self._nodes),
            declared=prepared.declared,
            marked=prepared.marked,
            role_hash=view.role_hash,
            tool_names=_tool_names(prepared.request),
            request_hash=view.transcript.request_hash,
            delivered=False,
            echoes_parent=view.echoes_parent,
        )
        return assign_kinds([*self._facts(), facts])[-1]

    def conversation(self, tree: PrefixTree) -> tuple[Message, ...]:
        """Return what the main agent and its user said, in the words of `freeze`'s tree; see `trace.conversation`."""
        return conversation(tree.calls, [node.spoken for node in self._nodes[: len(tree)]])

    def _facts(self) -> list[CallFacts]:
        return [
            CallFacts(
                lineage_parent=node.call.lineage_parent,
                segment=node.segment,
                declared=node.declared,
                marked=node.marked,
                role_hash=node.call.role_hash,
                tool_names=node.tool_names,
                request_hash=node.call.request_hash,
                delivered=node.delivered_s is not None,
                echoes_parent=node.echoes_parent,
            )
            for node in self._nodes
        ]

    def _segment(self, index: int, view: RequestView) -> int:
        """Return the segment of a call: that of the conversation it goes on with or tries to open again.

        What has been gone on from is not tried again: the same beginning later (after a compaction) is a new segment.
        """
        if view.parent is not None:
            segment = self._nodes[view.parent].segment
            self._continued.add(segment)
            return segment
        opener = self._index.reopened(view)
        again = None if opener is None else self._nodes[opener].segment
        return index if again is None or again in self._continued else again

    def _prompt(self, view: RequestView, rendering: _Rendering) -> tuple[_Prompt, str | None]:
        """Make the exact prompt, and say why it could not go on from the lineage parent's tokens."""
        prompt = self._beginning(view, rendering)
        if prompt is not None:
            prompt = self._extended(prompt, view, rendering)
        if prompt is not None:
            return prompt, self._drift(view, spliced=True)
        return _Prompt(rendering.afresh(view.messages)), self._drift(view, spliced=False)

    def _beginning(self, view: RequestView, rendering: _Rendering) -> _Prompt | None:
        """Return the longest stored beginning of this request that ends with a stored reply.

        Where none is stored, the messages before the first reply are rendered and that reply's ids put behind them.
        None when no reply can be put in by id: a message that is not ours stands behind each.
        """
        foreign = max(view.last_foreign, 0)  # nor the very first message, which no prompt comes before
        usable = [at for at in sorted(view.known) if at > foreign]
        for at in reversed(usable):
            end = self._turn_ends.get(view.exact[at + 1])
            if end is not None:
                return _Prompt(self._read(*end), last=at, origin=end)
        if not usable:
            return None
        first = usable[0]
        prompt = _Prompt(rendering.afresh(view.messages[:first]))
        self._put_reply(prompt, view, first)
        return prompt

    def _extended(self, prompt: _Prompt, view: RequestView, rendering: _Rendering) -> _Prompt | None:
        """Bridge turn by turn to the end of the request; None when the renderer cannot prove a bridge."""
        later = [at for at in sorted(view.known) if at > prompt.last]
        for at in [*later, len(view.messages)]:
            reply = self._calls[view.known[prompt.last]].token_ids
            behind = self.tail(prompt.tokens[: len(prompt.tokens) - len(reply)])
            bridge = rendering.bridge(behind, reply.tolist(), view.messages[prompt.last : at])
            if bridge is None:
                return None
            prompt.append(bridge)
            if at < len(view.messages):
                self._put_reply(prompt, view, at)
        return prompt

    def _put_reply(self, prompt: _Prompt, view: RequestView, at: int) -> None:
        prompt.append(self._calls[view.known[at]].token_ids)
        prompt.last = at
        prompt.turn_ends.append((view.exact[at + 1], len(prompt.tokens)))

    def tail(self, prompt: TokenIds) -> list[int]:
        """Return the prompt from its last turn close on: all a bridge looks at, at a cost that does not grow."""
        window = 64
        while True:
            tail: list[int] = prompt[-window:].tolist()
            for at in range(len(tail) - 1, -1, -1):
                if tail[at] in self._stops:
                    return tail[at:]
            if window >= len(prompt):
                return tail
            window *= 8

    def _drift(self, view: RequestView, *, spliced: bool) -> str | None:
        if view.parent is None:
            return None
        if view.drift is not None:
            return view.drift
        return None if spliced else "bridge_unproven"

    def _read(self, index: int, length: int, *, start: int = 0) -> TokenIds:
        """Return history(call)[start:length]. The latest prompt is at hand whole, older ones are gathered."""
        return read_tokens(self._calls, index, length, start=start, at_hand=self._latest_prompt)

    def _shared_prefix(self, prompt: _Prompt, view: RequestView) -> tuple[int | None, int]:
        """Return the call of the same conversation whose history this prompt shares most tokens with."""
        tokens = prompt.tokens
        siblings = self._children.get(view.parent, [])[-RELATIVES:]
        relatives = [*siblings, view.parent] if view.parent is not None else siblings
        best: int | None = None
        longest = 0
        for index in reversed(relatives):
            call = self._calls[index]
            if min(call.history_len, len(tokens)) <= longest:
                continue
            known = min(self._common_origin(index, prompt.origin), len(tokens))
            shared = known + _common_length(tokens[known:], self._read(index, call.history_len, start=known))
            if shared < call.history_len:
                shared = min(shared, call.prompt_len)  # never into the middle of what was sampled
            if shared > longest:
                best, longest = index, shared
        return best, longest

    def _common_origin(self, index: int, origin: tuple[int, int]) -> int:
        """Return how many tokens history(index) surely shares with the call a prompt was begun from."""
        call, shared = origin
        at: int | None = index
        shared = min(shared, self._calls[index].history_len)
        while at is not None and at >= call and shared > 0:
            if at == call:
                return shared
            shared = min(shared, self._calls[at].prefix_len)
            at = self._calls[at].prefix_parent
        return 0


def _tool_names(request: ChatRequest) -> tuple[str, ...]:
    return tuple(tool.name for tool in request.tools)


def _spoken(view: RequestView, known_kind: CallKind | None, completion: Completion, segment: int) -> Spoken:
    """Return what a call added to its conversation; of a call that is surely a side call only tools are heard.

    A summariser is shown the whole conversation over again.
    """
    rewritten = view.drift == "history_rewritten"
    start = 0 if rewritten else view.position + 1
    roles = ("user", "tool") if known_kind in (None, "main") else ("tool",)
    return Spoken(
        heard=tuple(message for message in view.messages[start : view.lasting] if message.role in roles),
        reply=completion.as_message(),
        segment=segment,
        retells=rewritten or (view.parent is None and bool(view.transcript.replies)),
    )


def _common_length(a: TokenIds, b: TokenIds) -> int:
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


def _frozen(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    """Return a read-only copy: the caller may go on using its buffer."""
    copy = array.copy()
    copy.flags.writeable = False
    return copy
