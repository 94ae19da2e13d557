"""10,000 malformed bodies per dialect: each gets a 4xx in the dialect's own form or a valid 200, none of them another.

The parsers see all of them, the running proxy every 40th over a socket (`-m slow`: all). Two rollouts with a secret of
their own share the process; what one is asked never holds the other's, so no reply may.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from anthropic.types import Message as AnthropicMessage
from fuzzing import SECRET, VALID, Case, cases
from google.genai.types import CountTokensResponse, GenerateContentResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from proxy_rig import Rig, running

from clawgym_env.engine.scripted import ScriptedEngine, tool_call
from clawgym_env.errors import ProxyError
from clawgym_env.messages import ChatRequest
from clawgym_env.proxy.dialects import DIALECTS, dialect_of
from clawgym_env.proxy.session import RolloutSession
from clawgym_env.proxy.wire import bounded
from clawgym_env.tasks.task import Limits

COUNT = 10_000
THINNED = 40
CLIENTS = 8
LIMITS = Limits(max_calls=10**6, max_total_tokens=10**9)
SECRETS = ("alpacaOfTheFirst", "zebraOfTheSecond")
NAMES = [dialect.NAME for dialect in DIALECTS]
MAX_ERROR = 2000
"""Bytes. An error says what was wrong and does not send the client's own megabytes back."""


def split(path: str) -> tuple[str, str]:
    """Return what the dialect gets of a path: without the version, and without the query too."""
    target = path.split("/", 2)[2]
    return target, target.partition("?")[0]


def require_own_error(dialect: str, status: int, body: bytes) -> None:
    """Fail unless an error has the form that clients of a dialect read."""
    told = json.loads(body)
    assert len(body) <= MAX_ERROR, body[:300]
    error = told["error"]
    assert isinstance(error["message"], str)
    if dialect == "messages":
        assert told["type"] == "error"
        assert set(error) == {"type", "message"}
    elif dialect == "gemini":
        assert set(error) == {"code", "message", "status"}
        assert error["code"] == status
    else:
        assert set(error) == {"message", "type", "param", "code"}


def require_promised_types(request: ChatRequest) -> None:
    """Fail unless every field of a request is what its type says, and is text that can be written down."""
    assert request.messages
    assert request.max_tokens is None or (type(request.max_tokens) is int and request.max_tokens >= 1)
    texts: list[Any] = [request.model, *request.stop, *request.unknown_fields]
    for message in request.messages:
        assert message.role in ("system", "user", "assistant", "tool")
        texts += [message.content, message.reasoning or "", message.tool_call_id or ""]
        texts += [text for call in message.tool_calls for text in (call.id, call.name, call.arguments)]
    for tool in request.tools:
        texts += [tool.name, tool.description]
        assert isinstance(tool.parameters, dict)
    assert all(isinstance(text, str) for text in texts)
    "".join(texts).encode()


@pytest.mark.parametrize("name", NAMES)
def test_parsers_take_or_refuse_every_body(name: str) -> None:
    async def test() -> None:
        async with running(limits=LIMITS) as rig:
            outcomes: Counter[str] = Counter()
            for case in cases(name, COUNT):
                target, path = split(case.path)
                dialect = dialect_of(path, {})
                assert name == dialect.NAME
                try:
                    request, digest = rig.session.read_request(dialect, case.body, target)
                    require_promised_types(request)
                    outcomes["taken"] += 1
                    assert len(digest) == 16
                except ProxyError as refused:
                    require_own_error(name, 400, dialect.error_body("invalid_request", bounded(str(refused))))
                    outcomes["refused"] += 1
                except Exception as error:
                    raise AssertionError(f"{name} {case.number} {case.path}: {case.body[:2000]!r}") from error
            assert outcomes["taken"] > COUNT // 10 < outcomes["refused"], outcomes

    asyncio.run(test())


def events(body: bytes) -> list[Any]:
    """Return the data of a stream of events, comments left out."""
    datas = [line.removeprefix(b"data: ") for line in re.split(rb"\r?\n", body) if line.startswith(b"data: ")]
    return [data if data == b"[DONE]" else json.loads(data) for data in datas]


def require_chat(body: bytes, *, stream: bool) -> None:
    if not stream:
        ChatCompletion.model_validate(json.loads(body), strict=True)
        return
    *chunks, last = events(body)
    assert last == b"[DONE]"
    assert any(ChatCompletionChunk.model_validate(chunk, strict=True).choices for chunk in chunks)


def require_messages(body: bytes, *, stream: bool) -> None:
    if not stream:
        told = json.loads(body)
        if told.keys() != {"input_tokens"}:
            AnthropicMessage.model_validate(told, strict=True)
        return
    kinds = [event["type"] for event in events(body)]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


def require_responses(body: bytes, *, stream: bool) -> None:
    told = events(body)[-1]["response"] if stream else json.loads(body)
    Response.model_validate(told)


def require_gemini(body: bytes, *, stream: bool) -> None:
    if stream:
        (told,) = events(body)
    else:
        told = json.loads(body)
        told = told[0] if isinstance(told, list) else told
    (CountTokensResponse if told.keys() == {"totalTokens"} else GenerateContentResponse).model_validate(told)


VALIDATORS: dict[str, Callable[..., None]] = {
    "chat": require_chat,
    "messages": require_messages,
    "responses": require_responses,
    "gemini": require_gemini,
}


def policy(prompt: str, turn: int) -> str:
    """Repeat the secrets of the prompt, in texts, thoughts and calls, well-formed and not."""
    told = " ".join(secret for secret in SECRETS if secret in prompt) or "nothing"
    forms = (
        told,
        f"<think>{told}</think>{told}\n" + tool_call("read", path=told) * 2,
        tool_call("new", **{told: [1e3, None, "\u2028"]}),
        f'<tool_call>{{"name": "read", "arguments": {{"path": {told}}}</tool_call>',
        "",
    )
    return forms[len(prompt) % len(forms)]


async def fuzz(rig: Rig, session: RolloutSession, own: int, name: str, chosen: Iterable[Case]) -> Counter[int]:
    """Send cases of one dialect to one rollout; return how often each status came back."""
    statuses: Counter[int] = Counter()
    for case in chosen:
        body = case.body.replace(SECRET.encode(), SECRETS[own].encode())
        try:
            answer = await rig.http.post(rig.url(case.path, session), content=body)
            statuses[answer.status_code] += 1
            assert SECRETS[1 - own].encode() not in answer.content
            if answer.status_code == 200:
                stream = answer.headers["content-type"].startswith("text/event-stream")
                VALIDATORS[name](answer.content, stream=stream)
            else:
                assert answer.status_code in (400, 404, 413)
                require_own_error(name, answer.status_code, answer.content)
        except (AssertionError, ValueError, LookupError, httpx.HTTPError) as error:
            raise AssertionError(f"{name} {case.number} {case.path}: {body[:2000]!r}") from error
    return statuses


@asynccontextmanager
async def two_rollouts() -> AsyncIterator[tuple[Rig, Sequence[RolloutSession]]]:
    engine = ScriptedEngine(policy)
    async with running(engine, limits=LIMITS) as rig:
        yield rig, (rig.session, rig.server.open_session(engine, limits=LIMITS))


async def require_separate(sessions: Sequence[RolloutSession], engine: ScriptedEngine) -> None:
    """Fail unless both rollouts live, and no call of either holds anything of the other's."""
    for own, session in enumerate(sessions):
        assert session.engine_error is None
        assert not session.exhausted.done()
        tree = await session.settle()
        assert tree.calls
        for index in range(len(tree.calls)):
            read = engine.tokenizer.decode(tree.prompt(index).tolist())
            assert SECRETS[1 - own] not in read


async def through_the_socket(name: str, thinned: int) -> Counter[int]:
    """Send cases to two rollouts at once from several clients; return the statuses."""
    chosen = [case for case in cases(name, COUNT) if case.number % thinned == 0]
    async with two_rollouts() as (rig, sessions):
        shares = [
            fuzz(rig, sessions[client % 2], client % 2, name, chosen[client::CLIENTS]) for client in range(CLIENTS)
        ]
        async with asyncio.timeout(50 if thinned > 1 else None):
            statuses = sum(await asyncio.gather(*shares), Counter[int]())
        assert isinstance(rig.engine, ScriptedEngine)
        await require_separate(sessions, rig.engine)
    assert statuses.total() == len(chosen)
    return statuses


@pytest.mark.parametrize("name", NAMES)
def test_the_running_proxy_takes_or_refuses_bodies_and_keeps_rollouts_apart(name: str) -> None:
    statuses = asyncio.run(through_the_socket(name, THINNED))
    assert statuses[200] > 20 < statuses[400], statuses


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_running_proxy_takes_or_refuses_every_body(name: str) -> None:
    statuses = asyncio.run(through_the_socket(name, 1))
    assert statuses[200] > 1000 < statuses[400], statuses


@pytest.mark.parametrize("name", NAMES)
def test_the_valid_bodies_are_answered(name: str) -> None:
    async def test() -> None:
        async with two_rollouts() as (rig, sessions):
            valid = [Case(i, path, json.dumps(body).encode()) for i, (path, body) in enumerate(VALID[name])]
            assert await fuzz(rig, sessions[0], 0, name, valid) == {200: len(valid)}

    asyncio.run(test())


def test_what_one_rollout_was_told_is_unknown_to_another() -> None:
    """A reply stolen with its ids, and a key in a body, connect to nothing."""

    async def test() -> None:
        async with two_rollouts() as (rig, (mine, theirs)):
            ask = {"model": "policy", "messages": [{"role": "user", "content": f"{SECRETS[1]}!"}]}
            told = (await rig.post("/v1/chat/completions", ask, theirs)).json()["choices"][0]["message"]
            stolen = [*ask["messages"], told, {"role": "user", "content": theirs.key}]
            assert (await rig.post("/v1/chat/completions", {**ask, "messages": stolen}, mine)).status_code == 200
            tree = await mine.settle()
            assert [call.lineage_parent for call in tree.calls] == [None]
            assert len((await theirs.settle()).calls) == 1

    asyncio.run(test())


@pytest.mark.parametrize("name", NAMES)
def test_only_the_very_key_opens_a_rollout(name: str) -> None:
    async def test() -> None:
        async with running(limits=LIMITS) as rig:
            path, body = VALID[name][0]
            key = rig.session.key
            wrong = [
                key[:-1],
                f"{key}0",
                key.upper(),
                f"{key}%00",
                f"..%2f{key}",
                f"{key};",
                "",
                "%ff",
                "*",
            ]
            for other in wrong:
                url = f"http://127.0.0.1:{rig.port}/r/{other}{path}"
                answer = await rig.http.post(url, json=body)
                assert answer.status_code == 404, other
            assert rig.session.num_calls == 0

    asyncio.run(test())
