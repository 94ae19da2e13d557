"""Which spellings of a message are the same message, and which are not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.messages import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.trace.digests import bare_id, canonical_arguments, message_digest, reasoning_kept
from clawgym_env.trace.transcript import transcribe

json_objects = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
        max_leaves=6,
    ),
    max_size=4,
)


def call(arguments: str, *, name: str = "write", call_id: str = "call1") -> Message:
    return Message("assistant", "", tool_calls=(ToolCall(call_id, name, arguments),))


@given(json_objects)
def test_arguments_written_again_are_the_same(value: dict[str, object]) -> None:
    one = json.dumps(value)
    others = [
        json.dumps(value, indent=3),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(dict(reversed(value.items()))),
        f"\n {one} ",
    ]
    assert {canonical_arguments(other) for other in others} == {canonical_arguments(one)}


@given(json_objects, json_objects)
def test_other_arguments_are_not_the_same(one: dict[str, object], other: dict[str, object]) -> None:
    same = canonical_arguments(json.dumps(one)) == canonical_arguments(json.dumps(other))
    if same:
        assert one == other


def test_a_whole_float_is_an_integer_as_in_javascript_but_true_is_not_one() -> None:
    assert canonical_arguments('{"a": 1.0}') == canonical_arguments('{"a": 1}')
    assert canonical_arguments('{"a": true}') != canonical_arguments('{"a": 1}')
    assert canonical_arguments('{"a": "1"}') != canonical_arguments('{"a": 1}')


def test_no_arguments_are_an_empty_object_and_broken_ones_are_their_own_text() -> None:
    assert canonical_arguments(" ") == canonical_arguments("{}")
    assert canonical_arguments('{"a":}') == '{"a":}'
    assert canonical_arguments("[" * 100_000) == "[" * 100_000
    assert canonical_arguments('{"a": 1e999}') == '{"a":Infinity}'


@pytest.mark.parametrize(
    "other",
    [call('{"a":2}'), call('{"a":1}', name="writes"), Message("assistant"), Message("assistant", "x"), call("{}")],
)
def test_a_digest_sees_name_arguments_and_text(other: Message) -> None:
    assert message_digest(other) != message_digest(call('{"a": 1}'))


def test_a_digest_sees_neither_ids_nor_reasoning() -> None:
    message = Message("assistant", "x", "thought", (ToolCall("1", "w", "{}"),))
    assert message_digest(message) == message_digest(Message("assistant", "x", None, (ToolCall("2", "w", ""),)))
    assert message_digest(Message("tool", "x", tool_call_id="1")) == message_digest(Message("tool", "x"))


def test_a_digest_keeps_the_white_space_of_what_others_wrote() -> None:
    assert message_digest(Message("user", "x\n")) != message_digest(Message("user", "x"))
    assert message_digest(Message("assistant", "x\n")) == message_digest(Message("assistant", "x"))


def test_the_role_and_the_split_of_content_and_calls_are_part_of_a_digest() -> None:
    assert message_digest(Message("user", "x")) != message_digest(Message("tool", "x"))
    two = Message("assistant", "", tool_calls=(ToolCall("1", "a", "{}"), ToolCall("2", "b", "{}")))
    one = Message("assistant", "", tool_calls=(ToolCall("1", "a\0{}2:b", "{}"),))
    assert message_digest(two) != message_digest(one)


def test_a_lone_surrogate_can_be_digested() -> None:
    transcribe(ChatRequest("chat", "m", (Message("user", "\ud800"),), (ToolSpec("\ud800", "\ud800", {}),)))


@pytest.mark.parametrize(("given_id", "bare"), [("call_8ef1", "call8ef1"), ("toolu-x.y", "tooluxy"), ("", "")])
def test_an_id_is_its_letters_and_digits(given_id: str, bare: str) -> None:
    assert bare_id(given_id) == bare


@pytest.mark.parametrize(
    ("sent", "echoed", "kept"),
    [("a", None, True), ("a", " a ", True), (None, None, True), ("a", "b", False), (None, "b", False)],
)
def test_reasoning_may_be_missing_but_not_different(sent: str | None, echoed: str | None, kept: bool) -> None:
    assert reasoning_kept(sent, echoed) is kept


def test_request_hash_ignores_what_the_policy_is_not_shown_and_sees_what_it_is() -> None:
    messages = (Message("user", "x"),)
    tools = (ToolSpec("a", "b", {"type": "object"}),)
    base = transcribe(ChatRequest("chat", "m", messages, tools)).request_hash
    assert transcribe(ChatRequest("chat", "n", messages, tools, stream=True, max_tokens=5)).request_hash == base
    assert transcribe(ChatRequest("chat", "m", messages)).request_hash != base
    changed = (ToolSpec("a", "c", {"type": "object"}),)
    assert transcribe(ChatRequest("chat", "m", messages, changed)).request_hash != base


def test_a_role_is_system_prompt_and_tool_names() -> None:
    def role(system: str, *names: str) -> str:
        tools = tuple(ToolSpec(name, "any", {}) for name in names)
        return transcribe(ChatRequest("chat", "m", (Message("system", system), Message("user", "u")), tools)).role_hash

    assert role("s", "a", "b") == role("s", "a", "b")
    assert len({role("s", "a", "b"), role("s", "a"), role("t", "a", "b"), role("s", "ab")}) == 4


def test_an_argument_cut_in_half_a_character_is_recognised_when_it_comes_back() -> None:
    sent = canonical_arguments('{"command": "echo \\ud83d"}')
    assert sent == canonical_arguments('{"command":"echo \ufffd"}')
    assert sent != canonical_arguments('{"command": "echo ?"}')
