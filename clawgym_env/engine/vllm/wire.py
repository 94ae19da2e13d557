"""The bodies of vLLM's token-in-token-out route: what is asked of it, and what its answers must hold.

Pure functions between `VllmEngine` and HTTP. Invariant: a `Generation` made here ends at its first stop id and has the
log-probability, and the version of the weights, of every sampled id.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Collection, Sequence
from typing import Literal

import numpy as np
import orjson
from pydantic import BaseModel, ValidationError

from clawgym_env.engine.base import Generation, RoutedExperts, SamplingParams, TokenIds, VersionSpan
from clawgym_env.errors import EngineError

GENERATE = "/inference/v1/generate"


class Card(BaseModel):
    """An entry of `/v1/models`."""

    id: str
    root: str | None = None
    """The folder or hub name it was loaded from."""
    parent: str | None = None
    """Set for LoRA adapters."""
    max_model_len: int | None = None


class Cards(BaseModel):
    data: list[Card]


class Token(BaseModel):
    token_id: int
    logprob: float


class Tokens(BaseModel):
    content: list[Token] | None = None


class WeightSpan(BaseModel):
    """Sampled tokens `start` to `end` came from the weights that the server calls `version`."""

    version: str
    start: int
    end: int


class Choice(BaseModel):
    """One sampled turn."""

    token_ids: list[int]
    logprobs: Tokens | None = None
    finish_reason: str | None = None
    weight_versions: list[WeightSpan] | None = None
    routed_experts: str | None = None
    """Base64 of a NumPy file, from a mixture of experts whose server has `--enable-return-routed-experts`."""

    @property
    def tokens(self) -> list[Token]:
        return [] if self.logprobs is None else self.logprobs.content or []


class Reply(BaseModel):
    choices: list[Choice]


def request_body(
    model: str,
    prompt_token_ids: Sequence[int] | TokenIds,
    sampling: SamplingParams,
    *,
    max_tokens: int,
    stop_token_ids: Collection[int] = (),
    cache_salt: str | None = None,
) -> bytes:
    """Return the body of `POST /inference/v1/generate`.

    Args:
        max_tokens: what the window leaves of `sampling.max_tokens`.
        cache_salt: requests share cached prefixes with those of the same salt only.
    """
    ids = prompt_token_ids.tolist() if isinstance(prompt_token_ids, np.ndarray) else list(prompt_token_ids)
    params = {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": sorted(stop_token_ids),
        "ignore_eos": True,  # the renderer's stop ids end a turn, and nothing else
        "logprobs": 0,  # of the sampled token alone
        "routed_experts_prompt_start": max(len(ids) - 1, 0),  # of the positions that predicted sampled tokens
    }
    body = {"model": model, "token_ids": ids, "sampling_params": params}
    return orjson.dumps(body if cache_salt is None else {**body, "cache_salt": cache_salt})


def read_choice(body: bytes) -> Choice:
    """Return the one choice of an answer.

    Raises:
        EngineError: it is no such answer.
    """
    try:
        choices = Reply.model_validate_json(body).choices
    except ValidationError as error:
        raise EngineError(f"Expected choices of token ids from POST {GENERATE}, got: {error}") from error
    if len(choices) != 1:
        raise EngineError(f"Expected one choice from POST {GENERATE}, got {len(choices)}.")
    return choices[0]


def generation_of(
    choice: Choice, *, stop_token_ids: Collection[int], version_of: Callable[[str], int] | None
) -> Generation:
    """Check a choice against the contract of engines.

    Args:
        version_of: from the server's name of weights to the version of the policy; may raise. None where the weights
            are the server's own and must not change.

    Raises:
        EngineError: naming what does not hold.
    """
    ids, count = choice.token_ids, len(choice.token_ids)
    logprobs = np.array([token.logprob for token in choice.tokens], dtype=np.float32)
    if [token.token_id for token in choice.tokens] != ids:
        raise EngineError(f"Expected the log-probability of each of {count} sampled ids, got {len(logprobs)} others.")
    if not np.isfinite(logprobs).all():
        raise EngineError("Expected finite log-probabilities, got some that are not. Look at the model's weights.")
    finishes: dict[str | None, Literal["stop", "length", "abort"]] = {"stop": "stop", "length": "length"}
    finish = finishes.get(choice.finish_reason, "abort")
    first_stop = next((i for i, token in enumerate(ids) if token in stop_token_ids), count)
    if first_stop < count - 1 or (finish == "stop") != (first_stop == count - 1):
        raise EngineError(
            f"Expected a turn that ends at its first stop id, got finish_reason={choice.finish_reason!r} with the "
            f"first stop id at {first_stop} of {count}."
        )
    spans = choice.weight_versions or ()
    return Generation(
        np.array(ids, dtype=np.int32),
        logprobs,
        finish,
        _unchanging(spans, count) if version_of is None else _version_spans(spans, count, version_of),
        routed_experts=_routed_experts(choice),
    )


def _routed_experts(choice: Choice) -> RoutedExperts | None:
    if choice.routed_experts is None:
        return None
    try:
        experts = np.load(io.BytesIO(base64.b64decode(choice.routed_experts, validate=True)), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EngineError(f"Expected routed_experts to be a NumPy array in base64, got: {error}") from error
    if experts.ndim != 3 or len(experts) != len(choice.token_ids) or experts.dtype.kind not in "iu":
        raise EngineError(
            f"Expected the experts of {len(choice.token_ids)} tokens in every layer, got {experts.dtype} of shape "
            f"{experts.shape}."
        )
    chosen: RoutedExperts = experts.astype(np.int16, copy=False)
    chosen.setflags(write=False)
    return chosen


def _unchanging(spans: Sequence[WeightSpan], count: int) -> tuple[VersionSpan, ...]:
    if len(names := {span.version for span in spans}) > 1:
        raise EngineError(f"Expected weights that stay the same, got versions {sorted(names)} in one reply.")
    return (VersionSpan(0, 0, count),)


def _version_spans(
    spans: Sequence[WeightSpan], count: int, version_of: Callable[[str], int]
) -> tuple[VersionSpan, ...]:
    found: list[VersionSpan] = []
    for span in spans:
        if span.start != (found[-1].end if found else 0) or span.end < span.start:
            raise EngineError(f"Expected weight_versions that follow each other, got {spans}.")
        if span.end == span.start:
            continue  # of no token: weights that it was only paused under
        version = version_of(span.version)
        if found and found[-1].version == version:
            found[-1] = VersionSpan(version, found[-1].start, span.end)
        else:
            found.append(VersionSpan(version, span.start, span.end))
    if (found[-1].end if found else 0) != count:
        raise EngineError(f"Expected the weight_versions of {count} tokens, got {spans}. Update vLLM.")
    return tuple(found)
