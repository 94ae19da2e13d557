"""What the serving proxy costs per turn, beside rllm-model-gateway at the same work in the same run.

`python benchmarks/proxy.py` drives closed-loop, append-only conversations from a process of its own (`proxy_load`)
into, row by row: a model server without a proxy (the ceiling); our proxy with its token work, prefix tree and rollout
store and an engine that takes no time; the gateway with its own store in front of that model server, which hands it the
token ids. Afterwards our store is opened again and must hold every call with every id. CPU is the proxy process's own
(user and system, all threads), which a busy machine disturbs less than it does turns per second.
"""

from __future__ import annotations

import asyncio
import functools
import json
import multiprocessing
import multiprocessing.connection
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import tyro
from proxy_load import REPLY_TOKENS, Seen, Target, Work, load, prose, upstream
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawgym_env._loop import new_event_loop
from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import Generation, SamplingParams, TokenIds, VersionSpan
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.messages import Message
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.rendering import message_dicts
from clawgym_env.tasks.task import Limits
from clawgym_env.tokenizer import CHATML_SPECIALS, TextTokenizer
from clawgym_env.trace.prefix_tree import PrefixTree
from clawgym_env.trace.store import RolloutStore

PEER = "rllm-model-gateway==0.1.0"
CPU_TARGETS_MS = {32_000: 2.5, 128_000: 6.0}
CPU_RATIO_TARGETS = {32_000: 6.0, 128_000: 8.0}
LAG_TARGET_MS = 50.0
STORED_TARGET = 3.0
SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Args:
    sessions: int = 32
    """Concurrent conversations."""
    turns: int = 50
    """Model calls of each."""
    history: tuple[int, ...] = (8_000, 32_000, 128_000)
    """Tokens of a conversation at its last turn."""
    stream: bool = False
    """Whether the clients ask for event streams."""
    peer: bool = True
    """Run the gateway too."""
    peer_python: Path | None = None
    """Interpreter of a virtual environment with the gateway; made in the cache folder where not given."""
    json_path: Path | None = None


@dataclass(frozen=True)
class Row:
    """One line of the table. Latencies in ms; "added" is what the row without a proxy does not have."""

    name: str
    history: int
    turns: int
    turns_per_s: float
    p50: float
    p99: float
    added_p50: float
    added_p99: float
    probe_p99: float
    loop_lag_p99: float | None
    """Of a timer inside the proxy; only ours can be asked."""
    cpu_ms: float
    """Per turn, of the proxy process."""
    rss_kib: float
    """Growth per turn."""
    new_text: float
    """Bytes per turn: messages and replies, each once."""
    stored: float | None
    """Bytes per turn on disk."""
    errors: int
    calls: int | None
    """Found in the store afterwards."""

    @property
    def stored_ratio(self) -> float | None:
        return None if self.stored is None else self.stored / self.new_text


# ---- our proxy, in a process of its own


def make_tokenizer() -> TextTokenizer:
    """Train a byte-level BPE on the text of the benchmark."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([prose(0, 400_000)], trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHATML_SPECIALS])
    return TextTokenizer(tokenizer, eos_token="<|im_end|>")


class InstantEngine(ScriptedEngine):
    """Answers every prompt with another fixed turn of `REPLY_TOKENS` ids, without looking at it."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(["unused"], tokenizer=tokenizer)
        assert tokenizer.eos_token_id is not None
        texts = (prose(i * 4_001, REPLY_TOKENS * 40) for i in range(64))
        ids = ([*tokenizer.encode(text)[: REPLY_TOKENS - 1], tokenizer.eos_token_id] for text in texts)
        self._replies = [np.asarray(each, dtype=np.int32) for each in ids]

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        ids = self._replies[len(prompt_token_ids) % len(self._replies)]
        return Generation(ids, np.full(len(ids), -1.0, np.float32), "stop", (VersionSpan(0, 0, len(ids)),))


def ours(work: Work, folder: Path, pipe: multiprocessing.connection.Connection) -> None:
    """Serve until told to stop. The entry of the proxy process; sends its target, at last lags and stored calls."""

    async def main() -> None:
        server = ProxyServer()
        await server.start()
        listener = await server.listen_tcp()
        engine = InstantEngine(make_tokenizer())
        limits = Limits(max_calls=10**6, max_total_tokens=10**9)
        with RolloutStore(folder) as store:
            sessions = [
                server.open_session(engine, limits=limits, on_call=functools.partial(store.add_call, f"rollout-{i}"))
                for i in range(work.sessions)
            ]
            paths = [f"/r/{session.key}/v1/chat/completions" for session in sessions]
            pipe.send(Target(listener.port, paths, f"/r/{sessions[0].key}/v1/models"))
            lags: list[float] = []
            stopped = asyncio.Event()
            asyncio.get_running_loop().add_reader(pipe.fileno(), stopped.set)
            while not stopped.is_set():
                begin = time.perf_counter()
                await asyncio.sleep(0.01)
                lags.append(time.perf_counter() - begin - 0.01)
            asyncio.get_running_loop().remove_reader(pipe.fileno())
            trees = [await session.settle(quiet_s=0.0) for session in sessions]
            await server.close()
        pipe.send((lags, _same_calls(trees, folder)))

    with asyncio.Runner(loop_factory=new_event_loop) as runner:  # as the environments and `clawgym proxy` do
        runner.run(main())


def _same_calls(trees: Sequence[PrefixTree], folder: Path) -> int:
    """Open the store again and return its number of calls; each must be the one that was answered, id for id."""
    total = 0
    with RolloutStore(folder, read_only=True) as store:
        for number, tree in enumerate(trees):
            stored = store.calls(f"rollout-{number}")
            assert [call.id for call in stored] == [call.id for call in tree.calls]
            for ours, theirs in zip(tree.calls, stored, strict=True):
                assert np.array_equal(ours.delta_token_ids, theirs.delta_token_ids)
                assert np.array_equal(ours.token_ids, theirs.token_ids)
                assert len(theirs.token_ids) == REPLY_TOKENS
                assert np.array_equal(ours.logprobs, theirs.logprobs)
            total += len(stored)
    return total


def check_prompts(work: Work, folder: Path) -> None:
    """Render one whole conversation afresh: the stored calls must have grown to a prompt that reads the same.

    Its ids may differ where replies were sampled: those are never encoded again.
    """
    tokenizer = make_tokenizer()
    renderer = InstantEngine(tokenizer).renderer
    with RolloutStore(folder, read_only=True) as store:
        tree = PrefixTree(store.calls("rollout-0"))
    messages = [Message("system", work.system())]
    for turn, call in enumerate(tree.calls):
        messages.append(Message("user", work.message(0, turn)))
        if turn == len(tree) - 1:
            ids = renderer.render_ids(message_dicts(messages), add_generation_prompt=True)
            assert tokenizer.decode(tree.prompt(call.index)) == tokenizer.decode(ids), "This is another conversation."
        messages.append(Message("assistant", tokenizer.decode(call.token_ids[:-1])))


# ---- the peer


def peer_python(given: Path | None) -> Path:
    """Return an interpreter that can run the gateway, in a virtual environment of its own."""
    if given is not None:
        return given
    folder = cache_dir() / "benchmarks" / PEER.replace("==", "-")
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"Installing {PEER} into {folder}", file=sys.stderr)
        venv.create(folder, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", PEER], check=True)
    return python


@contextmanager
def gateway(python: Path, upstream_port: int, database: Path) -> Iterator[tuple[int, int]]:
    """Run the gateway in front of the model server; yields its process id and port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    command = [python, "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--worker", f"http://127.0.0.1:{upstream_port}/v1", "--db-path", str(database)]
    process = subprocess.Popen([str(part) for part in command])
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait(timeout=600)  # it writes what it still has


# ---- measuring


@dataclass(frozen=True)
class Usage:
    """Of one process with its children that have ended."""

    cpu_s: float
    rss_kib: float

    @classmethod
    def of(cls, pid: int) -> Usage:
        stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks = sum(int(value) for value in stat[11:15])
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 1024)


def drive(target: Target, work: Work) -> Seen:
    """Run the load in a process of its own."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=load, args=(target, work, there), daemon=True)
    process.start()
    there.close()
    seen: Seen = here.recv()
    process.join()
    return seen


def measured(name: str, target: Target, work: Work, pid: int, ceiling: Row | None = None) -> Row:
    """Run the load against a process and watch what it uses."""
    before = Usage.of(pid)
    seen = drive(target, work)
    after = Usage.of(pid)
    p50, p99 = (float(np.percentile(seen.latencies_s, q)) * 1e3 for q in (50, 99))
    return Row(
        name=name,
        history=work.history,
        turns=work.total_turns,
        turns_per_s=work.total_turns / seen.wall_s,
        p50=p50,
        p99=p99,
        added_p50=p50 - (ceiling.p50 if ceiling else p50),
        added_p99=p99 - (ceiling.p99 if ceiling else p99),
        probe_p99=float(np.percentile(seen.probes_s, 99)) * 1e3,
        loop_lag_p99=None,
        cpu_ms=(after.cpu_s - before.cpu_s) / work.total_turns * 1e3,
        rss_kib=(after.rss_kib - before.rss_kib) / work.total_turns,
        new_text=seen.new_text_bytes / work.total_turns,
        stored=None,
        errors=seen.errors,
        calls=None,
    )


@contextmanager
def model_server() -> Iterator[tuple[int, int]]:
    """Run the model server; yields its process id and port."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=upstream, args=(there,), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        yield process.pid, here.recv()
    finally:
        process.terminate()
        process.join()


def direct_row(work: Work, pid: int, port: int) -> Row:
    """Measure the load and the model server alone."""
    target = Target(port, ["/v1/chat/completions"] * work.sessions, "/health")
    return measured("direct", target, work, pid)


def our_row(work: Work, folder: Path, ceiling: Row) -> Row:
    """Measure our proxy, then check what it has stored."""
    here, there = SPAWN.Pipe()
    process = SPAWN.Process(target=ours, args=(work, folder, there), daemon=True)
    process.start()
    there.close()
    assert process.pid is not None
    row = measured("clawgym", here.recv(), work, process.pid, ceiling)
    here.send("stop")
    lags, calls = here.recv()
    process.join()
    check_prompts(work, folder)
    lag = float(np.percentile(lags, 99)) * 1e3
    return replace(row, loop_lag_p99=lag, stored=_size(folder) / row.turns, calls=calls)


def peer_row(work: Work, folder: Path, ceiling: Row, *, python: Path, upstream_port: int) -> Row:
    """Measure the gateway, then count what it has stored."""
    database = folder / "traces.sqlite"
    with gateway(python, upstream_port, database) as (pid, port):
        paths = [f"/sessions/s{i}/v1/chat/completions" for i in range(work.sessions)]
        row = measured("rllm-gateway", Target(port, paths, "/health"), work, pid, ceiling)
    with sqlite3.connect(database) as connection:
        calls = connection.execute("SELECT count(*) FROM traces").fetchone()[0]
    connection.close()
    return replace(row, stored=_size(folder) / row.turns, calls=calls)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def report(rows: Sequence[Row]) -> None:
    """Print the table, then what was reached of each target."""
    names = [field.name for field in fields(Row)] + ["stored_ratio"]
    print(" ".join(f"{name:>12}" for name in names))
    for row in rows:
        print(" ".join(f"{_cell(getattr(row, name)):>12}" for name in names))
    for row in rows:
        if row.name == "clawgym":
            _report_targets(row, next((r for r in rows if r.history == row.history and r.name == "rllm-gateway"), None))


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _report_targets(row: Row, peer: Row | None) -> None:
    assert row.loop_lag_p99 is not None
    assert row.stored_ratio is not None
    assert row.calls is not None
    checks: list[tuple[str, float, str, float | None]] = [
        ("CPU ms per turn", row.cpu_ms, "<=", CPU_TARGETS_MS.get(row.history)),
        ("loop lag p99, ms", row.loop_lag_p99, "<=", LAG_TARGET_MS),
        ("stored / new text", row.stored_ratio, "<=", STORED_TARGET),
        ("calls in the store", row.calls, ">=", row.turns),
    ]
    if peer is not None:
        checks.append(("peer's CPU / ours", peer.cpu_ms / row.cpu_ms, ">=", CPU_RATIO_TARGETS.get(row.history)))
    for what, value, relation, bound in checks:
        if bound is None:
            print(f"{row.history:>7} {what:<20} {value:>10.2f}")
            continue
        met = value <= bound if relation == "<=" else value >= bound
        print(f"{row.history:>7} {what:<20} {value:>10.2f} {relation} {bound:<8g} {'reached' if met else 'MISSED'}")


def main() -> None:
    args = tyro.cli(Args)
    python = peer_python(args.peer_python) if args.peer else None
    rows: list[Row] = []
    for history in args.history:
        work = Work(args.sessions, args.turns, history, args.stream)
        with model_server() as (pid, port), tempfile.TemporaryDirectory(prefix="clawgym-proxy-") as folder:
            rows.append(direct_row(work, pid, port))
            rows.append(our_row(work, Path(folder) / "ours", rows[-1]))
            if python is not None:
                peer_folder = Path(folder) / "peer"
                peer_folder.mkdir()
                rows.append(peer_row(work, peer_folder, rows[-2], python=python, upstream_port=port))
    report(rows)
    text = json.dumps([asdict(row) for row in rows])
    print(text)
    if args.json_path is not None:
        args.json_path.write_text(text + "\n")


if __name__ == "__main__":
    main()
