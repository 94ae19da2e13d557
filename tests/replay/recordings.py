"""Recorded traffic: what a real harness posted to a stand-in server, and what that server answered.

A recording is a JSON-lines file: a `meta` object, then one object per HTTP request, in the order in which they were
answered. Repeated bodies, fields and messages are stored as references to earlier requests; `load` resolves them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clawgym_env.messages import Dialect

DIALECTS: Mapping[str, Dialect] = {
    "chat": "chat",
    "anthropic": "messages",
    "messages": "messages",
    "responses": "responses",
    "gemini": "gemini",
}
HISTORIES = ("messages", "input", "contents")
UNMASKED = {"gomasosadug": "interactive", "LAZADUNISE": "CHECKPOINT"}
"""Where prose is masked, each word always by the same pseudo-word: those in the phrases that kinds are told by, Claude
Code 2.0's main agent and Codex's compaction."""


@dataclass(frozen=True)
class Call:
    """A tool call as a server sent it."""

    id: str
    name: str
    arguments: str
    namespace: str = ""
    """Of the Responses API: the group the client declared the tool in."""


@dataclass(frozen=True)
class Reply:
    """One turn of the model, whatever the dialect."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    cut: bool = False
    """It ended at the token limit."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """What a harness sends back besides, without a meaning to it, by place: item ids, signatures, sealed thoughts."""


@dataclass(frozen=True)
class Exchange:
    """One request, and what became of it in the recording."""

    number: int
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: dict[str, Any] | None
    dialect: Dialect | None
    """None for a probe."""
    stream: bool
    fault: str | None
    status: int | str | None
    reply: Reply | None
    """None where the server did not answer with a turn."""


@dataclass(frozen=True)
class Recording:
    harness: str
    """The name and version of the folder it is in."""
    scenario: str
    exchanges: tuple[Exchange, ...]

    @property
    def name(self) -> str:
        return f"{self.harness}/{self.scenario}"


def recordings(folder: Path) -> list[Path]:
    """Return the files of a folder of recordings, `<harness>-<version>/<scenario>.jsonl`."""
    return sorted(folder.glob("*/*.jsonl"))


def load(file: Path) -> Recording:
    """Read one recording."""
    text = file.read_text(encoding="utf-8")
    for masked, word in UNMASKED.items():
        text = text.replace(masked, word)
    lines = [json.loads(line) for line in text.splitlines() if line.strip()]
    bodies: dict[int, dict[str, Any]] = {}
    exchanges = []
    for line in lines:
        if "meta" in line:
            continue
        body = bodies[line["body_same_as"]] if "body_same_as" in line else line.get("body")
        if isinstance(body, dict):
            body = bodies[line["n"]] = _resolved(body, bodies)
        else:
            body = None
        exchanges.append(_exchange(line, body))
    return Recording(file.parent.name, file.stem, tuple(exchanges))


def _resolved(body: Mapping[str, Any], bodies: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Put the things in place that a body refers to."""
    whole = {}
    for name, value in body.items():
        if isinstance(value, dict) and "$same_as_request" in value:
            value = bodies[value["$same_as_request"]][name]
        if name in HISTORIES and isinstance(value, list):
            value = [_message(item, bodies) for item in value]
        whole[name] = value
    return whole


def _message(item: Any, bodies: Mapping[int, Mapping[str, Any]]) -> Any:
    if not (isinstance(item, dict) and "$same_as_message" in item):
        return item
    number, index = item["$same_as_message"]
    history = next(bodies[number][name] for name in HISTORIES if bodies[number].get(name))
    return history[index]


def _exchange(line: Mapping[str, Any], body: dict[str, Any] | None) -> Exchange:
    dialect = DIALECTS.get(str(line.get("dialect")))
    response = line.get("response") or {}
    answer = response.get("body")
    answered = response.get("status") == 200 and isinstance(answer, dict) and body is not None and dialect is not None
    return Exchange(
        number=line["n"],
        method=line["method"],
        path=line["path"],
        headers=tuple((name, value) for name, value in line.get("headers", ())),
        body=body,
        dialect=dialect if body is not None else None,
        stream=bool(line.get("stream")),
        fault=line.get("fault"),
        status=response.get("status"),
        reply=READERS[dialect](answer) if answered and dialect is not None else None,
    )


def read_chat(body: Mapping[str, Any]) -> Reply:
    """Read a `chat.completion`."""
    choice = body["choices"][0]
    message = choice["message"]
    calls = tuple(
        Call(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    )
    reasoning = message.get("reasoning_content") or ""
    return Reply(message.get("content") or "", reasoning, calls, choice["finish_reason"] == "length")


def read_messages(body: Mapping[str, Any]) -> Reply:
    """Read an Anthropic `message`."""
    texts, thoughts, calls, marks = [], [], [], {}
    for i, block in enumerate(body["content"]):
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "thinking":
            thoughts.append(block["thinking"])
            marks[f"signature {i}"] = block["signature"]
        elif block["type"] == "tool_use":
            arguments = block["input"]
            # How the stand-in noted down a call whose JSON it had broken on purpose.
            raw = arguments.get("_malformed_raw")
            calls.append(Call(block["id"], block["name"], json.dumps(arguments) if raw is None else raw))
    cut = body["stop_reason"] == "max_tokens"
    return Reply("".join(texts), "".join(thoughts), tuple(calls), cut, marks)


def read_responses(body: Mapping[str, Any]) -> Reply:
    """Read a `response`."""
    texts, thoughts, calls, marks = [], [], [], {}
    for i, item in enumerate(body["output"]):
        marks[f"{item['type']} {i}"] = item["id"]
        if item["type"] == "message":
            texts += [part["text"] for part in item["content"]]
        elif item["type"] == "reasoning":
            thoughts += [part["text"] for part in [*item.get("summary", ()), *(item.get("content") or ())]]
            if item.get("encrypted_content"):
                marks[f"sealed {i}"] = item["encrypted_content"]
        elif item["type"] == "function_call":
            calls.append(Call(item["call_id"], item["name"], item["arguments"], item.get("namespace") or ""))
    cut = body["status"] == "incomplete"
    return Reply("".join(texts), "".join(thoughts), tuple(calls), cut, marks)


def read_gemini(body: Mapping[str, Any]) -> Reply:
    """Read a `GenerateContentResponse`."""
    candidate = body["candidates"][0]
    texts, thoughts, calls, marks = [], [], [], {}
    for i, part in enumerate(candidate.get("content", {}).get("parts", ())):
        if "functionCall" in part:
            call = part["functionCall"]
            calls.append(Call(call.get("id", ""), call["name"], json.dumps(call.get("args", {}))))
        elif part.get("thought"):
            thoughts.append(part["text"])
        else:
            texts.append(part.get("text", ""))
        if part.get("thoughtSignature"):
            marks[f"signature {i}"] = part["thoughtSignature"]
    cut = candidate.get("finishReason") == "MAX_TOKENS"
    return Reply("".join(texts), "".join(thoughts), tuple(calls), cut, marks)


READERS = {"chat": read_chat, "messages": read_messages, "responses": read_responses, "gemini": read_gemini}
