"""One model behind any OpenAI-compatible chat-completions endpoint: a request is sent until it is answered or refused.

Asked by the judge (`grading.judge`) and by the engine that relays a harness's calls (`engine.relay`). Invariants: what
comes back is a chat completion; the key is in no error and no log; nothing is held between two requests, so that there
is nothing to close, and cancelling a request closes its connection.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import ssl
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeAlias

import httpx
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from clawgym_env.engine.base import ApiUsage
from clawgym_env.errors import ClawGymError
from clawgym_env.messages import Json, well_formed

logger = logging.getLogger(__name__)

CONNECT_S = 10.0
MAX_ANSWER_BYTES = 8 << 20
"""Of one answer, unpacked; a larger one is none."""
MAX_SAID, MAX_EXCERPT = 2000, 300
"""Characters of an answer that are looked at for its reasons, and shown in an error."""
PASSING = frozenset({408, 409, 425, 429})
"""Statuses below 500 that another try may not meet again."""
OUT_OF_MONEY = frozenset({"insufficient_quota", "billing_hard_limit_reached", "billing_not_active"})
"""Codes of a 429 that no waiting cures."""
REFUSABLE = ("top_p", "top_k", "temperature", "seed", "max_tokens", "reasoning_effort", "reasoning_content")
"""What a request can do without, in the order it is given up where a server names several at once."""

_UNWANTED = re.compile(
    r"unsupported|not support|unrecogni[sz]ed|unknown|unexpected|extra|deprecated|not permitted|not allowed|cannot|"
    r"only the default",
    re.IGNORECASE,
)
_OVERFLOW = re.compile(
    r"context[ _-]?(length|window|size)|maximum (context|prompt|input|sequence) length|prompt is too long|"
    r"input is too long|(input|prompt) (token count|length|tokens?) .*exceed|too large for model|exceeds? .*max(imum)? "
    r"(length|number of tokens)|exceeded model token limit|range of input length|reduce the length of|"
    r"max_new_tokens.* must be <=|request_too_large",
    re.IGNORECASE | re.DOTALL,
)
"""How the servers of this world say that a prompt does not fit: OpenAI and what speaks like it (vLLM, llama.cpp,
DeepSeek, Groq, OpenRouter), Anthropic, Google, xAI, Mistral, Moonshot, DashScope, Bedrock, TGI."""
_FILTERED = re.compile(r"content[ _-]?(filter|policy|management)|responsible ?ai|safety system", re.IGNORECASE)


class ApiError(ClawGymError):
    """The endpoint gave no reply."""


class ApiUnanswered(ApiError):
    """It did not answer however often it was asked."""

    def __init__(self, tries: int, problem: str) -> None:
        super().__init__(f"no answer in {tries} tries. The last: {problem}")
        self.tries = tries
        self.problem = problem


class ApiRefused(ApiError):
    """It will not answer this request: the same again would be refused again."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"status {status}: {said[:MAX_EXCERPT]}")
        self.status = status
        self.said = said
        """What the server says of it; an error shows the beginning."""

    @property
    def overflow(self) -> bool:
        """Whether the prompt does not fit the model's window."""
        return self.status == 413 or (self.status in (400, 422) and _OVERFLOW.search(self.said) is not None)

    @property
    def filtered(self) -> bool:
        """Whether a content filter keeps the model from seeing the prompt."""
        return self.status in (400, 403) and _FILTERED.search(self.said) is not None


class _Part(BaseModel):
    """Of a content in several parts, as thinking models of some servers give it."""

    text: str = ""
    thinking: list[_Part] | str = ""

    @property
    def thought(self) -> str:
        return self.thinking if isinstance(self.thinking, str) else "".join(part.text for part in self.thinking)


class ApiFunction(BaseModel):
    """What a tool call asks for."""

    name: str
    arguments: str | dict[str, JsonValue] | None = None
    """JSON text; some servers give the object itself."""


class ApiCall(BaseModel):
    """A tool call, with whatever else the server wants to see again (Gemini signs its thoughts here)."""

    model_config = ConfigDict(extra="allow")

    id: str | None = None
    function: ApiFunction


class ApiMessage(BaseModel):
    """The assistant's message of a completion."""

    content: str | list[_Part] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ApiCall] | None = None

    @property
    def text(self) -> str:
        """What it says, all parts of it; thoughts left out."""
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content or ""

    @property
    def thoughts(self) -> str:
        """What it says of its reasoning, wherever the server puts that."""
        parts = self.content if isinstance(self.content, list) else []
        return self.reasoning_content or self.reasoning or "".join(part.thought for part in parts)


@dataclass(frozen=True, slots=True)
class ChatReply:
    """A chat completion."""

    message: ApiMessage
    finish_reason: str | None
    usage: ApiUsage | None
    """None where the server tells none, or odd ones, which must not cost a good reply."""


class _Choice(BaseModel):
    message: ApiMessage
    finish_reason: str | None = None


class _Completion(BaseModel):
    """The body of a chat completion, as far as it matters here."""

    choices: list[_Choice]


class _Counted(BaseModel):
    usage: ApiUsage | None = None


class _Complaint(BaseModel):
    message: str = ""
    param: str | None = None
    code: str | int | None = None
    type: str | None = None


class _Refusal(BaseModel):
    """The body of an error in OpenAI's form."""

    error: _Complaint


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back for one request."""

    status: int
    retry_after: str
    body: bytes

    @property
    def text(self) -> str:
        """The beginning of the body."""
        return self.body[:MAX_SAID].decode(errors="replace")

    @property
    def complaint(self) -> _Complaint:
        """The error, as far as it is told in the usual form."""
        with suppress(ValidationError):
            return _Refusal.model_validate_json(self.body).error
        return _Complaint()


class _TryAgain(Exception):
    """A failure that may pass."""

    def __init__(self, problem: str, wait_s: float | None = None) -> None:
        super().__init__(problem)
        self.wait_s = wait_s


MakeRequest: TypeAlias = Callable[[Set[str]], Mapping[str, Json]]
"""Makes the body of a request, without those of `REFUSABLE` that the server does not take or with others in their
place."""


class ChatApi:
    """Asks one model at one endpoint, from one event loop.

    Args:
        url: up to and including `/v1`.
        model: as the endpoint knows it.
        api_key: sent as bearer token, without white space around it.
        timeout_s: of one request.
        max_retries: how often one request is sent again (429, 5xx, no connection, no answer).
        backoff_s: wait before the second try, doubled with every further one.
        max_wait_s: between two tries, whatever the server asks for.
        max_concurrency: requests under way at once; waiting ones included.
        transport: instead of plain HTTP(S), for a proxy or a test.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "",
        timeout_s: float = 600.0,
        max_retries: int = 6,
        backoff_s: float = 1.0,
        max_wait_s: float = 60.0,
        max_concurrency: int = 64,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")) or not model:
            raise ValueError(
                f"Expected a model as URL#MODEL, such as http://127.0.0.1:8000/v1#qwen3, got {url!r} and {model!r}."
            )
        if "@" in url.split("/")[2] or "?" in url:  # results and errors name the address
            raise ValueError("Expected an address without a user, password or query, got one. Give the key as api_key.")
        try:
            httpx.URL(url)
        except httpx.InvalidURL as error:
            raise ValueError(f"Expected an address such as http://127.0.0.1:8000/v1, got {url!r}: {error}.") from None
        self.url = url.rstrip("/")
        self.model = model
        self._api_key = _usable_key(api_key)
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._backoff_s = backoff_s
        self._max_wait_s = max_wait_s
        self._jitter = random.Random()
        self._under_way = asyncio.Semaphore(max_concurrency)
        self._transport = transport
        self._ssl: ssl.SSLContext | bool = False
        self._refused: frozenset[str] = frozenset()

    async def complete(self, request: MakeRequest) -> ChatReply:
        """Return the reply to a request, which is sent again while that may help.

        Raises:
            ApiUnanswered: it never was answered.
            ApiRefused: it never will be.
        """
        problem = ""
        async with self._under_way:
            for attempt in range(self._max_retries + 1):
                try:
                    return await self._once(request)
                except _TryAgain as failed:
                    problem, wait_s = str(failed), failed.wait_s
                if wait_s is None:
                    wait_s = self._backoff_s * 2.0**attempt * self._jitter.uniform(0.5, 1.0)
                if attempt < self._max_retries:
                    wait_s = min(self._max_wait_s, wait_s)
                    logger.info("%s did not answer (%s); trying again in %.1f s", self.url, problem, wait_s)
                    await asyncio.sleep(wait_s)
        raise ApiUnanswered(self._max_retries + 1, problem)

    def without_key(self, text: str) -> str:
        """Return text without the key, which some servers repeat."""
        return text.replace(self._api_key, "(the API key)") if self._api_key else text

    async def _once(self, request: MakeRequest) -> ChatReply:
        try:
            answer = await self._post(request)
        except (httpx.HTTPError, TimeoutError) as error:
            raise _TryAgain(self.without_key(f"{type(error).__name__}: {error}")) from error
        said = self.without_key(answer.text)
        excerpt = said[:MAX_EXCERPT]
        if answer.status in PASSING or answer.status >= 500:
            if {answer.complaint.code, answer.complaint.type} & OUT_OF_MONEY:
                raise ApiRefused(answer.status, said)
            raise _TryAgain(f"status {answer.status}: {excerpt}", _asked_wait_s(answer))
        if answer.status != 200:
            raise ApiRefused(answer.status, said)
        try:
            # Half of a pair of surrogates, which a cut emoji leaves, is nothing that pydantic reads.
            body = well_formed(json.dumps(json.loads(answer.body), ensure_ascii=False))
            choice = _Completion.model_validate_json(body).choices[0]
        except (ValueError, IndexError, RecursionError):
            raise _TryAgain(f"no chat completion: {excerpt}") from None
        if choice.finish_reason == "error":  # OpenRouter, where the provider broke off
            raise _TryAgain(f"a broken completion: {excerpt}")
        usage = None
        with suppress(ValidationError):
            usage = _Counted.model_validate_json(body).usage
        return ChatReply(choice.message, choice.finish_reason, usage)

    async def _post(self, request: MakeRequest) -> _Answer:
        """Send one request, leaving out or renaming what the server refuses by name, and remember that if it helps."""
        if self._ssl is False and self.url.startswith("https://"):
            self._ssl = ssl.create_default_context()
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        timeout = httpx.Timeout(self._timeout_s, connect=CONNECT_S)
        client = httpx.AsyncClient(
            headers=headers, timeout=timeout, transport=self._transport, trust_env=False, verify=self._ssl
        )
        refused = self._refused
        async with asyncio.timeout(self._timeout_s), client:  # httpx's clock starts anew with every byte
            while True:
                content = json.dumps({"model": self.model, **request(refused)}).encode()
                async with client.stream("POST", f"{self.url}/chat/completions", content=content) as response:
                    answer = await _received(response)
                field = _refused_field(answer, refused)
                if field is None:
                    break
                refused |= {field}
        if answer.status == 200 and refused > self._refused:
            logger.warning("%s does not take %s: left out from now on", self.model, ", ".join(refused - self._refused))
            self._refused = refused
        return answer


def _usable_key(api_key: str) -> str:
    """Return a key without the line end of the file it came from; errors about odd headers would show the key."""
    key = api_key.strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise ValueError("Expected an API key of printable ASCII without blanks, got other characters. Copy it again.")
    return key


async def _received(response: httpx.Response) -> _Answer:
    """Read an answer to its end, or as much as is allowed."""
    body = bytearray()
    async for part in response.aiter_bytes():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise _TryAgain(f"an answer of more than {MAX_ANSWER_BYTES} bytes")
    return _Answer(response.status_code, response.headers.get("retry-after", ""), bytes(body))


def _refused_field(answer: _Answer, known: Set[str]) -> str | None:
    """Return the field that the server does not take and that is not known for it; None for any other answer."""
    if answer.status not in (400, 422):
        return None
    if ApiRefused(answer.status, answer.text).overflow:  # which may name max_tokens as well
        return None
    left = [name for name in REFUSABLE if name not in known]
    complaint = answer.complaint
    if complaint.param:
        field = complaint.param.rpartition(".")[2]
        return field if field in left else None
    said = complaint.message or answer.text
    if not _UNWANTED.search(said):
        return None
    return next((name for name in left if re.search(rf"\b{name}\b", said)), None)


def _asked_wait_s(answer: _Answer) -> float | None:
    """Return the seconds that a `Retry-After` asks for, as a number or a date."""
    with suppress(ValueError):
        return max(0.0, float(answer.retry_after))
    with suppress(ValueError):
        until = parsedate_to_datetime(answer.retry_after)
        until = until if until.tzinfo is not None else until.replace(tzinfo=UTC)  # of a date that names no zone
        return max(0.0, (until - datetime.now(UTC)).total_seconds())
    return None
