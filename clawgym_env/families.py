"""A model family of the `renderers` library, made fit for what agent harnesses really send.

`rendering.make_renderer` puts one in front of every renderer of the library. The library follows each family's own
chat template, which rejects histories that harnesses make (a system message in mid-conversation, two tool calls in one
Llama turn) and gives up a bridge where a policy's reply is broken. Here such histories are fitted to the family, in
one place, the same way for a whole conversation and for its extension. Invariants: a legal history is shown or refused
by a `ProxyError` that names the family, a reply of any ids is parsed, and a bridge keeps every sampled id.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

from clawgym_env.chatml import tool_list
from clawgym_env.errors import EngineError, ProxyError
from clawgym_env.harmony import harmony_vocabulary
from clawgym_env.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers.base import Message as MessageDict
    from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, Renderer
    from renderers.base import ToolCall as ToolCallDict
    from renderers.base import ToolSpec as ToolDict

logger = logging.getLogger(__name__)

Ids: TypeAlias = list[int]

_SYSTEM_ANYWHERE = frozenset({"qwen3", "glm-4.5", "glm-5", "glm-5.1", "glm-5.3", "llama-3", "kimi-k2"})
"""Families whose template has a system turn at any place."""
_ARGUMENTS_ONE_BY_ONE = ("qwen3.", "glm-", "minimax")
"""Beginnings of families that write each argument of a call by itself and drop what is no object."""
_VALUE = re.compile(
    r"<parameter=(?P<name>[^>]+)>\n?(?P<text>.*?)\n?</parameter>"
    r"|<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    re.DOTALL,
)
"""An argument as these families write it."""
_DEEPSEEK = ("deepseek-v3", "deepseek-r1")


def make_family(tokenizer: TextTokenizer, family: str) -> FamilyRenderer:
    """Make the renderer of a family over a tokenizer. Reasoning of past turns stays: nothing already said changes.

    Raises:
        EngineError: no such family, or the vocabulary lacks its tokens.
    """
    from renderers.base import create_renderer
    from renderers.configs import config_from_name

    config = config_from_name(family)
    if config is None:
        raise EngineError(f"Expected a concrete renderer family, got {family!r}.")
    try:
        with tokenizer.special_texts(), harmony_vocabulary(tokenizer) if family == "gpt-oss" else nullcontext():
            inner = create_renderer(tokenizer, type(config)(thinking_retention="all"))
    except AssertionError as error:  # how the library says that a token is not there
        raise EngineError(f"Expected a vocabulary of the family {family!r}: {error}. Name another renderer.") from error
    return FamilyRenderer(inner, family, tokenizer)


class FamilyRenderer:
    """Satisfies `renderers.base.Renderer`. `message_indices` of what it renders count the fitted messages."""

    def __init__(self, inner: Renderer, family: str, tokenizer: TextTokenizer) -> None:
        self.family = family
        self.inner = inner
        self.tokenizer = tokenizer
        self._stops = frozenset(inner.get_stop_token_ids())
        self._end_of_reasoning = _token_or_text(tokenizer, "<|end|>" if family == "gpt-oss" else "</think>")
        self._python_tag = tokenizer.convert_tokens_to_ids("<|python_tag|>") if family == "llama-3" else None
        self._assistant = tokenizer.convert_tokens_to_ids("<｜Assistant｜>")
        self._outputs_end = tokenizer.convert_tokens_to_ids("<｜tool▁outputs▁end｜>") if family in _DEEPSEEK else None

    @property
    def is_prefix_stable(self) -> bool:
        """The library's word on full renders; bridges are stable for every family."""
        return self.inner.is_prefix_stable and self.family != "deepseek-r1"  # which drops past reasoning all the same

    def get_stop_token_ids(self) -> Ids:
        """Return the ids that end a turn."""
        return self.inner.get_stop_token_ids()

    def render(
        self,
        messages: list[MessageDict],
        *,
        tools: list[ToolDict] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Render a whole conversation.

        Raises:
            ProxyError: the family has no way to show it.
        """
        with self._refusing():
            fitted = self._opening(messages, tools)
            return self.inner.render(fitted, tools=tools, add_generation_prompt=add_generation_prompt)

    def render_ids(
        self,
        messages: list[MessageDict],
        *,
        tools: list[ToolDict] | None = None,
        add_generation_prompt: bool = False,
    ) -> Ids:
        """Render to ids only.

        Raises:
            ProxyError: the family has no way to show it.
        """
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Ids,
        previous_completion_ids: Ids,
        new_messages: list[MessageDict],
        *,
        tools: list[ToolDict] | None = None,
    ) -> RenderedTokens | None:
        """Extend prompt and sampled ids by new messages; None when a message is the assistant's own.

        The library bridges no reply that ended while reasoning, and breaks on some that do not parse. What follows a
        reply depends on how it ended and not on what it said: the bridge is then that of an empty one with this end.
        """
        new = self._later(new_messages)
        prompt, reply = self._turn(previous_prompt_ids), list(previous_completion_ids)
        try:
            bridged = self._bridged(prompt, reply, new, tools)
        except Exception:
            logger.debug("The %s renderer broke on a reply.", self.family, exc_info=True)
            bridged = None
        if bridged is None:
            end = next((i for i, token in enumerate(reply) if token in self._stops), len(reply))
            reply = [*self._end_of_reasoning, *reply[end:]]
            with self._refusing():
                bridged = self._bridged(prompt, reply, new, tools)
        if bridged is None:
            return None
        seen, kept = len(prompt) + len(reply), [*previous_prompt_ids, *previous_completion_ids]
        return dataclasses.replace(
            bridged,
            token_ids=[*kept, *bridged.token_ids[seen:]],
            message_indices=[*([-1] * len(kept)), *bridged.message_indices[seen:]],
            sampled_mask=[False] * (len(kept) + len(bridged.token_ids) - seen),
            is_content=[],
        )

    def parse_response(
        self,
        token_ids: Ids,
        *,
        tools: list[ToolDict] | None = None,
        prompt_ids: Ids | None = None,
    ) -> ParsedResponse:
        """Parse one sampled turn. A reply that the family's parser breaks on is plain text."""
        from renderers.base import ParsedResponse

        ids = list(token_ids)
        if ids and ids[0] == self._python_tag:  # Llama 3 may put it before a call; the library knows the call only
            ids = ids[1:]
        try:
            parsed = self.inner.parse_response(ids, tools=tools, prompt_ids=self._turn(prompt_ids or []) or None)
        except Exception:  # the library's parsers are not total: numbers of 5,000 digits, JSON 1,000 levels deep
            logger.debug("The %s parser broke on a reply.", self.family, exc_info=True)
            end = next((i for i, token in enumerate(ids) if token in self._stops), len(ids))
            return ParsedResponse(content=self.tokenizer.decode(ids[:end]))
        parsed.content = parsed.content.strip()  # as most families do; GLM leaves the template's own newline in it
        if self.family.startswith(_ARGUMENTS_ONE_BY_ONE):
            for call in parsed.tool_calls:
                call.arguments = _unstripped(call)
        return parsed

    def _bridged(
        self, prompt: Ids, reply: Ids, new: list[MessageDict], tools: list[ToolDict] | None
    ) -> RenderedTokens | None:
        bridged = self.inner.bridge_to_next_turn(prompt, reply, new, tools=tools)
        known = [*prompt, *reply]
        return bridged if bridged is not None and bridged.token_ids[: len(known)] == known else None

    def _turn(self, prompt: Ids) -> Ids:
        """Return the prompt so that the library finds the open turn: DeepSeek opens none after tool results."""
        if self._assistant is None or self._outputs_end is None:
            return prompt
        at = next((i for i in reversed(range(len(prompt))) if prompt[i] in (self._assistant, self._outputs_end)), -1)
        return [self._assistant, *prompt[at + 1 :]] if at >= 0 and prompt[at] == self._outputs_end else prompt

    def _opening(self, messages: Sequence[MessageDict], tools: Sequence[ToolDict] | None) -> list[MessageDict]:
        """Fit a whole conversation: leading system messages become one, which offers the tools where no template does.

        Llama writes the tools into the first message of the user, so there must be one.
        """
        leading = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
        texts = [_text(message) for message in messages[:leading]]
        if tools and self.family in _DEEPSEEK:
            texts.append(tool_list(tools))
        fitted: list[MessageDict] = [{"role": "system", "content": "\n\n".join(texts)}] if texts else []
        later = self._later(messages[leading:])
        if tools and self.family == "llama-3" and (not later or later[0]["role"] != "user"):
            fitted.append({"role": "user", "content": ""})
        return [*fitted, *later]

    def _later(self, messages: Sequence[MessageDict]) -> list[MessageDict]:
        """Fit messages behind the leading system messages; each by itself, so that an extension changes no other."""
        return [fitted for message in messages for fitted in self._fitted(message)]

    def _fitted(self, message: MessageDict) -> Iterator[MessageDict]:
        calls = message.get("tool_calls") or []
        if message["role"] == "system" and self.family not in _SYSTEM_ANYWHERE:
            # gpt-oss would move its first system message to the front, wherever it stands.
            yield {**message, "role": "developer" if self.family == "gpt-oss" else "user"}
        elif calls and self.family == "llama-3":  # one call in a turn, and no text beside it
            if _text(message):
                yield {"role": "assistant", "content": _text(message)}
            for call in calls:
                yield {"role": "assistant", "content": "", "tool_calls": [call]}
        elif calls and self.family.startswith(_ARGUMENTS_ONE_BY_ONE):
            whole = [_with_object(call) for call in calls]
            yield {**message, "tool_calls": whole}
        else:
            yield message

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn what the library raises on a history into an error of the request, not of the engine."""
        try:
            yield
        except RecursionError:  # the caller's to name: it is the values that are too deep
            raise
        except Exception as error:
            raise ProxyError(
                f"Expected a conversation that a model of the family {self.family!r} can be shown, got one that its "
                f"renderer refuses: {str(error).rstrip('.')}. Use a policy of another family with this harness."
            ) from error


def _with_object(call: ToolCallDict) -> ToolCallDict:
    """Return a call whose arguments are an object: text that is none becomes the only argument, and is not lost."""
    function = call["function"]
    if not isinstance(function["arguments"], str):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


def _unstripped(call: ParsedToolCall) -> dict[str, object] | str | None:
    """Return arguments with the white space at their ends: edits of indented code need it, the library strips it."""
    if not isinstance(call.arguments, dict):
        return call.arguments
    arguments: dict[str, object] = dict(call.arguments)
    for found in _VALUE.finditer(call.raw):
        key, value = (found["name"], found["text"]) if found["name"] else (found["key"].strip(), found["value"])
        if arguments.get(key) == value.strip():
            arguments[key] = value
    return arguments


def _token_or_text(tokenizer: TextTokenizer, token: str) -> Ids:
    index = tokenizer.convert_tokens_to_ids(token)
    return tokenizer.encode(token) if index is None else [index]


def _text(message: MessageDict) -> str:
    content = message["content"]
    return content if isinstance(content, str) else ""
