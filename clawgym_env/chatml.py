"""ChatML turns with Hermes tool calls: the renderer of the embedded policies, ours alone.

Satisfies the `Renderer` Protocol of the `renderers` library, so that nothing above knows the difference. Invariant:
for a clean reply the bridge of the new messages gives exactly what a full render gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from clawgym_env.call_text import arguments_text, object_or_text, recovered_arguments, recovered_name
from clawgym_env.errors import EngineError
from clawgym_env.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers.base import Message as MessageDict
    from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens
    from renderers.base import ToolSpec as ToolDict

Ids: TypeAlias = list[int]

_TAG = re.compile(r"<tool_call>|</tool_call>")


class ChatMLRenderer:
    """ChatML turns with Hermes tool calls. Satisfies `renderers.base.Renderer`.

    ```
    <|im_start|>system\n{system}\nTools:\n{"name":…}\n{"name":…}<|im_end|>\n
    <|im_start|>user\n{text}<|im_end|>\n
    <|im_start|>assistant\n{text}\n<tool_call>{"name": …, "arguments": {…}}</tool_call><|im_end|>\n
    <|im_start|>user\n<tool_response>{result}</tool_response><tool_response>…</tool_response><|im_end|>\n
    ```
    No system turn is made up when there is neither a system message nor a tool. Tool tags are single ids where the
    vocabulary has them and plain text where not. Reasoning has no channel here and is not rendered.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Look the special ids up.

        Raises:
            EngineError: the vocabulary has no ChatML turn tokens.
        """
        import renderers.base  # noqa: F401 (now, and not with the first call, on the proxy's event loop)

        self.tokenizer = tokenizer
        self._im_start = self._required("<|im_start|>")
        self._im_end = self._required("<|im_end|>")
        end_of_text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self._stops = [self._im_end] if end_of_text is None else [self._im_end, end_of_text]
        self._header = tokenizer.encode("assistant\n")
        self._newline = tokenizer.encode("\n")
        self._tags = {tag: self._tag_ids(tag) for tag in ("tool_call", "/tool_call", "tool_response", "/tool_response")}
        self._open_call = tokenizer.convert_tokens_to_ids("<tool_call>")
        self._close_call = tokenizer.convert_tokens_to_ids("</tool_call>")

    def _required(self, token: str) -> int:
        index = self.tokenizer.convert_tokens_to_ids(token)
        if index is None:
            raise EngineError(f"Expected the token {token!r} in the vocabulary. Use a policy that speaks ChatML.")
        return index

    def _tag_ids(self, tag: str) -> int | None:
        return self.tokenizer.convert_tokens_to_ids(f"<{tag}>")

    @property
    def is_prefix_stable(self) -> bool:
        """True: a turn renders the same wherever it stands."""
        return True

    def get_stop_token_ids(self) -> Ids:
        """Return `<|im_end|>` and, where the vocabulary has it, `<|endoftext|>`."""
        return list(self._stops)

    def render(
        self,
        messages: list[MessageDict],
        *,
        tools: list[ToolDict] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Render a whole conversation; `sampled_mask` marks what the policy itself would have drawn."""
        out = _Stream(self.tokenizer)
        leading = bool(messages) and messages[0].get("role") == "system"
        if tools or leading:
            self._system_turn(out, messages[0] if leading else None, tools or [])
        start = 1 if leading else 0
        self._turns(out, messages, start)
        if add_generation_prompt:
            self._generation_prompt(out)
        return out.rendered(messages)

    def render_ids(
        self,
        messages: list[MessageDict],
        *,
        tools: list[ToolDict] | None = None,
        add_generation_prompt: bool = False,
    ) -> Ids:
        """Render to ids only."""
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

        A reply that was cut before its closer gets one. What a reply holds after its first closer is cut off.
        """
        from renderers.base import trim_to_turn_close

        if not previous_prompt_ids or not new_messages:
            return None
        if any(message.get("role") == "assistant" for message in new_messages):
            return None
        previous = trim_to_turn_close(
            previous_prompt_ids, previous_completion_ids, set(self._stops), synthesize_close=self._im_end
        )
        if previous is None:
            return None
        out = _Stream(self.tokenizer)
        out.ids(previous)
        out.ids(self._newline)
        self._turns(out, new_messages, 0)
        self._generation_prompt(out)
        return out.rendered(new_messages)

    def parse_response(
        self,
        token_ids: Ids,
        *,
        tools: list[ToolDict] | None = None,
        prompt_ids: Ids | None = None,
    ) -> ParsedResponse:
        """Parse one sampled turn. Text around calls is the content; a broken call keeps its raw text and a status."""
        from renderers.base import ParsedResponse

        stops = set(self._stops)
        ids = list(token_ids)
        end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
        texts: list[str] = []
        calls: list[ParsedToolCall] = []
        for piece in self._pieces(ids[:end]):
            if piece.kind == "text":
                texts.append(piece.text)
            else:
                calls.append(_parse_call(piece))
        content = "".join(texts)
        if calls:
            content = content.removesuffix("\n")
        return ParsedResponse(content=content, tool_calls=calls)

    def _system_turn(self, out: _Stream, message: MessageDict | None, tools: Sequence[ToolDict]) -> None:
        parts = [_text(message)] if message is not None and _text(message) else []
        if tools:
            parts.append(tool_list(tools))
        out.owner = -1 if message is None else 0
        out.ids([self._im_start])
        out.text("system\n" + "\n".join(parts))
        out.ids([self._im_end])
        out.ids(self._newline)

    def _turns(self, out: _Stream, messages: Sequence[MessageDict], start: int) -> None:
        for i in range(start, len(messages)):
            message = messages[i]
            role = message.get("role")
            out.owner = i
            if role == "tool":
                self._tool_result(out, messages, i)
                continue
            out.ids([self._im_start])
            if role == "assistant":
                self._assistant_body(out, message)
            else:
                out.text(f"{role}\n{_text(message)}")
                out.ids([self._im_end])
            out.ids(self._newline)

    def _assistant_body(self, out: _Stream, message: MessageDict) -> None:
        out.ids(self._header)
        calls = message.get("tool_calls") or []
        content = _text(message)
        out.sampled = True
        out.text(content + "\n" if content and calls else content)
        for call in calls:
            function = call["function"]
            name = json.dumps(function["name"], ensure_ascii=False)
            self._tag(out, "tool_call")
            out.text(f'{{"name": {name}, "arguments": {arguments_text(function["arguments"])}}}')
            self._tag(out, "/tool_call")
        out.ids([self._im_end])
        out.sampled = False

    def _tool_result(self, out: _Stream, messages: Sequence[MessageDict], i: int) -> None:
        if i == 0 or messages[i - 1].get("role") != "tool":
            out.ids([self._im_start])
            out.text("user\n")
        self._tag(out, "tool_response")
        out.text(_text(messages[i]))
        self._tag(out, "/tool_response")
        if i + 1 == len(messages) or messages[i + 1].get("role") != "tool":
            out.ids([self._im_end])
            out.ids(self._newline)

    def _generation_prompt(self, out: _Stream) -> None:
        out.owner = -1
        out.ids([self._im_start, *self._header])

    def _tag(self, out: _Stream, tag: str) -> None:
        index = self._tags[tag]
        if index is None:
            out.text(f"<{tag}>")
        else:
            out.ids([index])

    def _pieces(self, ids: Ids) -> Iterator[_Piece]:
        """Split a reply at its tool tags: by id where they are ids, by text where not."""
        if self._open_call is None or self._close_call is None:
            yield from _split_text(self.tokenizer.decode(ids))
            return
        start, inside = 0, False
        for i, token in enumerate(ids):
            if token == self._open_call and not inside:
                yield _Piece("text", self.tokenizer.decode(ids[start:i]), None)
                start, inside = i + 1, True
            elif token == self._close_call and inside:
                yield _Piece("call", self.tokenizer.decode(ids[start:i]), (start - 1, i + 1))
                start, inside = i + 1, False
        kind: Literal["text", "open_call"] = "open_call" if inside else "text"
        span = (start - 1, len(ids)) if inside else None
        yield _Piece(kind, self.tokenizer.decode(ids[start:]), span)


def tool_list(tools: Sequence[ToolDict]) -> str:
    """Return the part of a system message that offers tools: a heading and one line of compact JSON for each."""
    flat = (tool.get("function", tool) for tool in tools)
    lines = (json.dumps(tool, ensure_ascii=False, separators=(",", ":")) for tool in flat)
    return "\n".join(["Tools:", *lines])


class _Piece(NamedTuple):
    kind: Literal["text", "call", "open_call"]
    text: str
    span: tuple[int, int] | None


@dataclass(slots=True)
class _Stream:
    """Token ids with the attribution `RenderedTokens` carries."""

    tokenizer: TextTokenizer
    owner: int = -1
    sampled: bool = False
    token_ids: Ids = field(default_factory=list)
    owners: Ids = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def ids(self, token_ids: Sequence[int]) -> None:
        self.token_ids.extend(token_ids)
        self.owners.extend([self.owner] * len(token_ids))
        self.mask.extend([self.sampled] * len(token_ids))

    def text(self, text: str) -> None:
        if text:
            self.ids(self.tokenizer.encode_literal(text))

    def rendered(self, messages: Sequence[MessageDict]) -> RenderedTokens:
        from renderers.base import RenderedTokens, extract_message_tool_names

        return RenderedTokens(
            token_ids=self.token_ids,
            message_indices=self.owners,
            sampled_mask=self.mask,
            message_roles=[message.get("role") or "" for message in messages],
            message_tool_names=extract_message_tool_names(list(messages)),
        )


def _parse_call(piece: _Piece) -> ParsedToolCall:
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    raw = piece.text.strip()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        status = ToolCallParseStatus.UNCLOSED_BLOCK if piece.kind == "open_call" else ToolCallParseStatus.INVALID_JSON
        return ParsedToolCall(raw, recovered_name(raw), recovered_arguments(raw), piece.span, status)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw, None, None, piece.span, ToolCallParseStatus.MISSING_NAME)
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = object_or_text(arguments)
    if not isinstance(arguments, dict):
        text = "null" if arguments is None else arguments_text(arguments, raw)
        return ParsedToolCall(raw, name, text, piece.span, ToolCallParseStatus.MALFORMED_STRUCTURE)
    status = ToolCallParseStatus.UNCLOSED_BLOCK if piece.kind == "open_call" else ToolCallParseStatus.OK
    return ParsedToolCall(raw, name, arguments, piece.span, status)


def _split_text(text: str) -> Iterator[_Piece]:
    start, inside = 0, False
    for tag in _TAG.finditer(text):
        opens = tag.group() == "<tool_call>"
        if opens == inside:
            continue
        yield _Piece("call" if inside else "text", text[start : tag.start()], None)
        start, inside = tag.end(), opens
    yield _Piece("open_call" if inside else "text", text[start:], None)


def _text(message: MessageDict) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())
