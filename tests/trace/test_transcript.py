"""What is taken over from an earlier request is what would have been made afresh."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from clawgym_env.messages import ChatRequest, Message, ToolCall, ToolSpec
from clawgym_env.trace.latest import KEPT, shared_length
from clawgym_env.trace.transcript import Transcript, Transcripts, transcribe

few = st.sampled_from(["", " ", "a", "b", "a\n", '{"a":1}', '{"a": 1}', '{"a":true}', "\ud800"])
calls = st.builds(ToolCall, few, few, few)
messages = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    few,
    st.none() | few,
    st.lists(calls, max_size=2).map(tuple),
    st.none() | few,
)
tools = st.lists(st.builds(ToolSpec, few, few, st.sampled_from([{}, {"a": 1}, {"a": True}])), max_size=2).map(tuple)
conversations = st.lists(messages, min_size=1, max_size=6).map(tuple)


@st.composite
def requests(draw: st.DrawFn) -> list[ChatRequest]:
    """Requests that go on from each other, branch, edit or begin anew."""
    out = [ChatRequest("chat", "m", draw(conversations), draw(tools))]
    for _ in range(draw(st.integers(1, 8))):
        earlier = draw(st.sampled_from(out)).messages
        cut = draw(st.integers(0, len(earlier)))
        history = tuple(dataclasses.replace(message) for message in earlier[:cut])  # equal, never the same objects
        out.append(ChatRequest("chat", "m", history + draw(conversations), draw(tools)))
    return out


def values(transcript: Transcript) -> dict[str, object]:
    named = {field.name: getattr(transcript, field.name) for field in dataclasses.fields(transcript)}
    return {**named, "role": transcript.role_hash, "request": transcript.request_hash}


@given(requests())
def test_a_transcript_does_not_depend_on_what_was_seen_before(asked: list[ChatRequest]) -> None:
    transcripts = Transcripts()
    for request in asked:
        assert values(transcripts.of(request)) == values(transcribe(request))


@given(requests())
def test_taking_over_leaves_the_earlier_transcript_as_it_was(asked: list[ChatRequest]) -> None:
    transcripts = Transcripts()
    made = [transcripts.of(request) for request in asked]
    for request, transcript in zip(asked, made, strict=True):
        assert values(transcript) == values(transcribe(request))


@given(messages, messages)
def test_letters_differ_exactly_where_messages_do(one: Message, other: Message) -> None:
    letters = [transcribe(ChatRequest("chat", "m", (message,))).letters for message in (one, other)]
    same_reasoning = (one.reasoning or "") == (other.reasoning or "") or one.role != "assistant"
    assert (letters[0] == letters[1]) <= same_reasoning
    assert (one == other) <= (letters[0] == letters[1])


def test_a_conversation_keeps_its_messages_as_it_grows() -> None:
    transcripts = Transcripts()
    history = tuple(Message("user", f"message {i}") for i in range(4))
    first = transcripts.of(ChatRequest("chat", "m", history))
    copies = tuple(dataclasses.replace(message) for message in history)
    second = transcripts.of(ChatRequest("chat", "m", (*copies, Message("assistant", "x"))))
    assert all(kept is given for kept, given in zip(second.messages, first.messages, strict=False))


def test_conversations_side_by_side_are_each_remembered_and_no_more_than_a_few() -> None:
    transcripts = Transcripts()
    asked = [ChatRequest("chat", "m", (Message("system", f"agent {i}"), Message("user", "go"))) for i in range(KEPT)]
    made = [transcripts.of(request) for request in asked]
    assert all(transcripts.of(request) is transcript for request, transcript in zip(asked, made, strict=True))
    transcripts.of(ChatRequest("chat", "m", (Message("user", "another"),)))
    remembered = [transcripts.of(request) is transcript for request, transcript in zip(asked, made, strict=True)]
    assert remembered.count(False) >= 1


def test_the_same_request_again_is_not_digested_again() -> None:
    transcripts = Transcripts()
    request = ChatRequest("chat", "m", (Message("user", "x"),))
    once = transcripts.of(request)
    settled = dataclasses.replace(request, messages=once.messages)
    assert transcripts.of(settled) is once


def test_shared_length_counts_equal_messages_from_the_start() -> None:
    one, two, three = (Message("user", text) for text in "abc")
    assert shared_length((one, two), (one, two, three)) == 2
    assert shared_length((one, two), (one, three)) == 1
    assert shared_length((), (one,)) == 0
