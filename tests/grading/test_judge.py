"""The judge client over a mocked transport: what is retried, what is told, what is paid for."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from judge_fakes import Endpoint, Served, reply

from clawgym_env.errors import GraderError
from clawgym_env.grading import Judge, JudgeUsage


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{text} is no number.") from None


def ask(judge: Judge, user: str = "How much?") -> tuple[float, JudgeUsage]:
    return asyncio.run(judge.ask("Be strict.", user, read_number))


def test_a_question_is_sent_with_model_key_and_temperature_zero() -> None:
    endpoint = Endpoint(["0.5"])
    assert ask(endpoint.judge(api_key="k")) == (0.5, JudgeUsage(1, 0, 10, 2))
    assert endpoint.headers[0]["authorization"] == "Bearer k"
    assert endpoint.asked == [
        {
            "model": "strict-1",
            "temperature": 0.0,
            "max_tokens": 4096,
            "messages": [{"role": "system", "content": "Be strict."}, {"role": "user", "content": "How much?"}],
        }
    ]


def test_no_key_sends_no_header_and_no_temperature_leaves_it_to_the_server() -> None:
    endpoint = Endpoint(["1"])
    ask(endpoint.judge(temperature=None))
    assert "authorization" not in endpoint.headers[0]
    assert "temperature" not in endpoint.asked[0]


@pytest.mark.parametrize(
    "failure",
    [
        httpx.Response(429, headers={"retry-after": "0"}),
        httpx.Response(429, headers={"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}),
        httpx.Response(500, text="oops"),
        httpx.Response(503),
        httpx.Response(408),
        httpx.Response(200, text="<html>"),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json={"error": "busy"}),
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("slow"),
        httpx.RemoteProtocolError("cut"),
    ],
)
def test_a_failure_that_may_pass_is_tried_again_at_no_cost(failure: Served) -> None:
    endpoint = Endpoint([failure, failure, "0.25"])
    assert ask(endpoint.judge()) == (0.25, JudgeUsage(1, 0, 10, 2))
    assert len(endpoint.asked) == 3
    assert endpoint.asked[0] == endpoint.asked[2]


def test_a_failure_that_does_not_pass_is_an_error_that_names_it() -> None:
    endpoint = Endpoint([httpx.Response(503, text="overloaded")])
    with pytest.raises(GraderError, match=r"got no answer in 3 tries. The last: status 503: overloaded"):
        ask(endpoint.judge(max_retries=2))
    assert len(endpoint.asked) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_a_refusal_is_an_error_at_once(status: int) -> None:
    endpoint = Endpoint([httpx.Response(status, text="no such model")])
    with pytest.raises(GraderError, match=f"got status {status}: no such model Check the address"):
        ask(endpoint.judge())
    assert len(endpoint.asked) == 1


def test_an_endpoint_that_never_answers_is_an_error() -> None:
    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    transport = httpx.MockTransport(hang)
    judge = Judge("http://judge/v1", "m", timeout_s=0.05, max_retries=1, backoff_s=0.0, transport=transport)
    with pytest.raises(GraderError, match=r"got no answer in 2 tries\. The last: TimeoutError"):
        ask(judge)


def test_a_reply_that_is_no_use_is_told_what_is_wrong_and_paid_for() -> None:
    endpoint = Endpoint(["good", reply(None), "0.75"])
    assert ask(endpoint.judge()) == (0.75, JudgeUsage(3, 0, 30, 6))
    told = endpoint.asked[1]["messages"]
    assert told[:2] == endpoint.asked[0]["messages"]
    assert told[2] == {"role": "assistant", "content": "good"}
    assert "good is no number." in told[3]["content"]
    assert len(endpoint.asked[2]["messages"]) == 4  # the latest reply only


def test_a_judge_that_does_not_come_to_the_point_is_an_error() -> None:
    judge = Endpoint(["good"]).judge(max_retries=2)
    with pytest.raises(GraderError, match=r"got 3 that are none. The last: good is no number. It ends: 'good'"):
        ask(judge)
    assert judge.usage.calls == 3


def test_fields_that_a_server_refuses_by_name_are_left_out_or_renamed_from_then_on() -> None:
    def refusal(field: str) -> httpx.Response:
        return httpx.Response(400, json={"error": {"message": "Unsupported", "param": field}})

    endpoint = Endpoint([refusal("max_tokens"), refusal("temperature"), "1"])
    judge = endpoint.judge()
    assert ask(judge)[0] == ask(judge, "Again?")[0] == 1.0
    assert [sorted(set(body) - {"model", "messages"}) for body in endpoint.asked] == [
        ["max_tokens", "temperature"],
        ["max_completion_tokens", "temperature"],
        ["max_completion_tokens"],
        ["max_completion_tokens"],
    ]


def test_equal_questions_are_paid_once_also_at_once_and_different_ones_each() -> None:
    endpoint = Endpoint(["0.5"])

    async def main() -> list[tuple[float, JudgeUsage]]:
        judge = endpoint.judge()
        return await asyncio.gather(*(judge.ask("s", text, read_number) for text in ("a", "a", "b", "a")))

    answers = asyncio.run(main())
    assert {answer for answer, _ in answers} == {0.5}
    assert sorted(usage.calls for _, usage in answers) == [0, 0, 1, 1]
    assert len(endpoint.asked) == 2


def test_whoever_asks_first_may_give_up_without_harm_to_who_waits() -> None:
    endpoint = Endpoint(["0.5"])

    async def main() -> float:
        judge = endpoint.judge()
        first, second = (asyncio.ensure_future(judge.ask("s", "a", read_number)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        return (await second)[0]

    assert asyncio.run(main()) == 0.5


def test_kept_replies_outlive_the_judge_and_belong_to_the_whole_question(tmp_path: Path) -> None:
    endpoint = Endpoint(["0.5"])
    assert ask(endpoint.judge(cache=tmp_path))[1].calls == 1
    assert ask(endpoint.judge(cache=tmp_path)) == (0.5, JudgeUsage(cached=1))
    assert len(endpoint.asked) == 1
    ask(endpoint.judge(cache=tmp_path), "Another?")
    ask(endpoint.judge(cache=tmp_path, temperature=0.5))
    assert len(endpoint.asked) == 3
    other = Judge("http://judge/v1", "other", cache=tmp_path, transport=httpx.MockTransport(endpoint))
    assert ask(other)[1].calls == 1


def test_a_reply_that_was_no_use_is_not_kept_and_a_broken_file_is_asked_again(tmp_path: Path) -> None:
    endpoint = Endpoint(["good", "0.5"])
    ask(endpoint.judge(cache=tmp_path))
    (kept,) = tmp_path.rglob("*.txt")
    assert kept.read_text() == "0.5"
    kept.write_bytes(b"\xff")
    assert ask(endpoint.judge(cache=tmp_path))[1].calls == 1
    kept.write_text("broken")
    assert ask(endpoint.judge(cache=tmp_path))[1].calls == 1
    assert kept.read_text() == "0.5"


def test_at_most_so_many_requests_are_under_way() -> None:
    now, most = 0, 0

    async def serve(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1
        return reply("1")

    async def main() -> None:
        judge = Judge("http://judge/v1", "m", max_concurrency=3, transport=httpx.MockTransport(serve))
        await asyncio.gather(*(judge.ask("s", str(i), read_number) for i in range(12)))
        assert judge.usage.calls == 12

    asyncio.run(main())
    assert most == 3


def test_a_judge_is_named_by_address_and_model() -> None:
    judge = Judge.parse("https://host/v1/#org/model-1", api_key="k")
    assert (judge.url, judge.model) == ("https://host/v1", "org/model-1")
    assert Judge.parse(judge) is judge
    for spec in ("host#m", "http://host/v1", "http://host/v1#", ""):
        with pytest.raises(ValueError, match="Expected a model as URL#MODEL"):
            Judge.parse(spec)


def test_usage_adds_up() -> None:
    assert JudgeUsage(1, 0, 5, 2) + JudgeUsage(2, 1, 1, 1) == JudgeUsage(3, 1, 6, 3)


@pytest.mark.parametrize(
    "usage", [None, [], "many", {"prompt_tokens": None}, {"prompt_tokens": 1.5}, {"prompt_tokens": -5}]
)
def test_odd_counts_of_a_server_do_not_cost_a_good_reply(usage: object) -> None:
    body = {"choices": [{"message": {"content": "0.5"}}], "usage": usage}
    assert ask(Endpoint([httpx.Response(200, json=body)]).judge()) == (0.5, JudgeUsage(1))


def test_a_reply_in_parts_is_put_together() -> None:
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "9"}]}, {"type": "text", "text": "0.5"}]
    body = {"choices": [{"message": {"content": parts}}]}
    assert ask(Endpoint([httpx.Response(200, json=body)]).judge()) == (0.5, JudgeUsage(1))


def test_an_answer_without_end_is_left_and_not_kept_in_memory() -> None:
    sent: list[int] = []

    class Endless(httpx.AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            while True:
                sent.append(1 << 20)
                yield bytes(1 << 20)

    async def serve(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Endless())

    judge = Judge("http://judge/v1", "m", max_retries=0, transport=httpx.MockTransport(serve))
    with pytest.raises(GraderError, match="more than 8388608 bytes"):
        ask(judge)
    assert sum(sent) < 10 << 20


@pytest.mark.parametrize("status", [401, 503])
def test_a_key_that_the_server_repeats_is_in_no_error(status: int) -> None:
    endpoint = Endpoint([httpx.Response(status, json={"error": {"message": "Wrong API key: sk-secret"}})])
    with pytest.raises(GraderError, match="Wrong API key: ") as caught:
        ask(endpoint.judge(api_key="sk-secret"))
    assert "sk-secret" not in str(caught.value)


def test_an_address_with_a_password_is_refused_since_results_name_it() -> None:
    with pytest.raises(ValueError, match="without a user, password or query") as caught:
        Judge("https://me:hunter2@judge/v1", "m")
    assert "hunter2" not in str(caught.value)


def test_a_reply_that_cannot_be_kept_is_still_good(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "full").write_text("no folder")
    assert ask(Endpoint(["0.5"]).judge(cache=tmp_path / "full")) == (0.5, JudgeUsage(1, 0, 10, 2))
    assert "could not be kept" in caplog.text
