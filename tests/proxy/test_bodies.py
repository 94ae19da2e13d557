"""Bodies read at the cost of what is new in them say what they say when each is read alone."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.errors import ProxyError
from clawgym_env.messages import Json, Message
from clawgym_env.proxy import chat, messages, wire
from clawgym_env.proxy.bodies import LONGEST_KEPT, BodyReader

TEXTS = st.text(st.sampled_from('ab"\\],[}{ \n:é'), max_size=8) | st.sampled_from(["messages", '"messages":[', "],"])
ITEMS = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=5,
)
WRITTEN = st.sampled_from([{}, {"separators": (",", ":")}, {"indent": 1}, {"ensure_ascii": False}])


def read(reader: BodyReader, body: bytes) -> Json:
    """Return what a body says, its fields in order; or the error."""
    try:
        return [list(item) for item in reader.read_object(body, "messages", "chat").items()]
    except ProxyError as error:
        return str(error)


@given(st.lists(st.lists(ITEMS, max_size=3), min_size=1, max_size=5), ITEMS, ITEMS, WRITTEN, st.booleans())
def test_a_growing_conversation_reads_as_each_body_alone(
    turns: list[list[Json]], before: Json, after: Json, written: dict[str, Json], first: bool
) -> None:
    reader, items = BodyReader(), list[Json]()
    for turn in turns:
        items += turn
        fields: dict[str, Json] = {"messages": items, "tools": after}
        body = json.dumps(fields if first else {"model": before, **fields}, **written).encode()  # type: ignore[arg-type]
        assert read(reader, body) == read(BodyReader(), body)


@given(st.lists(ITEMS, max_size=3), st.lists(ITEMS, max_size=3), st.data())
def test_a_body_that_was_tampered_with_anywhere_reads_as_it_does_alone(
    items: list[Json], more: list[Json], data: st.DataObject
) -> None:
    reader = BodyReader()
    bodies = [json.dumps({"model": "m", "messages": each}).encode() for each in (items, items + more)]
    read(reader, bodies[0])
    at = data.draw(st.integers(0, len(bodies[1])))
    cut = data.draw(st.integers(0, 4))
    put = data.draw(st.sampled_from([b"", b"]", b",", b'"', b"}", b"]}", b'],"messages":[0', b"\\", b"\xff", b"1"]))
    for body in (bodies[1][:at] + put + bodies[1][at + cut :], bodies[1]):
        assert read(reader, body) == read(BodyReader(), body)


@pytest.mark.parametrize(
    "second",
    [
        b'{"messages":[{"a":1},{"b":2}],"messages":[3]}',
        b'{"messages":[{"a":1},{"b":2}],"\\u006dessages":[0,4]}',
        b'{"messages":[{"a":1},{"b":2}],"messages":null}',
        b'{"messages":[{"a":1},"\\ud800"]}',
        b'{"messages":[{"a":1},NaN]}',
        b'{"messages":[{"a":1},{"b":2}]}]',
    ],
)
def test_what_json_readers_disagree_about_is_as_it_is_alone(second: bytes) -> None:
    reader = BodyReader()
    read(reader, b'{"messages":[{"a":1}]}')
    assert read(reader, second) == read(BodyReader(), second)


def test_another_list_that_grows_is_not_the_conversation() -> None:
    reader = BodyReader()
    for body in (
        b'{"messages":[1],"tools":[1]}',
        b'{"messages":[1],"tools":[1,2]}',
        b'{"messages":[1,2],"tools":[1]}',
        b'{"messages":[1,2,3],"tools":[1]}',
        b'{"messages":[1,2,3],"tools":[1,2]}',
        b'{"messages":[1,2,3,[4]],"tools":[1,2]}',
        b'{"messages":[1,2,3,[4,5]],"tools":[1,2]}',
        b'{"tools":[5],"messages":[1,2],"tools":[1,2]}',
        b'{"tools":[5],"messages":[1,2],"tools":[1,2,3]}',
        b'{"messages":[]}',
        b'{"messages":[,1]}',
    ):
        assert read(reader, body) == read(BodyReader(), body)


def test_a_body_that_was_read_leniently_is_not_gone_on_from() -> None:
    reader = BodyReader()
    for body in (b'{"messages":[{"a":1%s}],"t":NaN}' % (b"0" * 20), b'{"messages":[{"a":1%s},2],"t":1}' % (b"0" * 20)):
        assert str(read(reader, body)) == str(read(BodyReader(), body))


def test_what_one_dialect_has_translated_is_nothing_to_another() -> None:
    reader = BodyReader()
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}]}
    bodies = [json.dumps({"model": "m", "messages": [result] * n}).encode() for n in (1, 2)]
    assert [message.role for message in chat.parse_request(bodies[0], "", reader).messages] == ["user"]
    assert [message.role for message in messages.parse_request(bodies[1], "", reader).messages] == ["tool", "tool"]


def test_a_long_body_is_not_kept() -> None:
    reader = BodyReader()
    short, long = (b'{"messages":["",%s]}' % (b'"%s"' % (b"x" * size)) for size in (1, LONGEST_KEPT))
    kept = b'{"messages":["","x",2]}'
    assert read(reader, short) == read(BodyReader(), short)
    assert reader.num_known(kept) > 0
    longer = long[:-2] + b",1]}"
    assert read(reader, long) == read(BodyReader(), long)
    assert reader.num_known(longer) == 0


def test_bodies_that_end_where_a_known_one_was_cut_or_hold_nothing() -> None:
    reader, known = BodyReader(), [b'{"messages":[1]}', b'{"messages":[1,2]}', b'{"messages":[1,2,3]}']
    for body in (*known, known[2][:15], known[2][:17], b"", known[0], known[2], known[2]):
        assert read(reader, body) == read(BodyReader(), body)


def test_values_that_nest_too_deeply_to_be_compared_are_read_alone() -> None:
    reader, deep = BodyReader(), b"[" * 1000 + b"]" * 1000
    for body in (b'{"messages":[%s]}' % deep, b'{"messages":[%s,1]}' % deep):
        assert reader.read_object(body, "messages", "chat").keys() == {"messages"}


def test_only_new_items_are_parsed_and_translated() -> None:
    reader, told = BodyReader(), list[str]()

    def translate(item: Json, where: str) -> Iterator[Message]:
        told.append(where)
        yield Message("user", str(item))

    def turn(items: list[Json]) -> list[Json]:
        fields = reader.read_object(json.dumps({"messages": items, "tools": [{"a": [1]}]}).encode(), "messages", "chat")
        told.clear()
        read = wire.as_list(fields["messages"], "messages")
        assert reader.translate(read, translate, "messages") == [Message("user", str(item)) for item in items]
        return read

    conversation: list[Json] = [{"text": "one ], two"}]
    other: list[Json] = [{"text": "a sub-agent's"}]
    first = turn(conversation)
    turn(other)
    second = turn([*conversation, {"text": "]"}, {"n": 1}])
    assert second[0] is first[0]
    assert told == ["messages[1]", "messages[2]"]
    third = turn([*conversation, {"text": "]"}, {"n": 1}, {"n": True}])
    assert [a is b for a, b in zip(second, third, strict=False)] == [True, True, True]
    assert told == ["messages[3]"]
    turn([*conversation, {"text": "]"}, {"n": True}, {"n": 2}])  # another history: 1 is not true
    assert told == [f"messages[{i}]" for i in range(4)]


@pytest.mark.parametrize("dialect", [chat, messages])
def test_known_messages_of_a_dialect_are_the_same_objects(dialect: wire.WireDialect) -> None:
    reader = BodyReader()
    history = [{"role": "user", "content": "hello"}]
    more = [{"role": "assistant", "content": "hi"}, {"role": "user", "content": [{"type": "text", "text": "go on"}]}]
    bodies = [json.dumps({"model": "m", "messages": each}).encode() for each in (history, history + more)]
    first, second = (dialect.parse_request(body, "", reader) for body in bodies)
    assert second.messages[0] is first.messages[0]
    assert second == dialect.parse_request(bodies[1])
