"""A harness and a policy made by hand, for the tests of the builder.

`Talk` keeps a message history as a harness does and answers with sampled ids that a re-encoding would not give:
calls are spelled with odd spacing, so any re-rendered reply shows up as other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from clawgym_env.engine.base import Generation, SamplingParams, VersionSpan
from clawgym_env.messages import ChatRequest, Completion, Json, Message, ToolCall, ToolSpec
from clawgym_env.rendering import ChatMLRenderer, parse_reply
from clawgym_env.tokenizer import byte_tokenizer
from clawgym_env.trace.builder import PreparedCall, TreeBuilder
from clawgym_env.trace.calls import ModelCall

RENDERER = ChatMLRenderer(byte_tokenizer())
TOOLS = (
    ToolSpec("write", "Write a file.", {"type": "object"}),
    ToolSpec("read", "Read a file.", {"type": "object"}),
)
SYSTEM = Message("system", "You are an agent.")
USER = Message("user", "Write hello.")


def sampled(text: str, calls: Sequence[tuple[str, Mapping[str, Json]]] = (), *, closed: bool = True) -> list[int]:
    """Spell a reply as no renderer would: two spaces after each colon."""
    tokenizer = RENDERER.tokenizer
    ids = tokenizer.encode(text)
    for name, arguments in calls:
        body = f'{{"name":  "{name}", "arguments":  {json.dumps(arguments, separators=(",", ":  "))}}}'
        ids += [259, *tokenizer.encode(body), 260]
    return [*ids, 258] if closed else ids


@dataclass
class Agent:
    """One rollout: a builder, and a policy that says what it is told."""

    builder: TreeBuilder = field(default_factory=lambda: TreeBuilder(RENDERER))
    replies: dict[int, Message] = field(default_factory=dict)
    """What the harness was sent, by call."""
    clock: float = 0.0

    def prepare(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] = TOOLS,
        headers: Mapping[str, str] | None = None,
    ) -> PreparedCall:
        self.clock += 1.0
        request = ChatRequest("chat", "policy", tuple(messages), tuple(tools))
        return self.builder.prepare(request, headers or {}, arrived_s=self.clock)

    def answer(
        self,
        prepared: PreparedCall,
        reply: Sequence[int],
        *,
        reasoning: str | None = None,
        delivered: bool = True,
        starved: bool = False,
    ) -> int:
        count = len(self.builder)
        parsed = parse_reply(RENDERER, reply, prepared.request.tools)
        calls = tuple(
            ToolCall(f"call{count}x{i}", name, arguments) for i, (name, arguments) in enumerate(parsed.tool_calls)
        )
        closed = bool(reply) and reply[-1] in RENDERER.get_stop_token_ids()
        completion = Completion(
            id=f"completion{count}",
            model="policy",
            content=parsed.content,
            reasoning=reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop" if closed else "length",
            prompt_tokens=len(prepared.prompt_token_ids),
            completion_tokens=len(reply),
        )
        generation = Generation(
            token_ids=np.array(reply, dtype=np.int32),
            logprobs=np.linspace(-1, -0.5, len(reply), dtype=np.float32),
            finish_reason="stop" if closed else "length",
            policy_versions=(VersionSpan(0, 0, len(reply)),),
        )
        index = self.builder.commit(
            prepared, generation, completion, SamplingParams(), generated_s=self.clock, starved=starved
        )
        self.replies[index] = completion.as_message()
        if delivered:
            self.builder.mark_delivered(index, self.clock)
        return index

    def ask(
        self,
        messages: Sequence[Message],
        text: str = "",
        calls: Sequence[tuple[str, Mapping[str, Json]]] = (),
        *,
        tools: Sequence[ToolSpec] = TOOLS,
        reasoning: str | None = None,
        delivered: bool = True,
        closed: bool = True,
        starved: bool = False,
    ) -> ModelCall:
        """Send a request and let the policy answer it."""
        prepared = self.prepare(messages, tools=tools)
        reply = sampled(text, calls, closed=closed)
        return self.builder.call(
            self.answer(prepared, reply, reasoning=reasoning, delivered=delivered, starved=starved)
        )

    def echo(self, call: ModelCall) -> Message:
        """Return a reply as the harness would put it into its history."""
        return self.replies[call.index]

    def results(self, call: ModelCall, *texts: str) -> list[Message]:
        """Return the echo of a reply and one tool result for each of its calls."""
        echo = self.echo(call)
        return [
            echo,
            *(Message("tool", text, tool_call_id=tc.id) for text, tc in zip(texts, echo.tool_calls, strict=True)),
        ]
