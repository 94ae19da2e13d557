"""A harness at the wire: bodies in its dialect's own shape go through the real parser into a builder.

Between a test that writes bodies by hand and `conversations.Agent`, whose policy answers them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from conversations import RENDERER, Agent, sampled

from clawgym_env.harness import HarnessAdapter
from clawgym_env.messages import ToolCall
from clawgym_env.proxy import chat
from clawgym_env.proxy.session import STARVED_BUDGET
from clawgym_env.trace.builder import TreeBuilder
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.prefix_tree import PrefixTree

Body = dict[str, Any]
Calls = Sequence[tuple[str, Mapping[str, Any]]]


@dataclass
class Sent:
    """A call, and what the harness was told."""

    call: ModelCall
    text: str
    tool_calls: tuple[ToolCall, ...]

    @property
    def index(self) -> int:
        return self.call.index

    @property
    def id(self) -> str:
        return self.tool_calls[0].id


@dataclass
class Wire:
    """One rollout of a harness that speaks one dialect."""

    dialect: ModuleType = chat
    adapter: HarnessAdapter | None = None
    agent: Agent = field(init=False)

    def __post_init__(self) -> None:
        adapter = self.adapter
        hooks = {"classify": adapter.classify, "transient_suffix": adapter.transient_suffix} if adapter else {}
        self.agent = Agent(TreeBuilder(RENDERER, **hooks))

    def send(
        self,
        body: Body,
        text: str = "",
        calls: Calls = (),
        *,
        raw_call: str | None = None,
        headers: Mapping[str, str] | None = None,
        reasoning: str | None = None,
        delivered: bool = True,
        cut: bool = False,
    ) -> Sent:
        """Post a body; the policy answers with text and calls, or with the raw text of a broken call."""
        request = self.dialect.parse_request(json.dumps(body).encode(), "models/policy:generateContent")
        if self.adapter is not None:
            request = self.adapter.rewrite(request)
        self.agent.clock += 1.0
        prepared = self.agent.builder.prepare(request, headers or {}, arrived_s=self.agent.clock)
        reply = sampled(text, calls, closed=not cut)
        if raw_call is not None:
            reply = [*sampled(text, closed=False), 259, *RENDERER.tokenizer.encode(raw_call), 260, 258]
        starved = request.max_tokens is not None and request.max_tokens < STARVED_BUDGET
        index = self.agent.answer(prepared, reply, reasoning=reasoning, delivered=delivered, starved=starved)
        told = self.agent.replies[index]
        return Sent(self.agent.builder.call(index), told.content, told.tool_calls)

    def tree(self) -> PrefixTree:
        tree = self.agent.builder.freeze()
        tree.validate()
        return tree


def goes_on(tree: PrefixTree, *indices: int) -> bool:
    """Whether each prompt begins with the whole history of the call before it, and none drifted."""
    pairs = itertools.pairwise(indices)
    return all(
        tree[child].lineage_parent == parent
        and tree[child].drift_reason is None
        and tree.prompt(child)[: tree[parent].history_len].tolist() == tree.history(parent).tolist()
        for parent, child in pairs
    )


def holds_reply(tree: PrefixTree, child: int, parent: int) -> bool:
    """Whether a prompt contains the sampled ids of an earlier reply."""
    return tree[parent].token_ids.tobytes() in tree.prompt(child).tobytes()


def decoded(tree: PrefixTree, index: int) -> str:
    return RENDERER.tokenizer.decode(tree.prompt(index))


def states(tree: PrefixTree) -> list[str]:
    return [call.state for call in tree]


def kinds(tree: PrefixTree) -> list[str]:
    return [call.kind for call in tree]


def drifts(tree: PrefixTree) -> list[str | None]:
    return [call.drift_reason for call in tree]


def kept(tree: PrefixTree) -> list[tuple[int, ...]]:
    return [path.calls for path in tree.trajectories()]


# ---- chat


def body(*messages: Body, tools: Sequence[str] = ("write", "bash"), **fields: Any) -> Body:
    """Return a chat body."""
    offered = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in tools]
    return {"model": "policy", "messages": list(messages), **({"tools": offered} if tools else {}), **fields}


def said(role: str, content: Any = "", **fields: Any) -> Body:
    return {"role": role, "content": content, **fields}


def called(call_id: str, name: str, arguments: str) -> Body:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(call_id: str, content: Any) -> Body:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def echo(sent: Sent, **fields: Any) -> Body:
    """Return a reply as a harness keeps it that parses and writes arguments again."""
    calls = [called(call.id, call.name, json.dumps(json.loads(call.arguments))) for call in sent.tool_calls]
    return {"role": "assistant", "content": sent.text, **({"tool_calls": calls} if calls else {}), **fields}


# ---- messages


def claude(*messages: Body, system: Any = "You are Claude's agent.", tools: Sequence[str] = ("Write", "Bash")) -> Body:
    """Return a body of the Messages API."""
    offered = [{"name": name, "input_schema": {"type": "object"}} for name in tools]
    return {"model": "policy", "max_tokens": 32000, "system": system, "messages": list(messages), "tools": offered}


def block(text: str, *, cached: bool = False) -> Body:
    return {"type": "text", "text": text, **({"cache_control": {"type": "ephemeral"}} if cached else {})}


def used(sent: Sent, **inputs: Any) -> Body:
    """Return a reply with its call as Claude Code keeps it; `inputs` replace what was sampled."""
    call = sent.tool_calls[0]
    value = inputs or json.loads(call.arguments)
    texts = [block(sent.text)] if sent.text else []
    return said("assistant", [*texts, {"type": "tool_use", "id": call.id, "name": call.name, "input": value}])


def tool_result(call_id: str, content: Any, *, cached: bool = False, **fields: Any) -> Body:
    mark = {"cache_control": {"type": "ephemeral"}} if cached else {}
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields, **mark}


# ---- gemini


def gemini_body(*contents: Body, system: str = "You are Gemini's agent.") -> Body:
    offered = [{"functionDeclarations": [{"name": "run", "parametersJsonSchema": {"type": "object"}}]}]
    return {"contents": list(contents), "systemInstruction": {"parts": [{"text": system}]}, "tools": offered}


def content(role: str, *parts: Body) -> Body:
    return {"role": role, "parts": list(parts)}
