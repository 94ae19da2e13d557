"""A server that answers like vLLM 0.32 with its scale-out and development routes, on loopback, in a thread."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Body = dict[str, Any]


def reply(
    ids: Sequence[int],
    logprobs: Sequence[float] | None = None,
    finish: str = "stop",
    spans: Sequence[tuple[str, int, int]] | None = None,
) -> Body:
    """Return the body of an answer to `POST /inference/v1/generate`."""
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    ranked = [{"token_id": i, "logprob": value, "rank": 1} for i, value in zip(ids, values, strict=True)]
    content = [{**token, "top_logprobs": [dict(token)]} for token in ranked]
    named = [("default", 0, len(ids))] if spans is None else spans
    choice = {
        "index": 0,
        "logprobs": {"content": content},
        "finish_reason": finish,
        "stop_reason": ids[-1] if finish == "stop" and ids else None,
        "token_ids": list(ids),
        "weight_versions": [{"version": version, "start": start, "end": end} for version, start, end in named],
        "routed_experts": None,
    }
    return {"request_id": "generate-tokens-1", "model": "policy", "output_mode": "tokens", "choices": [choice]}


@dataclass
class FakeVllm:
    """What the server does, and what it was asked."""

    root: str
    answer: Callable[[Body], Body | int]
    """Body of the answer, or a status."""
    scale_out: bool = True
    processed: bool = True
    """Whether `--logprobs-mode` was given; the default is the raw distribution."""
    dev_mode: bool = False
    window: int | None = 640
    extended: bool = True
    """Whether it was started by `clawgym serve`, with `clawgym_worker.py` inside."""
    model: str = "policy"
    asked: list[Body] = field(default_factory=list)
    """Bodies of generate requests after the probe."""
    controls: list[str] = field(default_factory=list)
    """Paths of control requests, in order."""
    bodies: list[Body] = field(default_factory=list)
    """Their bodies."""
    refuses: set[str] = field(default_factory=set)
    """Control routes that fail."""
    reload: Callable[[Path], None] = lambda folder: None
    """Loads weights; an error is a status 500."""
    clear: Callable[[], None] = lambda: None
    """Forgets cached prefixes."""
    weights: str = "default"
    stalls: bool = False
    """Whether generation waits until the client hangs up."""
    begun: threading.Event = field(default_factory=threading.Event)
    hung_up: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    """Clear while paused."""
    url: str = ""

    def __post_init__(self) -> None:
        self.running.set()

    def generate(self, body: Body, connection: socket.socket) -> Body | int | None:
        if not self.scale_out:
            return 403
        if body["sampling_params"]["top_k"] == 1:
            return reply([1] * body["sampling_params"]["max_tokens"], [0.0 if self.processed else -1.25] * 8, "length")
        self.asked.append(body)
        if self.stalls:
            self.begun.set()
            select.select([connection], [], [], 30)
            self.hung_up.set()
            return None
        self.running.wait(30)
        return self.answer(body)

    def control(self, path: str, body: Body) -> Body | int:
        self.controls.append(path)
        self.bodies.append(body)
        route, query = urlsplit(path).path, parse_qs(urlsplit(path).query)
        if not self.dev_mode:
            return 404
        if route in self.refuses:
            return 500
        if route == "/pause":
            self.running.clear()
            if query["clear_cache"] == ["true"]:
                self.clear()
        if route in ("/resume", "/wake_up"):
            self.running.set()
        if route == "/collective_rpc":
            method, arguments = body["method"], body.get("kwargs", {})
            if method == "clawgym_ready":
                self.controls.pop()
                return {} if self.extended else 500
            assert method == ("clawgym_load_weights" if self.extended else "reload_weights")
            try:
                self.reload(Path(arguments["folder" if self.extended else "weights_path"]))
            except Exception:
                return 500
        if route == "/update_weight_version":
            self.weights = body["new_version"]
        return {"weight_version": self.weights, "world_size": 2}


@contextmanager
def serving(fake: FakeVllm, port: int = 0) -> Iterator[FakeVllm]:
    """Serve on a free port of loopback, or on this one."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def do_GET(self) -> None:
            card = {"id": fake.model, "object": "model", "root": fake.root, "parent": None}
            card["max_model_len"] = fake.window
            adapter = {**card, "id": "lora", "parent": "policy"}
            if self.path == "/v1/models":
                self._send({"object": "list", "data": [adapter, card]})
            elif self.path == "/health":
                self._send({})
            else:
                self._send(fake.control(self.path, {}))

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/inference/v1/generate":
                self._send(fake.generate(json.loads(data), self.connection))
            else:
                self._send(fake.control(self.path, json.loads(data) if data else {}))

        def _send(self, answer: Body | int | None) -> None:
            if answer is None:
                self.close_connection = True
                return
            data = b'{"detail": "no"}' if isinstance(answer, int) else json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # joined at the end, so that no socket outlives its test
        request_queue_size = 128
        allow_reuse_address = True

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        fake.running.set()
        server.shutdown()
        thread.join()
        server.server_close()
