"""An engine that answers from a script: every layer above is tested with it, no torch.

The "policy" is a function of the prompt's text, or a list of replies, one per turn. Invariant: the same prompt gives
the same ids and the same (made-up) log-probabilities, whatever else runs at the same time.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, Union

import numpy as np

from clawgym_env.engine.base import Generation, Logprobs, SamplingParams, TokenIds, VersionSpan
from clawgym_env.errors import EngineError, EngineNameError
from clawgym_env.messages import Json

if TYPE_CHECKING:
    from renderers.base import Renderer

    from clawgym_env.tokenizer import TextTokenizer

_TAGS = re.compile(r"(</?(?:tool_call|think)>)")
"""What a reply may hold that is one id in vocabularies which have it."""


@dataclass(frozen=True, slots=True)
class ScriptedReply:
    """One reply with more to it than its text."""

    text: str
    finish_reason: Literal["stop", "length", "abort"] = "stop"
    """Anything but "stop" leaves out the id that closes the turn."""
    latency_s: float = 0.0
    error: str | None = None
    """Raised as `EngineError` instead of answering."""


ReplyLike: TypeAlias = Union[str, ScriptedReply]
Script: TypeAlias = Union[Callable[[str, int], ReplyLike], Sequence[ReplyLike]]


class ScriptedEngine:
    """Satisfies `engine.base.Engine`."""

    def __init__(
        self,
        reply: Script,
        *,
        tokenizer: TextTokenizer | None = None,
        renderer: Renderer | None = None,
        context_length: int = 1 << 20,
        latency_s: float = 0.0,
    ) -> None:
        """Make an engine.

        Args:
            reply: `reply(prompt_text, turn)` with `turn` counting the assistant turns the prompt already holds, or a
                list indexed by `turn` whose last item repeats. Both keep no state, so that many rollouts can share
                one engine.
            tokenizer: defaults to the byte tokenizer.
            renderer: defaults to ChatML over `tokenizer`.
            latency_s: how long every call takes, besides the reply's own latency.
        """
        from clawgym_env.rendering import ChatMLRenderer
        from clawgym_env.tokenizer import byte_tokenizer

        if not callable(reply) and not reply:
            raise EngineError("Expected a script of at least one reply, got none.")
        self.tokenizer: TextTokenizer = byte_tokenizer() if tokenizer is None else tokenizer
        self._renderer: Renderer = ChatMLRenderer(self.tokenizer) if renderer is None else renderer
        self._reply = reply
        self._context_length = context_length
        self._latency_s = latency_s
        self._policy_version = 0
        self._weights = threading.Lock()
        self._running = asyncio.Event()
        self._running.set()
        self._turn_header = self._find_turn_header()

    @property
    def renderer(self) -> Renderer:
        return self._renderer

    @property
    def context_length(self) -> int:
        return self._context_length

    @property
    def policy_version(self) -> int:
        return self._policy_version

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        """Answer from the script; a reply longer than `sampling.max_tokens` is cut and ends as "length"."""
        if len(prompt_token_ids) >= self._context_length:
            raise EngineError(
                f"Expected a prompt of fewer than {self._context_length} tokens, got {len(prompt_token_ids)}."
            )
        reply = self._script(self.tokenizer.decode([int(token) for token in prompt_token_ids]))
        if self._latency_s + reply.latency_s > 0.0:
            await asyncio.sleep(self._latency_s + reply.latency_s)
        await self._running.wait()
        if reply.error is not None:
            raise EngineError(reply.error)
        ids = self._encode(reply.text)
        finish = reply.finish_reason
        if finish == "stop":
            ids.append(self._renderer.get_stop_token_ids()[0])
        budget = min(sampling.max_tokens, self._context_length - len(prompt_token_ids))
        if len(ids) > budget:
            ids, finish = ids[:budget], "length"
        token_ids = np.asarray(ids, dtype=np.int32)
        with self._weights:
            span = VersionSpan(self._policy_version, 0, len(ids))
        return Generation(token_ids, _logprobs(token_ids), finish, (span,))

    def update_weights(self, apply: Callable[[], None]) -> int:
        with self._weights:
            apply()
            self._policy_version += 1
            return self._policy_version

    async def pause(self) -> None:
        self._running.clear()

    async def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        """Nothing is held."""

    def _script(self, prompt: str) -> ScriptedReply:
        turn = max(prompt.count(self._turn_header) - 1, 0) if self._turn_header else 0
        reply = self._reply(prompt, turn) if callable(self._reply) else self._reply[min(turn, len(self._reply) - 1)]
        return ScriptedReply(reply) if isinstance(reply, str) else reply

    def _encode(self, text: str) -> list[int]:
        """Encode a reply as a policy would have sampled it: tags as their ids, everything else as plain text."""
        ids: list[int] = []
        for piece in _TAGS.split(text):
            tag = self.tokenizer.convert_tokens_to_ids(piece) if _TAGS.fullmatch(piece) else None
            if tag is not None:
                ids.append(tag)
            elif piece:
                ids.extend(self.tokenizer.encode(piece))
        return ids

    def _find_turn_header(self) -> str:
        """Return the text that opens every assistant turn."""
        closed = self._renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=False)
        opened = self._renderer.render_ids([{"role": "user", "content": "x"}], add_generation_prompt=True)
        return self.tokenizer.decode(opened[len(closed) :])


def tool_call(name: str, /, **arguments: Json) -> str:
    """Return the text of a tool call as `ChatMLRenderer` writes it."""
    call = {"name": name, "arguments": arguments}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"


def scripted_from_file(path: str | Path, *, context_length: int = 1 << 20, latency_s: float = 0.0) -> ScriptedEngine:
    """Read a script: a JSON array whose items are reply texts or `{"text": …, "tool": …, "arguments": {…}}`.

    Raises:
        EngineNameError: the file is no such array; the message names the item.
    """
    file = Path(path)
    try:
        items = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineNameError(f"Expected a JSON array of replies in {str(file)!r}, got: {error}.") from error
    if not isinstance(items, list) or not items:
        raise EngineNameError(f"Expected a JSON array of at least one reply in {str(file)!r}.")
    replies = [_reply_text(item, f"{file}[{i}]") for i, item in enumerate(items)]
    return ScriptedEngine(replies, context_length=context_length, latency_s=latency_s)


def _reply_text(item: Json, where: str) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict) or not item or set(item) - {"text", "tool", "arguments"}:
        raise EngineNameError(f"Expected a string or an object of text, tool, arguments at {where}, got {item!r}.")
    text, name, arguments = item.get("text", ""), item.get("tool"), item.get("arguments", {})
    if not isinstance(text, str) or not isinstance(name, str | None) or not isinstance(arguments, dict):
        raise EngineNameError(f"Expected text and tool to be strings and arguments an object at {where}, got {item!r}.")
    call = "" if name is None else tool_call(name, **arguments)
    return f"{text}\n{call}" if text and call else text + call


def _logprobs(token_ids: TokenIds) -> Logprobs:
    """Make up log-probabilities in [-2, 0): a function of id and position."""
    mixed = (token_ids.astype(np.int64) * 7919 + np.arange(len(token_ids)) * 104729) % 997
    return np.asarray(-2.0 * (mixed + 1) / 998, dtype=np.float32)
