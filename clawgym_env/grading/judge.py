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
from collections.abc import Callable, Set
from pathlib import Path
from typing import TypeAlias, TypeVar, Union
from weakref import WeakValueDictionary

import httpx

from clawgym_env.chat_api import ApiError, ApiRefused, ChatApi
from clawgym_env.engine.base import ApiUsage
from clawgym_env.errors import GraderError
from clawgym_env.grading.base import JudgeUsage
from clawgym_env.grading.judge_cache import ReplyCache
from clawgym_env.messages import Json

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAIT_S = 30.0
"""Between two tries, whatever the server asks for."""
JudgeLike: TypeAlias = Union[str, "Judge"]
"""A judge, or "URL#MODEL"."""


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
        self._api = ChatApi(
            url,
            model,
            api_key=api_key,
            timeout_s=timeout_s,
            max_retries=max_retries,
            backoff_s=backoff_s,
            max_wait_s=MAX_WAIT_S,
            max_concurrency=max_concurrency,
            transport=transport,
        )
        self.url = self._api.url
        self.model = model
        self.usage = JudgeUsage()
        """Of everything asked so far, answers that were no use included."""
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._max_retries = max_retries
        self._cache = ReplyCache(cache)
        self._asked: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

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
        """Return the text of one reply and what it cost."""
        try:
            reply = await self._api.complete(lambda refused: self._body(messages, refused))
        except ApiRefused as refusal:
            raise GraderError(
                f"Expected {self.url} to answer as judge {self.model!r}, got {refusal} "
                "Check the address, the model's name and the API key."
            ) from refusal
        except ApiError as error:
            raise GraderError(f"Expected {self.url} to answer as judge {self.model!r}, got {error}") from error
        counted = reply.usage or ApiUsage()
        usage = JudgeUsage(1, 0, counted.prompt_tokens, counted.completion_tokens)
        self.usage += usage
        return reply.message.text, usage

    def _body(self, messages: list[dict[str, str]], refused: Set[str]) -> dict[str, Json]:
        body: dict[str, Json] = {"messages": [dict(message) for message in messages]}
        if self._temperature is not None and "temperature" not in refused:
            body["temperature"] = self._temperature
        return body | {"max_completion_tokens" if "max_tokens" in refused else "max_tokens": self._max_tokens}
