"""Judges that answer from a script: over a mocked transport, or over a real socket through our own proxy."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.grading import Judge
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.tasks import Limits

Served = httpx.Response | Exception | str
"""An answer of the endpoint; a text stands for a good reply with it."""


def reply(text: str | None, *, prompt_tokens: int = 10, completion_tokens: int = 2) -> httpx.Response:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 12}
    return httpx.Response(200, json={"choices": [{"message": {"role": "assistant", "content": text}}], "usage": usage})


def verdict(*scores: float | list[bool], notes: str = "Because.") -> str:
    return json.dumps({"scores": {f"criterion_{i + 1}": score for i, score in enumerate(scores)}, "notes": notes})


class Endpoint:
    """An OpenAI-compatible endpoint that gives `answers` in turn, the last one for ever; `asked` keeps the bodies."""

    def __init__(self, answers: Iterable[Served]) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/chat/completions"
        self.headers.append(request.headers)
        self.asked.append(json.loads(request.content))
        answer = self.answers[min(len(self.asked), len(self.answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, str):
            return reply(answer)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    @property
    def prompts(self) -> list[str]:
        """What stood below the system prompt."""
        return [body["messages"][1]["content"] for body in self.asked]

    def judge(self, **options: Any) -> Judge:
        options = {"backoff_s": 0.0, **options}
        return Judge("http://judge/v1", "strict-1", transport=httpx.MockTransport(self), **options)


@asynccontextmanager
async def proxied_judge(
    script: Callable[[str, int], str], *, cache: Path | None = None
) -> AsyncIterator[tuple[Judge, list[str]]]:
    """Serve a scripted policy as judge on a real socket; yields the judge and the prompts that reached it."""
    prompts: list[str] = []

    def answer(prompt: str, turn: int) -> str:
        prompts.append(prompt)
        return script(prompt, turn)

    server = ProxyServer()
    await server.start()
    try:
        listener = await server.listen_tcp()
        session = server.open_session(ScriptedEngine(answer), limits=Limits(max_calls=1000))
        yield Judge(f"http://127.0.0.1:{listener.port}/r/{session.key}/v1", "policy", cache=cache), prompts
    finally:
        await server.close()
