"""Messages and tools to token ids, and sampled ids back to a message.

Between the canonical `ChatRequest` and the engine. `make_renderer` chooses: the embedded policies (`tiny`, `smollm2`)
speak the `ChatMLRenderer` of ours, real model families that of the `renderers` library behind a `FamilyRenderer`.
Invariant: sampled ids are never re-encoded. The next prompt is the old prompt, the sampled ids and a bridge of the new
messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from clawgym_env.call_text import arguments_text, object_or_text, recovered_arguments, recovered_name
from clawgym_env.chatml import ChatMLRenderer
from clawgym_env.errors import EngineError
from clawgym_env.families import make_family
from clawgym_env.messages import Message, ToolCall, ToolSpec, well_formed
from clawgym_env.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from renderers.base import Message as MessageDict
    from renderers.base import ParsedToolCall, Renderer
    from renderers.base import ToolSpec as ToolDict

__all__ = [
    "ChatMLRenderer",
    "ParsedReply",
    "make_renderer",
    "message_dicts",
    "parse_reply",
    "renderer_kind",
    "same_tokens",
    "tool_dicts",
]

_FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_text": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
    "qwen3_5_moe_text": "qwen3.5",
    "glm4_moe": "glm-4.5",
    "glm4_moe_lite": "glm-5",
    "glm_moe_dsa": "glm-5",
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
_DEEPSEEK_TOKENS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")


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
            renderer is decided by `tokenizer.name_or_path` (a repository's name, or a folder called like one), then,
            for architectures that many families share, by the turn tokens of the vocabulary. "auto" without a name is
            ChatML: our own policies have none.

    Raises:
        EngineError: no renderer of this family can extend a conversation token for token.
    """
    if model_type in ("chatml", "tiny", "smollm2") or (model_type == "auto" and not tokenizer.name_or_path):
        return "chatml"
    from renderers.base import MODEL_RENDERER_MAP

    bridging = sorted(set(MODEL_RENDERER_MAP.values()) - {"default"})
    folders = {PurePath(name).name: kind for name, kind in MODEL_RENDERER_MAP.items()}
    named = MODEL_RENDERER_MAP.get(tokenizer.name_or_path) or folders.get(PurePath(tokenizer.name_or_path).name)
    by_vocabulary = _kind_by_vocabulary(tokenizer) if model_type in _SHARED_MODEL_TYPES else None
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
    return ChatMLRenderer(tokenizer) if kind == "chatml" else make_family(tokenizer, kind)


def _kind_by_vocabulary(tokenizer: TextTokenizer) -> str | None:
    def speaks(tokens: Sequence[str]) -> bool:
        # Special, or else the text of a file could forge a turn.
        return all(tokenizer.convert_tokens_to_ids(token) in tokenizer.special_ids for token in tokens)

    chatml, llama_3 = speaks(_CHATML_TOKENS), speaks(_LLAMA_3_TOKENS)
    if chatml and llama_3:  # a Llama 3 taught ChatML ends its turns in ChatML
        llama_3 = tokenizer.eos_token_id != tokenizer.convert_tokens_to_ids("<|im_end|>")
    if speaks(_DEEPSEEK_TOKENS):  # R1 distilled into a Llama or Qwen, which keeps the turns of R1
        return "deepseek-r1"
    if llama_3:
        return "llama-3"
    return "chatml" if chatml else None


def message_dicts(messages: Sequence[Message]) -> list[MessageDict]:
    """Return canonical messages as the `renderers` library wants them; arguments become objects where they parse."""
    names = {call.id: call.name for message in messages for call in message.tool_calls}
    out: list[MessageDict] = []
    for message in messages:
        value: MessageDict = {"role": message.role, "content": well_formed(message.content)}
        if message.reasoning is not None:
            value["reasoning_content"] = well_formed(message.reasoning)
        if message.tool_calls:
            value["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": object_or_text(call.arguments)},
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
    """Parse sampled ids, which must be Python's integers, with the family's own parser.

    A call that does not parse, or whose arguments are no object, is kept as a call with its raw argument text when its
    name can be read, and becomes plain text of the content when not: nothing the model said is hidden from the
    harness. Every text can be encoded.
    """
    parsed = renderer.parse_response(
        list(token_ids),
        tools=tool_dicts(tools),
        prompt_ids=list(prompt_ids) or None,
    )
    calls: list[tuple[str, str]] = []
    malformed: list[str] = []
    content = parsed.content
    for call in parsed.tool_calls:
        # What a policy writes may have any type, whatever the library declares.
        name: object = call.name
        arguments = object_or_text(call.arguments) if isinstance(call.arguments, str) else call.arguments
        if call.status == "ok" and isinstance(name, str) and name and isinstance(arguments, dict):
            calls.append((well_formed(name), arguments_text(arguments, call.raw)))
            continue
        malformed.append(call.raw)
        name = name if isinstance(name, str) and name else recovered_name(call.raw)
        if name:
            calls.append((well_formed(name), _raw_arguments(call)))
        else:
            content = f"{content}\n{call.raw}" if content else call.raw
    reasoning = parsed.reasoning_content
    return ParsedReply(
        well_formed(content), None if reasoning is None else well_formed(reasoning), tuple(calls), tuple(malformed)
    )


def same_tokens(one: Renderer, other: Renderer) -> bool:
    """Whether two renderers write conversations in the same tokens: tried on one that holds a bit of everything."""
    call = ToolCall("call1", "write", '{"path": "naïve/第一.py", "text": "for i in range(1024):\\n\\treturn i"}')
    messages = [
        Message("system", "You are a careful assistant. Today is the 29th of February."),
        Message("user", "Écris « Straße » & 東京 into a file, then stop… 🙂"),
        Message("assistant", "I shall write it.", tool_calls=(call,)),
        Message("tool", "Wrote 42 bytes.", tool_call_id="call1"),
    ]
    tools = [ToolSpec("write", "Writes a file.", {"type": "object", "properties": {"path": {"type": "string"}}})]

    def written(renderer: Renderer) -> tuple[list[int], list[int]]:
        ids = renderer.render_ids(message_dicts(messages), tools=tool_dicts(tools), add_generation_prompt=True)
        return ids, renderer.get_stop_token_ids()

    return written(one) == written(other)


def _raw_arguments(call: ParsedToolCall) -> str:
    if call.arguments is None or call.arguments == "":
        return recovered_arguments(call.raw)
    return arguments_text(call.arguments, call.raw)
