"""The engine over somebody else's API: what is sent for a call, what is made of the reply, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_api import Answers, FakeApi, Reply, called, refusal, said, serving

from clawgym_env import registry
from clawgym_env.engine.base import (
    CALL_IN_HAND,
    ApiUsage,
    CallInHand,
    Engine,
    Generation,
    RelayingEngine,
    SamplingParams,
)
from clawgym_env.engine.relay import USUAL_WINDOW, WITHHELD, RelayEngine, RelaySettings
from clawgym_env.errors import ClawGymError, ContextOverflow, EngineError
from clawgym_env.messages import ChatRequest, Message, ToolSpec
from clawgym_env.trace.prefix_tree import PrefixTree

ASKED = ChatRequest("messages", "policy", (Message("system", "Be brief."), Message("user", "Hi.")))
WRITE = ToolSpec("write", "Write a file.", {"type": "object", "properties": {"path": {"type": "string"}}})


def in_hand(request: ChatRequest) -> CallInHand:
    return CallInHand("1", None, request, kind=lambda: "main", snapshot=PrefixTree)


class Talk:
    """An engine over a fake server, asked one call after the other."""

    def __init__(self, fake: FakeApi, **options: Any) -> None:
        self.fake = fake
        self.engine = RelayEngine.connect(fake.url, "some-model", settings=RelaySettings(**options))

    def ask(self, request: ChatRequest = ASKED, **sampling: Any) -> Generation:
        async def run() -> Generation:
            CALL_IN_HAND.set(in_hand(request))
            return await self.engine.generate([1, 2, 3, 4, 5], SamplingParams(**sampling))

        return asyncio.run(run())

    def text(self, generation: Generation) -> str:
        return self.engine.tokenizer.decode(generation.token_ids)


def relayed(answers: Answers, request: ChatRequest = ASKED, **options: Any) -> tuple[FakeApi, Generation, Message]:
    with serving(FakeApi(answers)) as fake:
        generation = Talk(fake, **options).ask(request)
    assert generation.relayed is not None
    return fake, generation, generation.relayed.message


def messages(fake: FakeApi) -> list[dict[str, Any]]:
    return list(fake.asked[-1]["messages"])


def test_the_conversation_goes_out_with_the_policys_sampling_and_comes_back_as_a_message() -> None:
    with serving(FakeApi([said("Hello.")])) as fake:
        talk = Talk(fake)
        generation = talk.ask(temperature=0.7, top_p=0.9, top_k=20, max_tokens=33, seed=(1 << 40) + 5)
    assert fake.asked == [
        {
            "model": "some-model",
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi."}],
            "max_tokens": 33,
            "temperature": 0.7,
            "top_p": 0.9,
            "top_k": 20,
            "seed": 5,
        }
    ]
    assert generation.relayed is not None
    assert generation.relayed.message == Message("assistant", "Hello.")
    assert generation.relayed.usage == ApiUsage(prompt_tokens=100, completion_tokens=7)
    assert (talk.text(generation), generation.finish_reason) == ("Hello.<|im_end|>", "stop")
    assert generation.sampling is not None
    assert not generation.sampling.trainable


def test_what_is_the_usual_is_not_sent_for_some_models_take_nothing_else() -> None:
    fake, _, _ = relayed([said()], reasoning_effort="low")
    assert set(fake.asked[0]) == {"model", "messages", "max_tokens", "temperature", "reasoning_effort"}


def test_tools_are_offered_and_calls_are_told_under_ids_that_no_other_call_has() -> None:
    both = said(None, tool_calls=[called("write", "call_0", path="a"), called("read", "call_0")])
    request = ChatRequest("responses", "policy", (Message("user", "Hi."),), tools=(WRITE, ToolSpec("read", "", {})))
    fake, generation, message = relayed([both], request)
    assert fake.asked[0]["tools"] == [
        {
            "type": "function",
            "function": {"name": "write", "description": "Write a file.", "parameters": dict(WRITE.parameters)},
        },
        {
            "type": "function",
            "function": {"name": "read", "description": "", "parameters": {"type": "object", "properties": {}}},
        },
    ]
    first, second = message.tool_calls
    assert (first.name, first.parsed_arguments()) == ("write", {"path": "a"})
    assert first.id != second.id
    assert first.id.isalnum()
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("altered", [lambda name: name, lambda name: f"{name[:4]}_{name[4:]}"], ids=["kept", "altered"])
def test_the_api_sees_its_own_ids_again_and_what_it_put_into_a_call(altered: Any) -> None:
    signed = called("write", "functions.write:0", extra={"extra_content": {"google": {"thought_signature": "s"}}}, n=1)
    with serving(FakeApi([said("Writing.", tool_calls=[signed], reasoning_content="So."), said("Done.")])) as fake:
        talk = Talk(fake)
        generation = talk.ask()
        assert generation.relayed is not None
        reply = generation.relayed.message
        (call,) = reply.tool_calls
        echoed = Message("assistant", "Writing.", "So.", (type(call)(altered(call.id), "write", '{"n": 1.0}'),))
        result = Message("tool", "written", tool_call_id=altered(call.id))
        talk.ask(ChatRequest("chat", "policy", (*ASKED.messages, echoed, result)))
    again, answered = messages(fake)[2:]
    assert again == {
        "role": "assistant",
        "content": "Writing.",
        "reasoning_content": "So.",
        "tool_calls": [
            {
                "id": "functions.write:0",
                "type": "function",
                "function": {"name": "write", "arguments": '{"n": 1.0}'},
                "extra_content": {"google": {"thought_signature": "s"}},
            }
        ],
    }
    assert answered == {"role": "tool", "content": "written", "tool_call_id": "functions.write:0"}


def test_reasoning_goes_back_only_to_an_api_that_tells_some_and_takes_it() -> None:
    thought = ChatRequest(
        "chat", "policy", (Message("user", "?"), Message("assistant", "!", "Hm."), Message("user", "?"))
    )
    no = refusal("messages.1.reasoning_content: Extra inputs are not permitted", param="messages.1.reasoning_content")
    with serving(FakeApi([said(), said(reasoning_content="So."), no, said(), said()])) as fake:
        talk = Talk(fake)
        for _ in range(4):
            talk.ask(thought)
    told = ["reasoning_content" in body["messages"][1] for body in fake.asked]
    assert told == [False, False, True, False, False]


@pytest.mark.parametrize(
    ("reply", "text", "finish"),
    [
        (said("Partly", finish_reason="length"), "Partly", "length"),
        (said(None, finish_reason="content_filter"), WITHHELD, "stop"),
        (said("I was sa", finish_reason="content_filter"), "I was sa", "stop"),
        (said(None, refusal="I cannot help."), "I cannot help.", "stop"),
        (said(None), "", "stop"),
        (refusal("The response was filtered", code="content_filter"), WITHHELD, "stop"),
        (said("half a pair \ud83d"), "half a pair \ufffd", "stop"),
    ],
    ids=["length", "withheld", "cut off", "refused", "empty", "prompt filtered", "surrogate"],
)
def test_every_end_of_a_reply_is_one_a_harness_knows(reply: Reply, text: str, finish: str) -> None:
    _, generation, message = relayed([reply])
    assert (message.content, generation.finish_reason) == (text, finish)


def test_arguments_that_are_no_json_travel_as_they_are_and_objects_become_text() -> None:
    broken = {"id": "a", "type": "function", "function": {"name": "write", "arguments": '{"path": '}}
    whole = {"id": "b", "type": "function", "function": {"name": "write", "arguments": {"path": "x"}}}
    _, _, message = relayed([said(None, tool_calls=[broken, whole])])
    assert [call.arguments for call in message.tool_calls] == ['{"path": ', '{"path": "x"}']


def test_without_counts_tokens_are_estimated() -> None:
    _, generation, _ = relayed([said("12345678", usage=None)])
    assert generation.relayed is not None
    assert generation.relayed.usage == ApiUsage(prompt_tokens=2, completion_tokens=3)


def test_an_overflow_of_the_api_is_one() -> None:
    with pytest.raises(ContextOverflow) as caught:
        relayed([refusal("too long", code="context_length_exceeded")], context_length=4096)
    assert caught.value.context_length == 4096
    assert caught.value.prompt_tokens >= 4096


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (refusal("no such model", status=404), r"got status 404: .*no such model.*Check the address, the model's name"),
        (refusal("bad key", status=401), r"got status 401: .*bad key.*Set CLAWGYM_RELAY_API_KEY"),
        (Reply("full", 503), r"got no answer in 1 tries\. The last: status 503: full"),
    ],
    ids=["model", "key", "full"],
)
def test_no_reply_is_an_error_that_says_what_to_do(answer: Reply, match: str) -> None:
    with pytest.raises(EngineError, match=match):
        relayed([answer], max_retries=0)


def test_weights_cannot_be_updated_and_ids_alone_are_no_conversation() -> None:
    with serving(FakeApi([said()])) as fake:
        engine = Talk(fake).engine
        with pytest.raises(EngineError, match=r"which can only be evaluated\. Train with engine=learner\.engine\(\)"):
            engine.update_weights(lambda: None)
        with pytest.raises(EngineError, match="asked by the proxy"):
            asyncio.run(engine.generate([1], SamplingParams()))
    assert not fake.asked


def test_a_paused_engine_sends_nothing_until_it_is_resumed() -> None:
    with serving(FakeApi([said()])) as fake:
        engine = Talk(fake).engine

        async def run() -> None:
            CALL_IN_HAND.set(in_hand(ASKED))
            await engine.pause()
            asking = asyncio.create_task(engine.generate([1], SamplingParams()))
            await asyncio.sleep(0.05)
            assert not fake.asked
            await engine.resume()
            await asking

        asyncio.run(run())
        assert len(fake.asked) == 1


@pytest.mark.parametrize(
    ("card", "window"),
    [
        ({"id": "some-model", "max_model_len": 4000}, 4000),
        ({"id": "some-model", "context_window": 5000}, 5000),
        ({"id": "alone", "context_length": 6000}, 6000),
        ({"id": "some-model"}, USUAL_WINDOW),
        (None, USUAL_WINDOW),
    ],
    ids=["vllm", "groq", "another name", "untold", "no route"],
)
def test_the_window_is_what_the_api_tells(card: dict[str, Any] | None, window: int) -> None:
    with serving(FakeApi([said()], card=card)) as fake:
        engine = registry.engine(f"openai:{fake.url}#some-model")
    assert isinstance(engine, Engine)
    assert isinstance(engine, RelayingEngine)
    assert (engine.context_length, engine.policy_version) == (window, 0)
    assert engine.name == f"openai:{fake.url}#some-model"


def test_a_name_brings_options_and_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(FakeApi([said()], card={"id": "m", "max_model_len": 4000}, key="sk-secret")) as fake:
        with pytest.raises(EngineError, match=r"take the API key, got status 401: .*Set CLAWGYM_RELAY_API_KEY"):
            registry.engine(f"openai:{fake.url}#m")
        monkeypatch.setenv("CLAWGYM_RELAY_API_KEY", "sk-wrong")
        with pytest.raises(EngineError, match=r"Bearer \(the API key\)"):
            registry.engine(f"openai:{fake.url}#m")
        monkeypatch.setenv("CLAWGYM_RELAY_API_KEY", "sk-secret")
        engine = registry.engine(f"openai:{fake.url}#m?context_length=2000&timeout_s=5")
        assert engine.context_length == 2000
        assert "sk-secret" not in repr(engine)


@pytest.mark.parametrize(
    ("spec", "error", "match"),
    [
        ("openai:http://127.0.0.1:9/v1#m", EngineError, "Give the address up to and including /v1"),
        ("openai:http://127.0.0.1:9/v1", ValueError, "Expected a model as URL#MODEL"),
        ("openai:m", ValueError, "Expected a model as URL#MODEL"),
        ("openai:http://127.0.0.1:9/v1#m?api_key=x", ClawGymError, "Expected options of engine"),
        ("openai:http://127.0.0.1:9/v1#m?timeout_s=soon", ClawGymError, "to be float, got 'soon'"),
    ],
)
def test_a_name_that_leads_nowhere_is_an_error_that_says_so(spec: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        registry.engine(spec)
