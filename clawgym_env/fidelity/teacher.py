"""The engine that says a script in a policy's own tokens, and writes down everything it was asked and answered.

Stands where the policy's engine stands, behind the real proxy. It takes the policy's tokenizer and renderer, but not
its weights: the replies are those of a `Scenario`, encoded as the policy would have sampled them, each token with a
log-probability of its own. Invariant: a `Record` is a copy; what happens to the arrays afterwards does not reach it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from clawgym_env.engine.base import Generation, Logprobs, SamplingParams, TokenIds, VersionSpan, call_in_hand
from clawgym_env.errors import EngineError
from clawgym_env.fidelity.scenarios import CHILD_MARK, INSTRUCTION, SUMMARY, Progress, Scenario, Turn
from clawgym_env.fidelity.tools import Toolbox, Unsayable
from clawgym_env.harness import HarnessAdapter
from clawgym_env.messages import ChatRequest, Json, Message, ToolCall
from clawgym_env.policy import PolicyText
from clawgym_env.rendering import message_dicts, parse_reply, tool_dicts
from clawgym_env.tokenizer import TextTokenizer
from clawgym_env.trace.classify import marked_kind

if TYPE_CHECKING:
    from renderers.base import Renderer

Role = Literal["main", "child", "compaction", "auxiliary"]

WIDE = 1 << 20
"""A window that no harness fills."""


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """One generate(): what the engine was asked and what it answered."""

    call_id: str
    """Of the completion; the tree's call has the same."""
    role: Role
    request: ChatRequest
    prompt_token_ids: TokenIds
    token_ids: TokenIds
    logprobs: Logprobs


class TeacherEngine:
    """Satisfies `engine.base.Engine`; made for one run of one scenario."""

    def __init__(
        self,
        scenario: Scenario,
        text: PolicyText,
        *,
        adapter: HarnessAdapter,
        context_length: int = WIDE,
        rows: int = 100,
        tamper: Callable[[Generation], Generation] = lambda generation: generation,
    ) -> None:
        """Make an engine.

        Args:
            adapter: asked what is a compaction and what a side call.
            rows: see `Progress`.
            tamper: what a faulty engine would do to its answer; for tests of the suite itself.
        """
        self.records: list[Record] = []
        self.segments = 1
        """Stretches of the main agent's history between two compactions, as the requests show them."""
        self.missing = ""
        """Why a turn of the script could not be said."""
        self.hang_up_due = False
        """Whether the next last byte is to be lost; whoever cuts the connection clears it."""
        self.hung_up = False
        self._scenario = scenario
        self._text = text
        self._adapter = adapter
        self._context_length = context_length
        self._rows = rows
        self._tamper = tamper
        self._turns: dict[Role, int] = dict.fromkeys(("main", "child", "compaction", "auxiliary"), 0)
        self._compacted_at = 0
        self._summarised = False
        self._seen_tools = False

    @property
    def renderer(self) -> Renderer:
        return self._text.renderer

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def policy_version(self) -> int:
        return 0

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Say the next line of whoever asks."""
        call = call_in_hand()
        role = self._role(call.request)
        ids, finish = self._say(role, call.request)
        if len(ids) > sampling.max_tokens:
            ids, finish = ids[: sampling.max_tokens], "length"
        prompt = np.array(prompt_token_ids, dtype=np.int32)
        token_ids = np.array(ids, dtype=np.int32)
        logprobs = np.random.default_rng(len(self.records)).uniform(-3.0, 0.0, len(ids)).astype(np.float32)
        self.records.append(Record(call.id, role, call.request, prompt, token_ids, logprobs))
        spans = (VersionSpan(0, 0, len(ids)),)
        return self._tamper(Generation(token_ids.copy(), logprobs.copy(), finish, spans))

    def update_weights(self, apply: Callable[[], None]) -> int:
        raise EngineError("Expected no weight update: the conformance suite has no weights.")

    async def pause(self) -> None:
        """Nothing decodes."""

    async def resume(self) -> None:
        """Nothing decodes."""

    async def close(self) -> None:
        """Nothing is held."""

    def _role(self, request: ChatRequest) -> Role:
        """Say who asks, by the request alone."""
        users = [message.content for message in request.messages if message.role == "user"]
        opens = all(message.role != "assistant" for message in request.messages)
        kind = self._adapter.classify(request, {}) or marked_kind(request, opens=opens)
        if kind in ("compaction", "auxiliary"):
            return kind
        if any(CHILD_MARK in text for text in users) and not any(INSTRUCTION in text for text in users):
            return "child"
        self._seen_tools = self._seen_tools or bool(request.tools)
        return "auxiliary" if self._seen_tools and not request.tools else "main"

    def _say(self, role: Role, request: ChatRequest) -> tuple[list[int], Literal["stop", "length"]]:
        try:
            return write_turn(self._text, self._turn(role, request), request)
        except Unsayable as error:
            self.missing = str(error)
            raise EngineError(f"Expected a turn of the script, got none: {error}.") from error

    def _turn(self, role: Role, request: ChatRequest) -> Turn:
        turn = self._turns[role]
        self._turns[role] += 1
        if role in ("compaction", "auxiliary"):
            self._summarised = self._summarised or role == "compaction"
            return Turn(SUMMARY)
        if role == "main":
            if self._summarised:
                self._summarised = False
                self.segments += 1
                self._compacted_at = turn
            self.hang_up_due = self._scenario.fault == "hang_up" and turn == 1
        script = self._scenario.main if role == "main" or self._scenario.child is None else self._scenario.child
        progress = Progress(turn, self.segments - 1, turn - self._compacted_at, self._rows)
        return script(progress)(Toolbox(request), progress)


def write_turn(text: PolicyText, turn: Turn, request: ChatRequest) -> tuple[list[int], Literal["stop", "length"]]:
    """Encode a turn as the policy would have sampled it, its closing id last unless it is cut.

    Raises:
        Unsayable: no reply of this template reads back as this turn.
    """
    calls = [(call.name, json.dumps(dict(call.arguments), ensure_ascii=False)) for call in turn.calls]
    # Some templates have no room for words beside a call.
    for words in (turn.text, "") if calls else (turn.text,):
        message = Message("assistant", words, None, tuple(ToolCall(f"scripted{n}", *c) for n, c in enumerate(calls)))
        body, closer = _sampled_part(text.renderer, message, request)
        if turn.broken:
            body = _without_end_of_arguments(text.tokenizer, body)
        read = parse_reply(text.renderer, [*body, closer], request.tools).tool_calls
        if turn.broken and read and _object(read[-1][1]) is None:
            break
        if not turn.broken and [(name, _object(said)) for name, said in read] == [(n, _object(a)) for n, a in calls]:
            break
    else:
        what = "arguments that are no JSON" if turn.broken else f"{len(calls)} calls in one reply"
        raise Unsayable(f"the policy's template has no way to write {what}")
    return (body, "length") if turn.cut else ([*body, closer], "stop")


def _sampled_part(renderer: Renderer, reply: Message, request: ChatRequest) -> tuple[list[int], int]:
    """Return what a reply adds to the prompt that asks for it, and the id that closes it.

    Raises:
        Unsayable: the renderer writes a reply in other tokens than it asks for one.
    """
    stops = renderer.get_stop_token_ids()
    question = [Message("user", "?")]
    call_id = reply.tool_calls[0].id if reply.tool_calls else None
    following = Message("user", "!") if call_id is None else Message("tool", "!", tool_call_id=call_id)
    tools = tool_dicts(request.tools)
    prompt = renderer.render_ids(message_dicts(question), tools=tools, add_generation_prompt=True)
    # A template that opens a reasoning block in its prompt has to be given some reasoning.
    for reasoning in (None, "The script says so."):
        said = Message("assistant", reply.content, reasoning, reply.tool_calls)
        # Where a turn has no close of its own, what opens the next one ends it.
        for later in ((), (following,)):
            ids = renderer.render_ids(message_dicts([*question, said, *later]), tools=tools)
            if ids[: len(prompt)] != prompt:
                continue
            end = next((at for at in range(len(prompt), len(ids)) if ids[at] in stops), None)
            if end is not None:
                return ids[len(prompt) : end], ids[end]
    raise Unsayable(f"{type(renderer).__name__} writes a reply in other tokens than it asks for one")


def _without_end_of_arguments(tokenizer: TextTokenizer, body: list[int]) -> list[int]:
    """Drop the quotes and braces that close the last call's arguments, so that they are no JSON any more."""
    texts = [tokenizer.decode(token) for token in body]
    last = max((at for at, text in enumerate(texts) if "}" in text), default=None)
    if last is None:
        return body
    first = last
    while first > 0 and re.fullmatch(r"[\s\"'}]+", texts[first - 1]):
        first -= 1
    return body[:first] + body[last + 1 :]


def _object(arguments: str) -> Mapping[str, Json] | None:
    return ToolCall("", "", arguments).parsed_arguments()
