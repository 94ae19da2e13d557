"""The client of chat-completions endpoints against a server that misbehaves, over a real socket."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Set
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from fake_api import HALF, HANG_UP, STALL, Answer, Answers, FakeApi, Reply, called, refusal, said, serving

from clawgym_env.chat_api import ApiRefused, ApiUnanswered, ChatApi, ChatReply
from clawgym_env.engine.base import ApiUsage
from clawgym_env.messages import Json

OVERFLOWS = {
    "openai": refusal("This model's maximum context length is 8192 tokens.", code="context_length_exceeded"),
    "vllm": refusal(
        "'max_tokens' or 'max_completion_tokens' is too large: 2000. This model's maximum context length is 4096 "
        "tokens and your request has 5000 input tokens",
        param="max_tokens",
    ),
    "anthropic": refusal("prompt is too long: 215000 tokens > 200000 maximum"),
    "google": refusal("The input token count (1200000) exceeds the maximum number of tokens allowed (1048576)."),
    "llama.cpp": refusal("the request exceeds the available context size.", type="exceed_context_size_error"),
    "mistral": refusal(
        "Prompt contains 40000 tokens, too large for model with 32768 maximum context length", status=422
    ),
    "xai": refusal("This model's maximum prompt length is 131072 but the request contains 537812 tokens."),
    "moonshot": refusal("Invalid request: Your request exceeded model token limit: 8192"),
    "dashscope": refusal("Range of input length should be [1, 129024]"),
    "bedrock": refusal("Input is too long for requested model."),
    "zhipu": refusal("Prompt exceeds max length"),
    "a gateway": Reply("Request Entity Too Large", 413),
}


def body(refused: Set[str]) -> dict[str, Json]:
    """Return a request that can do without three fields and knows another name for a fourth."""
    optional: dict[str, Json] = {"temperature": 0.5, "seed": 3, "top_p": 0.9}
    limit: dict[str, Json] = {"max_completion_tokens" if "max_tokens" in refused else "max_tokens": 9}
    fields = {name: value for name, value in optional.items() if name not in refused}
    return {"messages": [{"role": "user", "content": "hi"}], **limit, **fields}


def ask(answers: Answers, *, times: int = 1, **options: object) -> tuple[FakeApi, ChatReply]:
    with serving(FakeApi(answers)) as fake:
        api = ChatApi(fake.url, "some-model", backoff_s=0.0, **options)  # type: ignore[arg-type]

        async def run() -> ChatReply:
            for _ in range(times):
                reply = await api.complete(body)
            return reply

        return fake, asyncio.run(run())


def sent(fake: FakeApi) -> list[list[str]]:
    return [sorted(set(body) - {"model", "messages"}) for body in fake.asked]


def test_a_request_is_answered_with_message_end_and_counts() -> None:
    fake, reply = ask([said("a", tool_calls=[called("write", path="x")])], api_key="sk-1")
    assert (reply.message.text, reply.finish_reason) == ("a", "tool_calls")
    assert reply.usage == ApiUsage(prompt_tokens=100, completion_tokens=7)
    assert reply.message.tool_calls is not None
    assert reply.message.tool_calls[0].function.arguments == '{"path": "x"}'
    assert fake.asked[0]["model"] == "some-model"
    assert fake.headers[0]["authorization"] == "Bearer sk-1"


@pytest.mark.parametrize(
    "failure",
    [
        refusal("slow down", status=429, headers={"retry-after": "0"}),
        refusal("slow down", status=429, headers={"retry-after": "Wed, 21 Oct 2020 07:28:00 GMT"}),
        refusal("slow down", status=429, headers={"retry-after": "soon"}),
        Reply("oops", 500),
        Reply("", 502),
        refusal("overloaded", status=529),
        Reply("<html>", 200),
        Reply({"error": {"message": "busy"}}, 200),
        Reply({"choices": []}, 200),
        said(None, finish_reason="error"),
        HANG_UP,
        HALF,
    ],
    ids=str,
)
def test_a_failure_that_may_pass_is_met_by_another_try(failure: Answer) -> None:
    fake, reply = ask([failure, failure, said("now")])
    assert reply.message.text == "now"
    assert len(fake.asked) == 3
    assert fake.asked[0] == fake.asked[2]


@pytest.mark.parametrize(
    ("asked", "most", "waited"),
    [
        ("0.2", 60.0, "in 0.2 s"),
        ("3600", 0.1, "in 0.1 s"),
        (format_datetime(datetime.now(UTC) + timedelta(days=1), usegmt=True), 0.1, "in 0.1 s"),
        (format_datetime(datetime.now() + timedelta(days=2)), 0.1, "in 0.1 s"),
    ],
    ids=["seconds", "too long", "a date", "a date without a zone"],
)
def test_the_wait_that_a_server_asks_for_is_kept_as_far_as_is_allowed(
    asked: str, most: float, waited: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="clawgym_env")
    ask([refusal("slow down", status=429, headers={"retry-after": asked}), said()], max_wait_s=most)
    assert f"trying again {waited}" in caplog.text


def test_what_never_answers_is_an_error_that_names_the_last_failure() -> None:
    with pytest.raises(ApiUnanswered, match=r"no answer in 3 tries\. The last: status 503: full"):
        ask([Reply("full", 503)], max_retries=2)
    with pytest.raises(ApiUnanswered, match=r"no answer in 1 tries\. The last: TimeoutError"):
        ask([STALL], max_retries=0, timeout_s=0.2)


def test_what_is_refused_is_not_tried_again() -> None:
    for answer in (refusal("no such model", status=404), refusal("pay first", status=429, code="insufficient_quota")):
        with serving(FakeApi([answer])) as fake:
            with pytest.raises(ApiRefused, match=f"status {answer.status}: "):
                asyncio.run(ChatApi(fake.url, "m").complete(body))
            assert len(fake.asked) == 1


@pytest.mark.parametrize("server", OVERFLOWS)
def test_an_overflow_is_known_in_every_servers_words(server: str) -> None:
    with serving(FakeApi([OVERFLOWS[server]])) as fake:
        with pytest.raises(ApiRefused) as caught:
            asyncio.run(ChatApi(fake.url, "m").complete(body))
        assert caught.value.overflow
        assert not caught.value.filtered
        assert len(fake.asked) == 1


def test_other_refusals_are_no_overflow_and_filters_are_known() -> None:
    assert not ApiRefused(400, "messages: at least one message is required").overflow
    assert not ApiRefused(500, "maximum context length").overflow
    assert ApiRefused(400, '{"error": {"code": "content_filter", "message": "The prompt was filtered"}}').filtered
    assert not ApiRefused(401, "Incorrect API key").filtered


@pytest.mark.parametrize(
    ("said_no", "then"),
    [
        (
            refusal("Unsupported parameter: 'max_tokens' is not supported with this model.", param="max_tokens"),
            ["max_completion_tokens", "seed", "temperature", "top_p"],
        ),
        (
            refusal("'temperature' does not support 0.5 with this model. Only the default (1) value is supported."),
            ["max_tokens", "seed", "top_p"],
        ),
        (refusal("`temperature` and `top_p` cannot both be specified"), ["max_tokens", "seed", "temperature"]),
        (
            Reply({"detail": [{"loc": ["body", "seed"], "msg": "Extra inputs are not permitted"}]}, 422),
            ["max_tokens", "temperature", "top_p"],
        ),
    ],
    ids=["max_tokens", "temperature", "top_p", "seed"],
)
def test_a_field_that_is_refused_by_name_is_given_up_and_never_sent_again(
    said_no: Reply, then: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    fake, _ = ask([said_no, said()], times=3)
    assert sent(fake) == [["max_tokens", "seed", "temperature", "top_p"], then, then, then]
    assert caplog.text.count("left out from now on") == 1


def test_a_field_whose_leaving_out_does_not_help_is_sent_again() -> None:
    unhelpful = refusal("temperature is deprecated for this model")
    with serving(FakeApi([unhelpful, refusal("nor is this message allowed"), said()])) as fake:
        api = ChatApi(fake.url, "m")
        with pytest.raises(ApiRefused):
            asyncio.run(api.complete(body))
        asyncio.run(api.complete(body))
    assert sent(fake)[0] == sent(fake)[2]
    assert "temperature" not in sent(fake)[1]


@pytest.mark.parametrize("answer", [refusal("Wrong key: sk-secret", status=401), Reply("sk-secret is busy", 503)])
def test_the_key_is_in_no_error_and_no_log(answer: Reply, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with pytest.raises((ApiRefused, ApiUnanswered), match=r"\(the API key\)") as caught:
        ask([answer], api_key="sk-secret", max_retries=1)
    assert "sk-secret" not in f"{caught.value!r} {caught.value.__dict__} {caplog.text}"


def test_a_line_end_around_a_key_is_not_sent_and_an_odd_key_is_refused_without_showing_it() -> None:
    fake, _ = ask([said("hi")], api_key=" sk-secret\n")
    assert fake.headers[0]["authorization"] == "Bearer sk-secret"
    for key in ("sk-\nsecret", "sk-sécret"):
        with pytest.raises(ValueError, match="Expected an API key") as caught:
            ChatApi("http://host/v1", "m", api_key=key)
        assert "cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://host:port/v1", "http://[::1/v1", "host/v1", "http://me:pass@host/v1", "http://host/v1?key=1"]
)
def test_an_address_that_is_none_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="Expected") as caught:
        ChatApi(url, "m")
    assert "pass" not in str(caught.value).replace("password", "")


def test_a_cancelled_request_closes_its_connection() -> None:
    with serving(FakeApi([STALL])) as fake:

        async def run() -> None:
            asking = asyncio.create_task(ChatApi(fake.url, "m").complete(body))
            await asyncio.to_thread(fake.begun.wait, 30)
            asking.cancel()
            await asyncio.wait({asking})

        asyncio.run(run())
        assert fake.hung_up.wait(30)


def _reads(**fields: object) -> Callable[[], tuple[str, str]]:
    def read() -> tuple[str, str]:
        _, reply = ask([said(**fields)])  # type: ignore[arg-type]
        return reply.message.text, reply.message.thoughts

    return read


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (_reads(text="a", reasoning_content="why"), ("a", "why")),
        (_reads(text="a", reasoning="why"), ("a", "why")),
        (
            _reads(
                text=[
                    {"type": "thinking", "thinking": [{"type": "text", "text": "why"}]},
                    {"type": "text", "text": "a"},
                ]
            ),
            ("a", "why"),
        ),
        (_reads(text=None), ("", "")),
    ],
    ids=["reasoning_content", "reasoning", "parts", "nothing"],
)
def test_text_and_reasoning_are_found_wherever_a_server_puts_them(
    read: Callable[[], tuple[str, str]], expected: tuple[str, str]
) -> None:
    assert read() == expected


@pytest.mark.parametrize("usage", ["many", {"prompt_tokens": -1}, {"prompt_tokens": None}])
def test_odd_counts_do_not_cost_a_good_reply(usage: object) -> None:
    reply = said("a")
    assert isinstance(reply.body, dict)
    reply.body["usage"] = usage
    assert ask([reply])[1].usage is None
