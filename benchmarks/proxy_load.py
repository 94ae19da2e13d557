"""Both ends of the proxy benchmark: harnesses that talk, and a model server that answers at once.

`proxy.py` starts each in a process of its own. A conversation only grows at its end; a quarter of its final length is a
system prompt that all of them share, as the rollouts of a training batch do. Invariant: neither end does work per
token that could be taken for the proxy's, so the row without a proxy is the ceiling of the others.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing.connection
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pydoc_data import topics

import orjson

REPLY_TOKENS = 32
CHARS_PER_TOKEN = 4
PROBE_S = 0.02
"""Between two small requests beside the load, whose latency shows how long the proxy's loop was busy elsewhere."""


@dataclass(frozen=True)
class Work:
    """What one row of the table does, whoever answers."""

    sessions: int
    turns: int
    history: int
    """Tokens of a conversation at its last turn."""
    stream: bool

    @property
    def total_turns(self) -> int:
        return self.sessions * self.turns

    def system(self) -> str:
        """The prompt that every conversation begins with."""
        return prose(0, self.history // 4 * CHARS_PER_TOKEN)

    def message(self, session: int, turn: int) -> str:
        """What the harness says before one call."""
        tokens = max(1, self.history * 3 // 4 // self.turns - REPLY_TOKENS)
        return prose(session * 10_007 + turn * 1_009, tokens * CHARS_PER_TOKEN)


@dataclass(frozen=True)
class Target:
    """Where a load goes."""

    port: int
    paths: Sequence[str]
    """One per session."""
    probe: str


@dataclass(frozen=True)
class Seen:
    """What the load saw."""

    wall_s: float
    latencies_s: list[float]
    probes_s: list[float]
    errors: int
    new_text_bytes: int
    """Messages and replies, each once."""
    body_bytes: int
    """Request bodies: every message as often as it was sent."""


@functools.cache
def _pool() -> str:
    """Real prose with code in it: the manual that every Python ships."""
    return "\n".join(topics.topics.values())


def prose(offset: int, length: int) -> str:
    """Return `length` characters of text, other ones for another offset."""
    pool = _pool()
    start = offset % len(pool)
    repeats = (start + length) // len(pool) + 1
    return (pool * repeats)[start : start + length]


# ---- the harnesses


async def _converse(target: Target, number: int, work: Work) -> tuple[list[float], int, int, int]:
    """Play one harness: ask, append the reply and a new message, ask again."""
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port, limit=1 << 24)
    path = target.paths[number].encode()
    messages = [_message("system", work.system())]
    latencies: list[float] = []
    errors = sent = 0
    for turn in range(work.turns):
        messages.append(_message("user", work.message(number, turn)))
        tail = b'],"stream":true}' if work.stream else b"]}"
        body = b'{"model":"policy","messages":[' + b",".join(messages) + tail
        sent += len(body)
        head = b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        begin = time.perf_counter()
        writer.write(head % (path, len(body)) + body)
        status, answer = await _read_response(reader)
        latencies.append(time.perf_counter() - begin)
        text = _reply_text(answer, work.stream) if status == 200 else ""
        errors += not text
        messages.append(_message("assistant", text))
    writer.close()
    return latencies, errors, sum(map(len, messages)), sent


def _message(role: str, text: str) -> bytes:
    return orjson.dumps({"role": role, "content": text})


async def _read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    status = int(head.split(b" ", 2)[1])
    if b"content-length: " in head:
        return status, await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    parts: list[bytes] = []
    while size := int(await reader.readline(), 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    await reader.readline()
    return status, b"".join(parts)


def _reply_text(answer: bytes, stream: bool) -> str:
    if not stream:
        text: str = orjson.loads(answer)["choices"][0]["message"]["content"]
        return text
    chunks = (json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {"))
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


async def _probe(target: Target, latencies: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    while True:
        begin = time.perf_counter()
        writer.write(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % target.probe.encode())
        await _read_response(reader)
        latencies.append(time.perf_counter() - begin)
        await asyncio.sleep(PROBE_S)


async def _drive(target: Target, work: Work) -> Seen:
    probes: list[float] = []
    probing = asyncio.create_task(_probe(target, probes))
    begin = time.perf_counter()
    all_seen = await asyncio.gather(*(_converse(target, i, work) for i in range(work.sessions)))
    wall = time.perf_counter() - begin
    probing.cancel()
    return Seen(
        wall_s=wall,
        latencies_s=[one for latencies, *_ in all_seen for one in latencies],
        probes_s=probes,
        errors=sum(errors for _, errors, _, _ in all_seen),
        new_text_bytes=sum(new for _, _, new, _ in all_seen),
        body_bytes=sum(sent for *_, sent in all_seen),
    )


def load(target: Target, work: Work, pipe: multiprocessing.connection.Connection) -> None:
    """Drive all sessions. The entry of the load process."""
    _pool()
    pipe.send(asyncio.run(_drive(target, work)))


# ---- the model server


def _answers() -> tuple[bytes, bytes, bytes]:
    """Return what stands before and behind the prompt ids of an answer, and the answer without ids."""
    text = prose(0, REPLY_TOKENS * CHARS_PER_TOKEN)
    usage = {"prompt_tokens": 1, "completion_tokens": REPLY_TOKENS, "total_tokens": REPLY_TOKENS + 1}
    entries = [{"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []} for _ in range(REPLY_TOKENS)]
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    plain = {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "policy", "usage": usage}
    full = {**choice, "logprobs": {"content": entries}, "token_ids": list(range(1000, 1000 + REPLY_TOKENS))}
    behind = orjson.dumps({**plain, "choices": [full]})[1:]
    return b'{"prompt_token_ids":[', b"]," + behind, orjson.dumps({**plain, "choices": [choice]})


def _stream_answers() -> tuple[bytes, bytes, bytes]:
    """The same as server-sent events: one chunk of eight tokens at a time, the prompt ids in the first."""
    text = prose(0, REPLY_TOKENS * CHARS_PER_TOKEN)
    head = {"id": "chatcmpl-0", "object": "chat.completion.chunk", "created": 0, "model": "policy"}
    entry = {"token": "x", "logprob": -1.0, "bytes": [120], "top_logprobs": []}
    rich, plain = [], []
    step = 8
    for start in range(0, REPLY_TOKENS, step):
        delta = {"role": "assistant", "content": text[start * CHARS_PER_TOKEN : (start + step) * CHARS_PER_TOKEN]}
        choice = {"index": 0, "delta": delta, "finish_reason": "stop" if start + step == REPLY_TOKENS else None}
        extra = {"logprobs": {"content": [entry] * step}, "token_ids": list(range(1000 + start, 1000 + start + step))}
        rich.append(orjson.dumps({**head, "choices": [{**choice, **extra}]}))
        plain.append(orjson.dumps({**head, "choices": [choice]}))
    done = b"data: [DONE]\n\n"
    first, *others = rich
    rest = b"".join(b"data: %s\n\n" % chunk for chunk in others) + done
    return (
        b'data: {"prompt_token_ids":[',
        b"]," + first[1:] + b"\n\n" + rest,
        b"".join(b"data: %s\n\n" % chunk for chunk in plain) + done,
    )


_ID = b"10234,"
"""Prompt ids are made up; all have the same width, so that a list of any length is a slice."""


class _ModelServer(asyncio.Protocol):
    """Answers every POST at once; ids and log-probabilities where the body asks for them."""

    ids = memoryview(_ID * (1 << 18))
    whole = _answers()
    streamed = _stream_answers()

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._needed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= self._needed:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._buffer[:end]).lower()
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0]) if b"content-length: " in head else 0
            self._needed = end + 4 + length
            if len(self._buffer) < self._needed:
                return
            flags = bytes(self._buffer[end + 4 : end + 104] + self._buffer[self._needed - 200 : self._needed])
            del self._buffer[: self._needed]
            self._needed = 0
            self._transport.writelines(self._answer(head, length, flags))

    def _answer(self, head: bytes, length: int, flags: bytes) -> Iterator[bytes | memoryview]:
        if not head.startswith(b"post"):
            yield _http(b"application/json", 2) + b"{}"
            return
        flags = flags.replace(b" ", b"")
        stream = b'"stream":true' in flags
        before, behind, plain = self.streamed if stream else self.whole
        kind = b"text/event-stream" if stream else b"application/json"
        if b'"return_token_ids":true' not in flags:
            yield _http(kind, len(plain)) + plain
            return
        ids = self.ids[: length // CHARS_PER_TOKEN * len(_ID) - 1]
        yield _http(kind, len(before) + len(ids) + len(behind)) + before
        yield ids
        yield behind


def _http(kind: bytes, length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (kind, length)


def upstream(pipe: multiprocessing.connection.Connection) -> None:
    """Serve until killed. The entry of the model server's process; sends its port."""

    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(_ModelServer, "127.0.0.1", 0)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())
