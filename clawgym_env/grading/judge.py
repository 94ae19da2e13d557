"""A judge model behind any OpenAI-compatible endpoint.

Asked by `rubric`, one question at a time. Invariant: an answer that comes back was accepted by its reader, equal
questions are paid for once, also over a restart where a folder is given, and a judge that cannot be reached or does not
come to the point is a `GraderError`.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar, Union
from weakref import WeakValueDictionary

import httpx
from pydantic import BaseModel, Field, ValidationError

from clawgym_env.errors import GraderError
from clawgym_env.grading.base import JudgeUsage
from clawgym_env.grading.judge_cache import ReplyCache

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONNECT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20
"""Of one answer, unpacked; a larger one is none."""
MAX_WAIT_S = 30.0
"""Between two tries, whatever the server asks for."""
JudgeLike: TypeAlias = Union[str, "Judge"]
"""A judge, or "URL#MODEL"."""


class _Part(BaseModel):
    """Of a reply in several parts, as thinking models of some servers give it."""

    text: str = ""


class _Talk(BaseModel):
    content: str | list[_Part] | None = None

    @property
    def text(self) -> str:
        parts = self.content if isinstance(self.content, list) else [_Part(text=self.content or "")]
        return "".join(part.text for part in parts)


class _Choice(BaseModel):
    message: _Talk


class _Reply(BaseModel):
    """The body of a chat completion, as far as it matters here."""

    choices: list[_Choice]


class _Usage(BaseModel):
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)


class _Counted(BaseModel):
    """The same body's counts; read apart from it, since odd ones must not cost a good reply."""

    usage: _Usage = _Usage()


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back for one request."""

    status: int
    retry_after: str
    body: bytes


class _TryAgain(Exception):
    """A failure that may pass."""

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


class Judge:
    """Asks one model at one endpoint, from one event loop. Holds no connection, so there is nothing to close.

    Args:
        url: up to and including `/v1`.
        model: as the endpoint knows it.
        api_key: sent as bearer token.
        temperature: None leaves it to the server.
        max_tokens: of one reply, a thinking model's thoughts included.
        timeout_s: of one request; a judge has its own clock, `Limits.grader_s` is that of commands.
        max_retries: how often one request is sent again (429, 5xx, no connection, no answer), and apart from that how
            often the judge is told what was wrong with its reply.
        backoff_s: wait before the second try, doubled with every further one.
        max_concurrency: requests under way at once.
        cache: folder in which accepted replies outlive the process.
        transport: instead of plain HTTP(S), for a proxy or a test.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "",
        temperature: float | None = 0.0,
        max_tokens: int = 4096,
        timeout_s: float = 180.0,
        max_retries: int = 4,
        backoff_s: float = 1.0,
        max_concurrency: int = 8,
        cache: Path | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")) or not model:
            raise ValueError(
                f"Expected a judge as URL#MODEL, such as http://127.0.0.1:8000/v1#qwen3, got {url!r} and {model!r}."
            )
        if "@" in url.split("/")[2]:  # results and errors name the address
            raise ValueError("Expected a judge's address without a user or password, got one. Give the key as api_key.")
        self.url = url.rstrip("/")
        self.model = model
        self.usage = JudgeUsage()
        """Of everything asked so far, answers that were no use included."""
        self._api_key = api_key
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._jitter = random.Random()
        self._under_way = asyncio.Semaphore(max_concurrency)
        self._cache = ReplyCache(cache)
        self._asked: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._transport = transport
        self._ssl: ssl.SSLContext | bool = False
        self._refused: set[str] = set()

    @classmethod
    def parse(cls, spec: JudgeLike, *, api_key: str = "") -> Judge:
        """Return a judge from "URL#MODEL", or as it is."""
        if not isinstance(spec, str):
            return spec
        url, _, model = spec.partition("#")
        return cls(url, model, api_key=api_key)

    def keep_in(self, folder: Path) -> None:
        """Let accepted replies outlive the process in `folder`, unless the judge was made with a folder of its own."""
        if self._cache.folder is None:
            self._cache = ReplyCache(folder)

    async def ask(self, system: str, user: str, read: Callable[[str], T]) -> tuple[T, JudgeUsage]:
        """Return what `read` makes of the judge's reply, and what it cost.

        Args:
            read: raises `ValueError` for a reply that is no use, in words for the judge, which is asked again.

        Raises:
            GraderError: no usable reply.
        """
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        key = self._key(messages)
        lock = self._asked.setdefault(key, asyncio.Lock())
        async with lock:  # whoever asks the same waits here, and finds the reply
            kept = await self._cache.get(key)
            if kept is not None:
                try:
                    value = read(kept)
                except ValueError:
                    logger.warning("A kept reply of judge %s is no use, it is asked again", self.model)
                else:
                    self.usage += JudgeUsage(cached=1)
                    return value, JudgeUsage(cached=1)
            value, reply, usage = await self._until_usable(messages, read)
            await self._cache.put(key, reply)
            return value, usage

    def _key(self, messages: list[dict[str, str]]) -> str:
        request = {"model": self.model, "temperature": self._temperature, "max_tokens": self._max_tokens}
        return hashlib.sha256(json.dumps({**request, "messages": messages}, sort_keys=True).encode()).hexdigest()

    async def _until_usable(
        self, messages: list[dict[str, str]], read: Callable[[str], T]
    ) -> tuple[T, str, JudgeUsage]:
        used, talk, wrong = JudgeUsage(), messages, ""
        for _ in range(self._max_retries + 1):
            reply, usage = await self._complete(talk)
            used += usage
            try:
                return read(reply), reply, used
            except ValueError as error:
                wrong = str(error)
            again = f"Your reply could not be used: {wrong} Answer again, in exactly the form asked for."
            talk = [*messages, {"role": "assistant", "content": reply}, {"role": "user", "content": again}]
        raise GraderError(
            f"Expected a usable reply of judge {self.model!r}, got {self._max_retries + 1} that are none. "
            f"The last: {wrong} It ends: {reply[-500:]!r}"
        )

    async def _complete(self, messages: list[dict[str, str]]) -> tuple[str, JudgeUsage]:
        """Return the text of one reply, sending the request again while that may help."""
        problem = ""
        async with self._under_way:
            for attempt in range(self._max_retries + 1):
                try:
                    return await self._once(messages)
                except _TryAgain as failed:
                    problem, wait_s = str(failed), failed.wait_s
                if wait_s is None:
                    wait_s = self._backoff_s * 2.0**attempt * self._jitter.uniform(0.5, 1.0)
                if attempt < self._max_retries:
                    await asyncio.sleep(min(MAX_WAIT_S, wait_s))
        raise GraderError(
            f"Expected {self.url} to answer as judge {self.model!r}, got no answer in {self._max_retries + 1} tries. "
            f"The last: {problem}"
        )

    async def _once(self, messages: list[dict[str, str]]) -> tuple[str, JudgeUsage]:
        try:
            answer = await self._post(messages)
        except (httpx.HTTPError, TimeoutError) as error:
            raise _TryAgain(f"{type(error).__name__}: {error}") from error
        if answer.status in (408, 425, 429) or answer.status >= 500:
            raise _TryAgain(f"status {answer.status}: {self._excerpt(answer)}", _asked_wait_s(answer))
        if answer.status != 200:
            raise GraderError(
                f"Expected {self.url} to answer as judge {self.model!r}, got status {answer.status}: "
                f"{self._excerpt(answer)} Check the address, the model's name and the API key."
            )
        try:
            text = _Reply.model_validate_json(answer.body).choices[0].message.text
        except (ValidationError, IndexError):
            raise _TryAgain(f"no chat completion: {self._excerpt(answer)}") from None
        counted = _Usage()
        with suppress(ValidationError):
            counted = _Counted.model_validate_json(answer.body).usage
        usage = JudgeUsage(1, 0, counted.prompt_tokens, counted.completion_tokens)
        self.usage += usage
        return text, usage

    def _excerpt(self, answer: _Answer) -> str:
        """Return the beginning of an answer for an error, without the key, which some servers repeat."""
        text = answer.body[:2000].decode(errors="replace")
        return (text.replace(self._api_key, "(the API key)") if self._api_key else text)[:300]

    async def _post(self, messages: list[dict[str, str]]) -> _Answer:
        """Send one request, leaving out or renaming what the server has refused by name."""
        if self._ssl is False and self.url.startswith("https://"):
            self._ssl = ssl.create_default_context()
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        timeout = httpx.Timeout(self._timeout_s, connect=CONNECT_S)
        client = httpx.AsyncClient(
            headers=headers, timeout=timeout, transport=self._transport, trust_env=False, verify=self._ssl
        )
        async with asyncio.timeout(self._timeout_s), client:  # httpx's clock starts anew with every byte
            while True:
                async with client.stream("POST", f"{self.url}/chat/completions", json=self._body(messages)) as response:
                    answer = await _received(response)
                refused = _refused_field(answer) - self._refused
                if not refused:
                    return answer
                self._refused |= refused

    def _body(self, messages: list[dict[str, str]]) -> dict[str, object]:
        body: dict[str, object] = {"model": self.model, "messages": messages}
        if self._temperature is not None and "temperature" not in self._refused:
            body["temperature"] = self._temperature
        return body | {"max_completion_tokens" if "max_tokens" in self._refused else "max_tokens": self._max_tokens}


class _Complaint(BaseModel):
    param: str | None = None


class _Refusal(BaseModel):
    """The body of a 400 that names the field it is about, as OpenAI's does for its reasoning models."""

    error: _Complaint


async def _received(response: httpx.Response) -> _Answer:
    """Read an answer to its end, or as much as is allowed."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise _TryAgain(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return _Answer(response.status_code, response.headers.get("retry-after", ""), bytes(body))


def _refused_field(answer: _Answer) -> set[str]:
    """Return the optional field that the server does not take; empty for any other answer."""
    if answer.status != 400:
        return set()
    try:
        return {_Refusal.model_validate_json(answer.body).error.param or ""} & {"temperature", "max_tokens"}
    except ValidationError:
        return set()


def _asked_wait_s(answer: _Answer) -> float | None:
    """Return the seconds that a `Retry-After` asks for."""
    try:
        return min(MAX_WAIT_S, max(0.0, float(answer.retry_after)))
    except ValueError:
        return None
