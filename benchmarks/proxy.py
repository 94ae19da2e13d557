"""Turns per second, latency, loop lag and bytes kept per turn of the serving proxy, with an engine that takes no time.

`python benchmarks/proxy.py --sessions 32 --turns 50 --history 32000` drives closed-loop, append-only sessions from a
process of its own over loopback. The row "floor" is the bound in the same run: the same listener and requests, but a
handler that only parses the JSON body and answers a constant. Tokens are about four characters each.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import tyro
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds, VersionSpan
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.proxy import chat, connection, listener
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.proxy.session import RolloutSession
from clawgym_env.tasks.task import Limits
from clawgym_env.tokenizer import CHATML_SPECIALS, TextTokenizer

REPLY_TOKENS = 32


@dataclass(frozen=True)
class Args:
    sessions: int = 32
    """Concurrent conversations."""
    turns: int = 50
    """Model calls of each."""
    history: tuple[int, ...] = (8_000, 32_000)
    """Tokens of a conversation at its last turn, a quarter of them the system prompt."""
    stream: bool = False
    json_path: Path | None = None


@dataclass(frozen=True)
class Row:
    name: str
    history: int
    turns_per_s: float
    p50_ms: float
    p99_ms: float
    loop_lag_p99_ms: float
    cpu_ms_per_turn: float
    rss_kb_per_turn: float
    kept_bytes_per_turn: float
    """Arrays of the tree; prompts and replies of all calls together."""
    new_tokens_per_turn: float


def words(seed: int, tokens: int) -> str:
    """Return prose of about `tokens` tokens: pseudo-words of which each is about one token."""
    rng = random.Random(seed)
    lexicon = [f"{a}{b}{c}" for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("t", "n", "s", "rk")]
    return " ".join(rng.choice(lexicon) for _ in range(tokens))


def make_tokenizer() -> TextTokenizer:
    """Train a small byte-level BPE on the benchmark's own prose."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([words(i, 2000) for i in range(10)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHATML_SPECIALS])
    return TextTokenizer(tokenizer, eos_token="<|im_end|>")


class InstantEngine(ScriptedEngine):
    """Answers with a fixed turn, without looking at the prompt."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(["unused"], tokenizer=tokenizer)
        ids = [*tokenizer.encode(words(1, REPLY_TOKENS * 2))[: REPLY_TOKENS - 1], tokenizer.eos_token_id]
        self._ids = np.asarray(ids, dtype=np.int32)

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        logprobs = np.full(len(self._ids), -1.0, dtype=np.float32)
        return Generation(self._ids.copy(), logprobs, "stop", (VersionSpan(0, 0, len(self._ids)),))


async def converse(url: tuple[int, str], number: int, turns: int, history: int, stream: bool) -> list[float]:
    """Play one harness: ask, append the reply and a new message, ask again. Returns seconds per turn."""
    port, path = url
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    per_turn = max(1, (history * 3 // 4) // turns - REPLY_TOKENS)
    messages: list[bytes] = [orjson.dumps({"role": "system", "content": words(0, history // 4)})]
    seconds: list[float] = []
    for turn in range(turns):
        messages.append(orjson.dumps({"role": "user", "content": words(number * 1000 + turn, per_turn)}))
        tail = b',"stream":true}' if stream else b"}"
        body = b'{"model":"policy","messages":[' + b",".join(messages) + b"]" + tail
        begin = time.perf_counter()
        writer.write(b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"Expected 200, got {head!r}.")
        if stream:
            data = await reader.readuntil(b"0\r\n\r\n")
            text = "".join(_stream_text(data))
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            text = orjson.loads(await reader.readexactly(length))["choices"][0]["message"]["content"]
        seconds.append(time.perf_counter() - begin)
        messages.append(orjson.dumps({"role": "assistant", "content": text}))
    writer.close()
    return seconds


def _stream_text(data: bytes) -> list[str]:
    chunks = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    return [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]


def load(urls: list[tuple[int, str]], args: Args, history: int, results: Any) -> None:
    """Drive all sessions from a process of its own."""

    async def main() -> tuple[float, list[float]]:
        begin = time.perf_counter()
        jobs = (converse(url, i, args.turns, history, args.stream) for i, url in enumerate(urls))
        seconds = await asyncio.gather(*jobs)
        return time.perf_counter() - begin, [one for each in seconds for one in each]

    results.send(asyncio.run(main()))


async def measure(name: str, urls: list[tuple[int, str]], args: Args, history: int, kept: Callable[[], Any]) -> Row:
    """Run the load against this process and watch the event loop meanwhile."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=load, args=(urls, args, history, theirs))
    before = resource.getrusage(resource.RUSAGE_SELF)
    process.start()
    lags: list[float] = []
    while not ours.poll() and process.is_alive():
        begin = time.perf_counter()
        await asyncio.sleep(0.01)
        lags.append(time.perf_counter() - begin - 0.01)
    wall, seconds = ours.recv()
    process.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    turns = len(seconds)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    bytes_kept, tokens = kept()
    return Row(
        name=name,
        history=history,
        turns_per_s=turns / wall,
        p50_ms=float(np.percentile(seconds, 50)) * 1e3,
        p99_ms=float(np.percentile(seconds, 99)) * 1e3,
        loop_lag_p99_ms=float(np.percentile(lags, 99)) * 1e3,
        cpu_ms_per_turn=cpu / turns * 1e3,
        rss_kb_per_turn=(after.ru_maxrss - before.ru_maxrss) / turns,
        kept_bytes_per_turn=bytes_kept / turns,
        new_tokens_per_turn=tokens / turns,
    )


async def proxy_row(args: Args, history: int, tokenizer: TextTokenizer) -> Row:
    """Measure the proxy itself."""
    server = ProxyServer()
    await server.start()
    tcp = await server.listen_tcp()
    engine = InstantEngine(tokenizer)
    limits = Limits(max_calls=10**6, max_total_tokens=10**9)
    sessions = [server.open_session(engine, limits=limits) for _ in range(args.sessions)]
    urls = [(tcp.port, f"/r/{session.key}/v1/chat/completions") for session in sessions]
    trees: list[RolloutSession] = sessions
    row = await measure("proxy", urls, args, history, lambda: (0, 0))
    frozen = [await session.settle(quiet_s=0.0) for session in trees]
    calls = [call for tree in frozen for call in tree.calls]
    kept = sum(call.delta_token_ids.nbytes + call.token_ids.nbytes + call.logprobs.nbytes for call in calls)
    tokens = sum(len(call.delta_token_ids) + len(call.token_ids) for call in calls)
    await server.close()
    turns = args.sessions * args.turns
    return Row(**{**vars_of(row), "kept_bytes_per_turn": kept / turns, "new_tokens_per_turn": tokens / turns})


async def floor_row(args: Args, history: int) -> Row:
    """Measure the bound: HTTP and JSON, no tokens."""
    text = words(1, REPLY_TOKENS)
    whole = orjson.dumps({"choices": [{"message": {"content": text}}]})
    sse = b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\ndata: [DONE]\n\n' % text.encode()

    async def handler(scope: Any, receive: Any, send: Any) -> None:
        exchange = connection.Connection(scope, receive, send)
        chat.parse_request(await exchange.read_body(1 << 30))
        if args.stream:
            await exchange.start_stream()
            await exchange.finish(sse)
        else:
            await exchange.reply(200, whole)
        await exchange.close()

    import socket

    async def on_close() -> None:
        return None

    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    config = listener.make_config(handler)
    tcp = await listener.Listener.open(config, sock, session=None, on_close=on_close)
    row = await measure("floor", [(tcp.port, "/")] * args.sessions, args, history, lambda: (0, 0))
    await tcp.close()
    return row


def vars_of(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__dataclass_fields__}


def main() -> None:
    args = tyro.cli(Args)
    tokenizer = make_tokenizer()
    rows: list[Row] = []
    for history in args.history:
        rows.append(asyncio.run(floor_row(args, history)))
        rows.append(asyncio.run(proxy_row(args, history, tokenizer)))
    names = list(Row.__dataclass_fields__)
    print("  ".join(f"{name:>20}" for name in names))
    for row in rows:
        cells = (getattr(row, name) for name in names)
        print("  ".join(f"{cell:>20.1f}" if isinstance(cell, float) else f"{cell:>20}" for cell in cells))
    text = json.dumps([vars_of(row) for row in rows])
    print(text)
    if args.json_path is not None:
        args.json_path.write_text(text + "\n")


if __name__ == "__main__":
    main()
