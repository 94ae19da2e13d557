"""An engine over HTTP: a vLLM server that the user runs answers, token ids in and token ids out.

The proxy awaits `generate` as with the embedded engine; tokenizer and renderer come from the policy's folder, which
must be readable here. Generation only: the weights are the server's. Invariant: before the first call the server has
shown that its log-probabilities are those of the distribution it samples from, and every reply is checked to end at
its first stop id. The server is started with

    vllm serve FOLDER --enable-scale-out --logprobs-mode processed_logprobs

and on a CPU with --no-enable-chunked-prefill --max-num-batched-tokens WINDOW too: vLLM 0.32 ends there with "CPU
Generator does not use offset" when it reads the prompt of a seeded call in chunks, and every call here has its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx
import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds, VersionSpan
from clawgym_env.errors import ContextOverflow, EngineError
from clawgym_env.policy import load_text, policy_folder

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.tokenizer import TextTokenizer

GENERATE = "/inference/v1/generate"
START = "Start it with: vllm serve FOLDER --enable-scale-out --logprobs-mode processed_logprobs"
CONNECT_S = 10.0
PROBE_S = 300.0
"""The first request of a server compiles and warms up."""
IDLE_S = 2.0
"""An idle connection is given up before the server does (5 s), or a request could meet it closing."""
PROBE_TOKENS = 8
CERTAIN = 1e-3
"""Nats. A token drawn with top_k = 1 has log-probability 0 in the distribution it was drawn from."""


class UpdateNotSupported(EngineError):
    """The weights of this engine are not this process's to change."""


class _Card(BaseModel):
    """An entry of `/v1/models`."""

    id: str
    root: str | None = None
    """The folder or hub name it was loaded from."""
    parent: str | None = None
    """Set for LoRA adapters."""
    max_model_len: int | None = None


class _Cards(BaseModel):
    data: list[_Card]


class _Token(BaseModel):
    token_id: int
    logprob: float


class _Tokens(BaseModel):
    content: list[_Token]


class _WeightSpan(BaseModel):
    version: str


class _Choice(BaseModel):
    token_ids: list[int]
    logprobs: _Tokens | None = None
    finish_reason: str | None = None
    weight_versions: list[_WeightSpan] | None = None


class _Reply(BaseModel):
    choices: list[_Choice]


class VllmEngine:
    """Satisfies `engine.base.Engine`. Made by `connect`; used on one event loop."""

    def __init__(
        self, url: str, *, model: str, tokenizer: TextTokenizer, renderer: Renderer, context_length: int
    ) -> None:
        self.tokenizer = tokenizer
        self._url = url.rstrip("/")
        self._model = model
        self._renderer = renderer
        self._stops = frozenset(renderer.get_stop_token_ids())
        self._context_length = context_length
        self._client: httpx.AsyncClient | None = None
        self._closed = False

    @classmethod
    def connect(
        cls, url: str, *, cache: Path, policy: str | Path | None = None, renderer: str | None = None
    ) -> VllmEngine:
        """Ask a running server for its model, load the renderer and check how it answers. Blocking.

        Args:
            cache: where built policies are kept.
            policy: the served policy by name, or its folder on this machine; by default the folder that the server
                was started with.
            renderer: "chatml" or a family name of the `renderers` library; by default what the folder says or is.

        Raises:
            EngineError: no server there, or one that was started without a flag this engine needs, which is named.
        """
        url = url.rstrip("/")
        with httpx.Client(base_url=url, timeout=httpx.Timeout(PROBE_S, connect=CONNECT_S), trust_env=False) as client:
            card = _served_model(client, url)
            served = policy or card.root or card.id
            if not (policy_folder(served, cache) / "tokenizer.json").is_file():
                raise EngineError(
                    f"Expected the policy's folder with a tokenizer.json on this machine, got {str(served)!r}. "
                    f"Name it: vllm:{url}#FOLDER"
                )
            text = load_text(served, cache=cache, renderer=renderer)
            _probe(client, card.id, text.renderer.get_stop_token_ids()[0])
        if card.max_model_len is None:
            raise EngineError(
                f"Expected the window of the model at {url}/v1/models, got no max_model_len. Update vLLM."
            )
        return cls(
            url,
            model=card.id,
            tokenizer=text.tokenizer,
            renderer=text.renderer,
            context_length=card.max_model_len,
        )

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def policy_version(self) -> int:
        return 0

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Sample one turn. Cancelling the task closes the connection, on which the server aborts the sequence.

        Raises:
            ContextOverflow: no room for a single new token.
            EngineError: the server cannot be reached or refuses, or its answer is not what was asked for.
        """
        room = self._context_length - len(prompt_token_ids)
        if room < 1:
            raise ContextOverflow(len(prompt_token_ids), self._context_length)
        params = {
            "max_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop_token_ids": sorted(self._stops),
            "ignore_eos": True,  # the renderer's stop ids end a turn, and nothing else
            "logprobs": 0,  # of the sampled token alone
        }
        prompt = prompt_token_ids.tolist() if isinstance(prompt_token_ids, np.ndarray) else list(prompt_token_ids)
        body = orjson.dumps({"model": self._model, "token_ids": prompt, "sampling_params": params})
        response = await self._post(GENERATE, body)
        return self._generation(_choice(response))

    def update_weights(self, apply: Callable[[], None]) -> int:
        """Refuse: the server's weights are not this process's.

        Raises:
            UpdateNotSupported: always.
        """
        raise UpdateNotSupported(
            f"Expected an engine over weights of this process, got the vLLM server at {self._url}, which this version "
            "can only sample from. Train with engine=learner.engine()."
        )

    async def pause(self) -> None:
        """Stop decoding on the server; running sequences keep their state.

        Raises:
            EngineError: the server has no such route (VLLM_SERVER_DEV_MODE=1 opens it).
        """
        await self._control("/pause?mode=keep")

    async def resume(self) -> None:
        """Go on after `pause`.

        Raises:
            EngineError: the server has no such route.
        """
        await self._control("/resume")

    async def close(self) -> None:
        """Close the connections. What is being generated is aborted."""
        self._closed = True
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    async def _control(self, path: str) -> None:
        response = await self._post(path, b"", raises=False)
        if response.status_code in (403, 404):
            raise EngineError(
                f"Expected the server at {self._url} to answer POST {path}, got {response.status_code}. "
                "Start it with VLLM_SERVER_DEV_MODE=1 in its environment."
            )
        _raise_for_status(response)

    async def _post(self, path: str, body: bytes, *, raises: bool = True) -> httpx.Response:
        if self._closed:
            raise EngineError("Expected an open engine, got a closed one.")
        if self._client is None:
            self._client = httpx.AsyncClient(
                base_url=self._url,
                timeout=httpx.Timeout(None, connect=CONNECT_S),  # the runner has the clock of a rollout
                limits=httpx.Limits(max_connections=None, keepalive_expiry=IDLE_S),
                trust_env=False,
            )
        try:
            response = await self._client.post(path, content=body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            raise EngineError(
                f"Expected an answer from the vLLM server at {self._url}, got {type(error).__name__}: {error}. "
                "Look at its log."
            ) from error
        if raises:
            _raise_for_status(response)
        return response

    def _generation(self, choice: _Choice) -> Generation:
        """Check a choice against the contract of engines.

        Raises:
            EngineError: naming what does not hold.
        """
        ids, count = choice.token_ids, len(choice.token_ids)
        content = [] if choice.logprobs is None else choice.logprobs.content
        logprobs = np.array([token.logprob for token in content], dtype=np.float32)
        if [token.token_id for token in content] != ids:
            raise EngineError(
                f"Expected the log-probability of each of {count} sampled ids, got {len(content)} others."
            )
        if not np.isfinite(logprobs).all():
            raise EngineError("Expected finite log-probabilities, got some that are not. Look at the model's weights.")
        finishes: dict[str | None, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length"}
        finish = finishes.get(choice.finish_reason, "abort")
        first_stop = next((i for i, token in enumerate(ids) if token in self._stops), count)
        if first_stop < count - 1 or (finish == "stop") != (first_stop == count - 1):
            raise EngineError(
                f"Expected a turn that ends at its first stop id, got finish_reason={choice.finish_reason!r} with the "
                f"first stop id at {first_stop} of {count}."
            )
        versions = {span.version for span in choice.weight_versions or ()}
        if len(versions) > 1:
            raise EngineError(f"Expected weights that stay the same, got versions {sorted(versions)} in one reply.")
        return Generation(np.array(ids, dtype=np.int32), logprobs, finish, (VersionSpan(0, 0, count),))


def _served_model(client: httpx.Client, url: str) -> _Card:
    """Return what the server serves; LoRA adapters are no policies of their own.

    Raises:
        EngineError: nothing answers there, or something else does.
    """
    try:
        response = client.get("/v1/models")
        response.raise_for_status()
        cards = [card for card in _Cards.model_validate_json(response.content).data if card.parent is None]
    except (httpx.HTTPError, ValidationError) as error:
        raise EngineError(f"Expected a vLLM server at {url}, got {type(error).__name__}: {error}. {START}") from error
    if not cards:
        raise EngineError(f"Expected a model at {url}/v1/models, got none. {START}")
    return cards[0]


def _probe(client: httpx.Client, model: str, token: int) -> None:
    """Check that the route is open and that log-probabilities are those of the distribution sampled from.

    Drawn with top_k = 1 every token is certain; a server that tells the model's raw distribution says otherwise.

    Raises:
        EngineError: naming the flag that is missing.
    """
    params = {"max_tokens": PROBE_TOKENS, "temperature": 1.0, "top_k": 1, "ignore_eos": True, "logprobs": 0}
    body = orjson.dumps({"model": model, "token_ids": [token], "sampling_params": params})
    try:
        response = client.post(GENERATE, content=body, headers={"content-type": "application/json"})
    except httpx.HTTPError as error:
        raise EngineError(f"Expected an answer to POST {GENERATE}, got {type(error).__name__}: {error}.") from error
    if response.status_code in (403, 404, 405):
        raise EngineError(
            f"Expected the server to answer POST {GENERATE}, got {response.status_code}: it was started without "
            f"--enable-scale-out, or is older than vLLM 0.32. {START}"
        )
    _raise_for_status(response)
    choice = _choice(response)
    logprobs = [] if choice.logprobs is None else [token.logprob for token in choice.logprobs.content]
    if not logprobs:
        raise EngineError(f"Expected log-probabilities with the sampled ids, got none. {START}")
    if max(map(abs, logprobs)) > CERTAIN:
        raise EngineError(
            f"Expected log-probabilities of the distribution that is sampled from, got {min(logprobs):.3f} nats for a "
            f"token drawn with top_k=1: the server was started without --logprobs-mode processed_logprobs. {START}"
        )


def _choice(response: httpx.Response) -> _Choice:
    try:
        choices = _Reply.model_validate_json(response.content).choices
    except ValidationError as error:
        raise EngineError(f"Expected choices of token ids from POST {GENERATE}, got: {error}") from error
    if len(choices) != 1:
        raise EngineError(f"Expected one choice from POST {GENERATE}, got {len(choices)}.")
    return choices[0]


def _raise_for_status(response: httpx.Response) -> None:
    if response.status_code >= 400:
        raise EngineError(
            f"Expected the vLLM server to answer, got {response.status_code}: {response.text[:300]}. Look at its log."
        )
