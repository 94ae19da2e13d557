"""Messages and tools to token ids, and sampled ids back to a message.

Between the canonical `ChatRequest` and the engine. Real model families are rendered by the `renderers` library; the
embedded policies (`tiny`, `smollm2`) by our own `ChatMLRenderer`, which satisfies the same Protocol. Invariant:
sampled ids are never re-encoded. The next prompt is the old prompt, the sampled ids and a bridge of the new messages,
and for a clean reply that is exactly what a full render gives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from clawgym_env.errors import EngineError
from clawgym_env.messages import Message, ToolSpec, well_formed
from clawgym_env.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers.base import Message as MessageDict
    from renderers.base import ParsedResponse, ParsedToolCall, RenderedTokens, Renderer
    from renderers.base import ToolSpec as ToolDict

Ids: TypeAlias = list[int]

_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)+)"')
_ARGUMENTS = re.compile(r'"arguments"\s*:\s*(.*)', re.DOTALL)
_TAG = re.compile(r"<tool_call>|</tool_call>")
_FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}
"""`model_type` of a config.json to the renderer of that family, where the architecture says enough."""
_SHARED_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2"})
"""Architectures that families with different turns share; the turn tokens of the vocabulary tell them apart."""
_LLAMA_3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


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
            parts.append("\n".join(["Tools:", *(_compact(_flat_tool(tool)) for tool in tools)]))
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
            out.text(f'{{"name": {name}, "arguments": {_arguments_text(function["arguments"])}}}')
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


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A sampled turn as the harness will see it."""

    content: str
    reasoning: str | None
    tool_calls: tuple[tuple[str, str], ...]
    """(name, arguments as JSON text). A broken call whose name is recoverable is here too, with its raw argument
    text: real servers do the same, and harnesses have their own way of telling the model."""
    malformed: tuple[str, ...] = ()
    """Raw text of every call that did not parse, whether it became a call or plain content."""


def renderer_kind(tokenizer: TextTokenizer, model_type: str = "auto") -> str:
    """Choose the renderer of a policy: "chatml" or a family name of the `renderers` library that can bridge.

    Args:
        model_type: a kind, which stays as it is, the `model_type` of a config.json, or "auto". What does not name a
            renderer is decided by `tokenizer.name_or_path`, then, for architectures that many families share, by the
            turn tokens of the vocabulary. "auto" without a name is ChatML: our own policies have none.

    Raises:
        EngineError: no renderer of this family can extend a conversation token for token.
    """
    if model_type in ("chatml", "tiny", "smollm2") or (model_type == "auto" and not tokenizer.name_or_path):
        return "chatml"
    from renderers.base import MODEL_RENDERER_MAP

    bridging = sorted(set(MODEL_RENDERER_MAP.values()) - {"default"})
    by_vocabulary = _kind_by_vocabulary(tokenizer) if model_type in _SHARED_MODEL_TYPES else None
    named = MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
    for kind in (_FAMILY_OF_MODEL_TYPE.get(model_type, model_type), named, by_vocabulary):
        if kind == "chatml" or kind in bridging:
            return kind
    raise EngineError(
        f"Expected a model family whose conversations can be extended token for token, got {model_type!r} "
        f"({tokenizer.name_or_path!r}). If it speaks like one of chatml, {', '.join(bridging)}, "
        "say so: load_policy(..., renderer=NAME), or --renderer NAME."
    )


def make_renderer(tokenizer: TextTokenizer, model_type: str = "auto") -> Renderer:
    """Make the renderer of a policy, which `renderer_kind` chooses; every one returned can bridge.

    Raises:
        EngineError: no renderer of this family can extend a conversation token for token, or the vocabulary lacks
            its tokens.
    """
    kind = renderer_kind(tokenizer, model_type)
    if kind == "chatml":
        return ChatMLRenderer(tokenizer)
    from renderers.base import create_renderer
    from renderers.configs import config_from_name

    config = config_from_name(kind)
    if config is None:
        raise EngineError(f"Expected a concrete renderer family, got {kind!r}.")
    try:
        with tokenizer.special_texts():
            return create_renderer(tokenizer, type(config)(thinking_retention="all"))
    except AssertionError as error:  # how the library says that a token is not there
        raise EngineError(f"Expected a vocabulary of the family {kind!r}: {error}. Name another renderer.") from error


def _kind_by_vocabulary(tokenizer: TextTokenizer) -> str | None:
    def speaks(tokens: Sequence[str]) -> bool:
        # Special, or else the text of a file could forge a turn.
        return all(tokenizer.convert_tokens_to_ids(token) in tokenizer.special_ids for token in tokens)

    chatml, llama_3 = speaks(_CHATML_TOKENS), speaks(_LLAMA_3_TOKENS)
    if chatml and llama_3:  # a Llama 3 taught ChatML ends its turns in ChatML
        llama_3 = tokenizer.eos_token_id != tokenizer.convert_tokens_to_ids("<|im_end|>")
    if llama_3:
        return "llama-3"
    return "chatml" if chatml else None


def message_dicts(messages: Sequence[Message]) -> list[MessageDict]:
    """Return canonical messages as the `renderers` library wants them; arguments become objects where they parse."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    out: list[MessageDict] = []
    for message in messages:
        value: MessageDict = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            value["reasoning_content"] = message.reasoning
        if message.tool_calls:
            value["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": _parsed_or_text(call.arguments)},
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            value["tool_call_id"] = message.tool_call_id
            if message.tool_call_id in names:
                value["name"] = names[message.tool_call_id]
        out.append(value)
    return out


def tool_dicts(tools: Sequence[ToolSpec]) -> list[ToolDict] | None:
    """Return tools as the `renderers` library wants them; None for no tools."""
    if not tools:
        return None
    return [{"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)} for tool in tools]


def parse_reply(
    renderer: Renderer, token_ids: Sequence[int], tools: Sequence[ToolSpec] = (), prompt_ids: Sequence[int] = ()
) -> ParsedReply:
    """Parse sampled ids with the family's own parser.

    A call that does not parse is kept as a call with its raw argument text when its name can be read, and becomes
    plain text of the content when not: nothing the model said is hidden from the harness. Every text can be encoded.
    """
    parsed = renderer.parse_response(
        [int(token) for token in token_ids],
        tools=tool_dicts(tools),
        prompt_ids=[int(token) for token in prompt_ids] or None,
    )
    calls: list[tuple[str, str]] = []
    malformed: list[str] = []
    content = parsed.content
    for call in parsed.tool_calls:
        if call.status == "ok" and call.name:
            calls.append((well_formed(call.name), _arguments_text(call.arguments, call.raw)))
            continue
        malformed.append(call.raw)
        name = call.name or _recovered_name(call.raw)
        if name:
            calls.append((well_formed(name), _raw_arguments(call)))
        else:
            content = f"{content}\n{call.raw}" if content else call.raw
    reasoning = parsed.reasoning_content
    return ParsedReply(
        well_formed(content), None if reasoning is None else well_formed(reasoning), tuple(calls), tuple(malformed)
    )


def _parse_call(piece: _Piece) -> ParsedToolCall:
    from renderers.base import ParsedToolCall, ToolCallParseStatus

    raw = piece.text.strip()
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        status = ToolCallParseStatus.UNCLOSED_BLOCK if piece.kind == "open_call" else ToolCallParseStatus.INVALID_JSON
        return ParsedToolCall(raw, _recovered_name(raw), _recovered_arguments(raw), piece.span, status)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw, None, None, piece.span, ToolCallParseStatus.MISSING_NAME)
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed_or_text(arguments)
    if not isinstance(arguments, dict):
        text = "null" if arguments is None else _arguments_text(arguments, raw)
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


def _recovered_name(raw: str) -> str | None:
    found = _NAME.search(raw)
    return found.group(1) if found else None


def _recovered_arguments(raw: str) -> str:
    """Return what stands after `"arguments":`, without the brace that closes the call."""
    found = _ARGUMENTS.search(raw)
    if found is None:
        return raw
    text = found.group(1).strip()
    return text[:-1].rstrip() if text.endswith("}") and text.count("}") > text.count("{") else text


def _raw_arguments(call: ParsedToolCall) -> str:
    if call.arguments is None or call.arguments == "":
        return _recovered_arguments(call.raw)
    return _arguments_text(call.arguments, call.raw)


def _arguments_text(arguments: object, raw: str | None = None) -> str:
    """Return arguments as JSON text that UTF-8 can carry; out of `raw` where they nest too deeply to be written."""
    if isinstance(arguments, str):
        return well_formed(arguments)
    value = arguments if arguments is not None else {}
    try:
        text = json.dumps(value, ensure_ascii=False)
        return text if well_formed(text) == text else json.dumps(value)
    except RecursionError:
        if raw is None:
            raise
        return _recovered_arguments(raw)


def _parsed_or_text(arguments: str) -> dict[str, object] | str:
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _flat_tool(tool: ToolDict) -> object:
    return tool.get("function", tool)


def _text(message: MessageDict) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content or ())
