"""An engine that is no engine: a model behind somebody else's API answers, through any harness, for evaluation.

The proxy awaits `generate` as with any engine, but what goes out is the conversation of the call in hand, in the form
of OpenAI's chat completions whatever dialect the harness speaks, and what comes back is a message. Such an API tells no
token ids. Those of the tree are a stand-in's (ChatML over bytes), by which lineage and the store work as always.
Invariant: every generation made here is marked `relayed`, and nothing that is so marked is ever trained.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import httpx
import numpy as np
from pydantic import AliasChoices, BaseModel, Field, ValidationError

from clawgym_env.call_text import arguments_text
from clawgym_env.chat_api import CONNECT_S, ApiCall, ApiError, ApiRefused, ChatApi, ChatReply
from clawgym_env.engine.base import (
    ApiUsage,
    Generation,
    RelayedReply,
    SamplingParams,
    TokenIds,
    VersionSpan,
    call_in_hand,
)
from clawgym_env.errors import ContextOverflow, EngineError
from clawgym_env.messages import ChatRequest, Json, Message, ToolCall, ToolSpec, well_formed
from clawgym_env.rendering import ChatMLRenderer, message_dicts
from clawgym_env.tokenizer import byte_tokenizer
from clawgym_env.trace.digests import bare_id

if TYPE_CHECKING:
    from renderers.base import Renderer

logger = logging.getLogger(__name__)

USUAL_WINDOW = 131_072
"""Tokens, where neither the API nor the user says how many."""
BYTES_PER_TOKEN = 4
"""Of usual text in usual vocabularies; for what is needed before the API has counted."""
REMEMBERED_CALLS = 1 << 16
MAX_SEED = (1 << 31) - 1
"""Some servers read a seed into 32 bits."""
WITHHELD = "(A content filter of the API withheld this reply.)"


@dataclass(frozen=True, kw_only=True)
class RelaySettings:
    """What can stand behind the model's name: `openai:URL#MODEL?context_length=200000&reasoning_effort=low`."""

    context_length: int | None = None
    """Tokens of the model's window, which harnesses are told; by default what the API tells, or `USUAL_WINDOW`."""
    reasoning_effort: str | None = None
    """Sent as it is, where given."""
    timeout_s: float = 600.0
    """Of one request."""
    max_retries: int = 6
    """How often a request is sent again after 429, 5xx, a broken connection or no answer."""
    max_concurrency: int = 64
    """Requests under way at once."""


@dataclass(frozen=True, slots=True)
class _ToldCall:
    """What an API wants to see again of a tool call; arguments, which may be long, are the harness's to keep."""

    id: str | None
    extra: Mapping[str, Json]


class RelayEngine:
    """Satisfies `engine.base.RelayingEngine`. Made by `connect`; used on one event loop."""

    def __init__(
        self, api: ChatApi, *, context_length: int = USUAL_WINDOW, reasoning_effort: str | None = None
    ) -> None:
        self.tokenizer = byte_tokenizer()
        """Of the stand-in."""
        self._renderer: Renderer = ChatMLRenderer(self.tokenizer)
        self._api = api
        self._context_length = context_length
        self._reasoning_effort = reasoning_effort
        self._reasoning_field: Literal["reasoning_content", "reasoning"] | None = None
        """Under which name the API tells its reasoning; it gets back under the same what the harness sends back."""
        self._calls: OrderedDict[str, _ToldCall] = OrderedDict()
        """By the id that harnesses are given."""
        self._running = asyncio.Event()
        self._running.set()

    @classmethod
    def connect(
        cls, url: str, model: str, *, api_key: str = "", settings: RelaySettings = RelaySettings()
    ) -> RelayEngine:
        """Make sure that something answers there which takes the key, and ask for the model's window. Blocking.

        Args:
            url: up to and including `/v1`.
            model: as the API knows it.

        Raises:
            EngineError: nothing answers there, or the key is refused.
            ValueError: no such address, or no model.
        """
        api = ChatApi(
            url,
            model,
            api_key=api_key,
            timeout_s=settings.timeout_s,
            max_retries=settings.max_retries,
            max_concurrency=settings.max_concurrency,
        )
        told = _told_window(api, api_key)
        return cls(
            api,
            context_length=settings.context_length or told or USUAL_WINDOW,
            reasoning_effort=settings.reasoning_effort,
        )

    @property
    def name(self) -> str:
        """What results call it."""
        return f"openai:{self._api.url}#{self._api.model}"

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def context_length(self) -> int:
        """What harnesses are told; the API alone judges what fits."""
        return self._context_length

    @property
    def policy_version(self) -> int:
        return 0

    def estimated_tokens(self, token_ids: Sequence[int] | TokenIds) -> int:
        """Return about how many tokens of the API's a stand-in's ids are."""
        return -(-len(token_ids) // BYTES_PER_TOKEN)

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Send the conversation of the call in hand and return the reply. Cancelling the task closes the connection.

        Raises:
            ContextOverflow: the API says that the conversation does not fit.
            EngineError: it did not answer, or refuses; or this was not asked by the proxy.
        """
        request = call_in_hand().request
        await self._running.wait()
        try:
            reply = await self._api.complete(lambda refused: self._body(request, sampling, refused))
        except ApiRefused as refusal:
            if refusal.overflow:
                estimate = self.estimated_tokens(prompt_token_ids)
                raise ContextOverflow(max(estimate, self._context_length), self._context_length) from refusal
            if not refusal.filtered:
                raise EngineError(f"Expected a reply of {self.name}, got {refusal}. {_cure(refusal)}") from refusal
            logger.warning("%s filtered a prompt: %s", self.name, refusal)
            return self._generation(Message("assistant", WITHHELD), "stop", None, prompt_token_ids, sampling)
        except ApiError as error:
            raise EngineError(f"Expected a reply of {self.name}, got {error}.") from error
        finish: Literal["stop", "length"] = "length" if reply.finish_reason == "length" else "stop"
        return self._generation(self._message(reply), finish, reply.usage, prompt_token_ids, sampling)

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Refuse.

        Raises:
            EngineError: always.
        """
        raise EngineError(
            f"Expected an engine over weights of ours, got {self.name}, which can only be evaluated. "
            "Train with engine=learner.engine()."
        )

    async def pause(self) -> None:
        """Send no further request; those under way are answered."""
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        """Nothing is held."""

    def _body(self, request: ChatRequest, sampling: SamplingParams, refused: Set[str]) -> dict[str, Json]:
        """Return the request in the form of chat completions; the harness's own sampling is not obeyed here either."""
        optional: dict[str, Json] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1.0 else None,
            "top_k": sampling.top_k or None,
            "seed": None if sampling.seed is None else sampling.seed & MAX_SEED,
            "reasoning_effort": self._reasoning_effort,
        }
        reasoning = None if self._reasoning_field in refused else self._reasoning_field
        body: dict[str, Json] = {"messages": [self._wire_message(one, reasoning) for one in request.messages]}
        if request.tools:
            body["tools"] = [_wire_tool(tool) for tool in request.tools]
        body["max_completion_tokens" if "max_tokens" in refused else "max_tokens"] = sampling.max_tokens
        return body | {name: value for name, value in optional.items() if value is not None and name not in refused}

    def _wire_message(self, message: Message, reasoning_field: str | None) -> dict[str, Json]:
        wire: dict[str, Json] = {"role": message.role, "content": well_formed(message.content)}
        if message.tool_call_id is not None:
            known = self._calls.get(bare_id(message.tool_call_id))
            wire["tool_call_id"] = _own_id(known) or message.tool_call_id
        if message.tool_calls:
            wire["content"] = wire["content"] or None
            wire["tool_calls"] = [self._wire_call(call) for call in message.tool_calls]
        if message.reasoning and reasoning_field is not None:
            wire[reasoning_field] = well_formed(message.reasoning)
        return wire

    def _wire_call(self, call: ToolCall) -> dict[str, Json]:
        """Return a call as the harness tells it, under the API's own id and with what else it put into it."""
        known = self._calls.get(bare_id(call.id))
        extra: Mapping[str, Json] = {} if known is None else known.extra
        function: dict[str, Json] = {"name": call.name, "arguments": well_formed(call.arguments) or "{}"}
        return {**extra, "id": _own_id(known) or call.id, "type": "function", "function": function}

    def _message(self, reply: ChatReply) -> Message:
        """Return what the harness is told, tool calls under ids that no other call has."""
        said = reply.message
        if said.reasoning_content or said.reasoning:
            self._reasoning_field = "reasoning_content" if said.reasoning_content else "reasoning"
        text = said.text or said.refusal or ""
        if reply.finish_reason == "content_filter" and not text and not said.tool_calls:
            text = WITHHELD
        calls = tuple(self._remembered(call) for call in said.tool_calls or ())
        return Message("assistant", well_formed(text), well_formed(said.thoughts) or None, calls)

    def _remembered(self, call: ApiCall) -> ToolCall:
        # Servers count from 0 in every reply, or in letters that harnesses strip.
        call_id = f"call{secrets.token_hex(12)}"
        self._calls[call_id] = _ToldCall(call.id, call.model_extra or {})
        if len(self._calls) > REMEMBERED_CALLS:
            self._calls.popitem(last=False)
        return ToolCall(call_id, well_formed(call.function.name), arguments_text(call.function.arguments))

    def _generation(
        self,
        message: Message,
        finish: Literal["stop", "length"],
        usage: ApiUsage | None,
        prompt_token_ids: Sequence[int] | TokenIds,
        sampling: SamplingParams,
    ) -> Generation:
        """Return the reply in the stand-in's tokens, as it would have sampled them."""
        ids = np.array(self._stand_in(message, closed=finish == "stop"), dtype=np.int32)
        if usage is None:
            usage = ApiUsage(
                prompt_tokens=self.estimated_tokens(prompt_token_ids), completion_tokens=self.estimated_tokens(ids)
            )
        return Generation(
            token_ids=ids,
            logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason=finish,
            policy_versions=(VersionSpan(0, 0, len(ids)),),
            sampling=sampling.model_copy(update={"given": True}),
            relayed=RelayedReply(message, usage),
        )

    def _stand_in(self, message: Message, *, closed: bool) -> list[int]:
        rendered = self._renderer.render(message_dicts([message]))
        ids = [token for token, sampled in zip(rendered.token_ids, rendered.sampled_mask, strict=True) if sampled]
        thoughts = f"<think>{message.reasoning}</think>\n" if message.reasoning else ""
        return [*self.tokenizer.encode_literal(thoughts), *(ids if closed else ids[:-1])]


class _Card(BaseModel):
    """An entry of `/models`, with the names that servers have for the window."""

    id: str
    window: int | None = Field(
        default=None,
        validation_alias=AliasChoices("max_model_len", "context_length", "context_window", "max_context_length"),
    )


class _Cards(BaseModel):
    data: list[_Card]


def _told_window(api: ChatApi, api_key: str) -> int | None:
    """Return the window that `/models` tells for the model; many servers tell none, or have no such route.

    Raises:
        EngineError: nothing answers there, or the key is refused.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with httpx.Client(headers=headers, timeout=CONNECT_S, trust_env=False) as client:
            response = client.get(f"{api.url}/models")
    except httpx.HTTPError as error:
        problem = api.without_key(f"{type(error).__name__}: {error}")
        raise EngineError(
            f"Expected an OpenAI-compatible server at {api.url}, got {problem}. "
            "Give the address up to and including /v1."
        ) from error
    if response.status_code in (401, 403):
        refusal = ApiRefused(response.status_code, api.without_key(response.text))
        raise EngineError(f"Expected {api.url} to take the API key, got {refusal}. {_cure(refusal)}")
    try:
        cards = _Cards.model_validate_json(response.content).data
    except ValidationError:
        return None
    own = [card for card in cards if card.id == api.model]
    return next((card.window for card in own or (cards if len(cards) == 1 else [])), None)


def _own_id(call: _ToldCall | None) -> str | None:
    return None if call is None else call.id


def _wire_tool(tool: ToolSpec) -> dict[str, Json]:
    function: dict[str, Json] = {
        "name": tool.name,
        "description": well_formed(tool.description),
        "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _cure(refusal: ApiRefused) -> str:
    if refusal.status in (401, 403):
        return "Set CLAWGYM_RELAY_API_KEY, or give api_key."
    return "Check the address, the model's name and what it takes."
