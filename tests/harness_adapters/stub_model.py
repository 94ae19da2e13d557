"""A model server on loopback with scripted replies, for adapters that are tested without the real proxy.

Each reply is a `Turn`, or an int (that HTTP status), or "cut" (a stream that breaks off after its first event).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Union


@dataclass(frozen=True)
class Turn:
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and argument text of each tool call."""
    reasoning: str = ""


Step = Union[Turn, int, Literal["cut"]]


@dataclass
class Stub:
    """What a test sees of the server."""

    url: str
    steps: list[Step]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def chat_events(turn: Turn, index: int) -> Iterator[str]:
    def chunk(delta: dict[str, Any], finish: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        body = {"id": f"c{index}", "object": "chat.completion.chunk", "model": "policy", "choices": [choice]}
        return f"data: {json.dumps(body)}\n\n"

    yield ": keep-alive\n\n"
    yield chunk({"role": "assistant", "content": ""})
    if turn.reasoning:
        yield chunk({"reasoning_content": turn.reasoning})
    if turn.text:
        yield chunk({"content": turn.text})
    for i, (name, arguments) in enumerate(turn.calls):
        head = {"index": i, "id": f"call{index}x{i}", "type": "function", "function": {"name": name, "arguments": ""}}
        yield chunk({"tool_calls": [head]})
        for piece in (arguments[:5], arguments[5:]):
            yield chunk({"tool_calls": [{"index": i, "function": {"arguments": piece}}]})
    yield chunk({}, "tool_calls" if turn.calls else "stop")
    usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    yield f"data: {json.dumps({'id': f'c{index}', 'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def messages_events(turn: Turn, index: int) -> Iterator[str]:
    def event(kind: str, **body: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **body})}\n\n"

    message = {"id": f"m{index}", "type": "message", "role": "assistant", "model": "policy", "content": []}
    usage = {"input_tokens": 10, "output_tokens": 0}
    yield event("message_start", message={**message, "stop_reason": None, "stop_sequence": None, "usage": usage})
    yield event("ping")
    blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    if turn.reasoning:
        deltas = [{"type": "thinking_delta", "thinking": turn.reasoning}, {"type": "signature_delta", "signature": "s"}]
        blocks.append(({"type": "thinking", "thinking": "", "signature": ""}, deltas))
    if turn.text:
        blocks.append(({"type": "text", "text": ""}, [{"type": "text_delta", "text": turn.text}]))
    for i, (name, arguments) in enumerate(turn.calls):
        pieces = [{"type": "input_json_delta", "partial_json": p} for p in (arguments[:5], arguments[5:])]
        blocks.append(({"type": "tool_use", "id": f"call{index}x{i}", "name": name, "input": {}}, pieces))
    for i, (block, deltas) in enumerate(blocks):
        yield event("content_block_start", index=i, content_block=block)
        for delta in deltas:
            yield event("content_block_delta", index=i, delta=delta)
        yield event("content_block_stop", index=i)
    reason = "tool_use" if turn.calls else "end_turn"
    yield event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage={"output_tokens": 5})
    yield event("message_stop")


class _Handler(BaseHTTPRequestHandler):
    stub: Stub

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.end_headers()

    do_GET = do_HEAD

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        stub = self.stub
        index = len(stub.requests)
        stub.requests.append(body)
        stub.headers.append({k.lower(): v for k, v in self.headers.items()})
        stub.paths.append(self.path)
        step = stub.steps[index] if index < len(stub.steps) else Turn("Nothing more to say.")
        if isinstance(step, int):
            self.send_response(step)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "scripted", "type": "stub"}}')
            return
        events = chat_events if self.path.endswith("/chat/completions") else messages_events
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events(Turn("cut off") if step == "cut" else step, index):
            self.wfile.write(event.encode())
            if step == "cut":
                return

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def serve(steps: Sequence[Step]) -> Iterator[Stub]:
    """Serve scripted replies on loopback."""
    stub = Stub("", list(steps))
    handler = type("Handler", (_Handler,), {"stub": stub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        stub.url = f"http://127.0.0.1:{server.server_address[1]}/r/key"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield stub
        finally:
            server.shutdown()
            thread.join()
