"""The input items of the Responses API as canonical messages: the reading half of `responses`.

A reply that was sampled as one turn comes back as several items: reasoning, text and each call. Invariant: they become
one assistant message again, parallel calls included, or parent matching would see a reply that nobody sampled. Items
follow each other in one turn until something that is not the assistant's; the completion's name in our item ids, which
most clients send back, keeps two turns apart that touch and joins one turn that results were put into.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from clawgym_env.errors import ProxyError
from clawgym_env.messages import Json, Message, Role, ToolCall
from clawgym_env.proxy import wire

RAW_CALL = "raw"
"""Prefix of the id of a custom tool call whose input is all the policy wrote, because that was no `{"input": text}`."""

_ITEM_ID = re.compile(r"([a-z]+)_([0-9a-f]+)_\d+")
_ROLES: Mapping[str, Role] = {"system": "system", "developer": "system", "user": "user"}
_SILENT = frozenset({"additional_tools", "compaction_trigger", "configuration_update", "ghost_snapshot"})
"""Items that tell the server something and the model nothing."""


def item_id(prefix: str, completion_id: str, index: int) -> str:
    """Return the id of one output item; it names the completion, so that the item is known when it comes back."""
    return f"{prefix}_{completion_id}_{index}"


def qualified(name: str, namespace: str | None) -> str:
    """Return the one name under which the model sees a tool of a namespace: `multi_agent_v1__spawn_agent`."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def read_input(value: Json, instructions: str) -> tuple[Message, ...]:
    """Translate `input`, a text or an array of items, behind the instructions.

    Leading system and developer messages become one, for the templates of most models take a single one, in front.

    Raises:
        ProxyError: an item is malformed, or refers to what only a server with a memory could know.
    """
    conversation = _Conversation()
    if instructions:
        conversation.add(Message("system", instructions))
    if isinstance(value, str):
        conversation.add(Message("user", value))
    else:
        for i, item in enumerate(wire.as_list(value, "input")):
            _read_item(conversation, wire.as_object(item, f"input[{i}]"), f"input[{i}]")
    return conversation.finish()


@dataclass(slots=True)
class _Turn:
    """The assistant's turn that is being read."""

    completion: str | None = None
    """As far as an item's id named it."""
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    results: list[Message] = field(default_factory=list)
    """Tool results behind it: a further item of the same completion still joins the turn."""

    def takes(self, completion: str | None) -> bool:
        """Whether an assistant item, by the completion its id names, belongs to this turn."""
        if self.results:
            return completion is not None and completion == self.completion
        return completion is None or self.completion is None or completion == self.completion

    def messages(self) -> list[Message]:
        text, thought = wire.TEXT_SEPARATOR.join(self.texts), wire.TEXT_SEPARATOR.join(self.thoughts)
        return [Message("assistant", text, thought or None, tuple(self.calls)), *self.results]


@dataclass(slots=True)
class _Conversation:
    """Messages in the making."""

    messages: list[Message] = field(default_factory=list)
    turn: _Turn | None = None

    def add(self, message: Message) -> None:
        """Add a message that is neither the assistant's nor a tool's."""
        self._close_turn()
        if message.role == "system" and len(self.messages) == 1 and self.messages[0].role == "system":
            content = f"{self.messages[0].content}{wire.TEXT_SEPARATOR}{message.content}"
            message = Message("system", content)
            self.messages.clear()
        self.messages.append(message)

    def add_result(self, message: Message) -> None:
        (self.messages if self.turn is None else self.turn.results).append(message)

    def turn_for(self, item: Mapping[str, Json]) -> _Turn:
        """Return the turn an assistant item belongs to, a new one where it begins one."""
        _, completion = _origin(item)
        if self.turn is not None and not self.turn.takes(completion):
            self._close_turn()
        if self.turn is None:
            self.turn = _Turn()
        self.turn.completion = self.turn.completion or completion
        return self.turn

    def finish(self) -> tuple[Message, ...]:
        self._close_turn()
        return tuple(self.messages)

    def _close_turn(self) -> None:
        if self.turn is not None:
            self.messages += self.turn.messages()
            self.turn = None


def _read_item(conversation: _Conversation, item: Mapping[str, Json], where: str) -> None:
    """Put one item into the conversation.

    Of types we never sample, a call becomes a tool call with its fields as arguments, or `[web_search_call]` where the
    server of another day made it alone; an output becomes a tool result; anything else `[type]` from the user.
    """
    kind = wire.as_text(item.get("type"), f"{where}.type")
    match kind or ("message" if "role" in item else "item_reference"):
        case "message":
            _read_message(conversation, item, where)
        case "agent_message":
            conversation.add(Message("user", wire.content_text(item.get("content"), f"{where}.content")))
        case "reasoning":
            conversation.turn_for(item).thoughts += _thoughts(item, where)
        case "item_reference":
            raise ProxyError(f"Expected the item itself at {where}, got a reference. No response is kept here.")
        case silent if silent in _SILENT:
            return
        case call if call.endswith("_call"):
            turn = conversation.turn_for(item)
            if call in ("function_call", "custom_tool_call") or "call_id" in item:
                turn.calls.append(_call(item, call, where))
            else:
                turn.texts.append(f"[{call}]")
        case output if output.endswith("_output"):
            call_id = wire.as_text(item.get("call_id"), f"{where}.call_id")
            conversation.add_result(Message("tool", _output(item.get("output"), where), tool_call_id=call_id))
        case other:
            conversation.add(Message("user", f"[{other}]"))


def _read_message(conversation: _Conversation, item: Mapping[str, Json], where: str) -> None:
    role = wire.as_text(item.get("role"), f"{where}.role")
    text = wire.content_text(item.get("content"), f"{where}.content")
    if role == "assistant":
        conversation.turn_for(item).texts.append(text)
    elif role in _ROLES:
        conversation.add(Message(_ROLES[role], text))
    else:
        raise ProxyError(f"Expected {where}.role to be one of {', '.join(_ROLES)}, assistant, got {role!r}.")


def _thoughts(item: Mapping[str, Json], where: str) -> list[str]:
    """Return the reasoning itself where the item has it, else its summary; `encrypted_content` is nothing of ours."""
    name = "content" if item.get("content") else "summary"
    text = wire.content_text(item.get(name), f"{where}.{name}")
    return [text] if text else []


def _call(item: Mapping[str, Json], kind: str, where: str) -> ToolCall:
    call_id = wire.as_text(item.get("call_id"), f"{where}.call_id")
    if kind not in ("function_call", "custom_tool_call"):
        fields = {name: value for name, value in item.items() if name not in ("type", "id", "call_id", "status")}
        return ToolCall(call_id, kind.removesuffix("_call"), wire.write_json(fields).decode())
    namespace = wire.as_text(item.get("namespace"), f"{where}.namespace")
    name = qualified(wire.as_text(item.get("name"), f"{where}.name"), namespace)
    if kind == "function_call":
        return ToolCall(call_id, name, wire.arguments_text(item.get("arguments")))
    text = wire.as_text(item.get("input"), f"{where}.input")
    prefix, _ = _origin(item)
    return ToolCall(call_id, name, text if prefix == RAW_CALL else json.dumps({"input": text}, ensure_ascii=False))


def _output(value: Json, where: str) -> str:
    """Return the text of a tool's output: a string, parts, or one object of a kind that carries no text."""
    return wire.content_text([value] if isinstance(value, dict) else value, f"{where}.output")


def _origin(item: Mapping[str, Json]) -> tuple[str | None, str | None]:
    """Return prefix and completion of an item id of ours; None for both in any other."""
    name = item.get("id")
    found = _ITEM_ID.fullmatch(name) if isinstance(name, str) else None
    return (None, None) if found is None else (found[1], found[2])
