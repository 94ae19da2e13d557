"""An OpenAI-compatible server on loopback, in a thread, that answers as it is told and can misbehave in every way."""

from __future__ import annotations

import json
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias

Body = dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One HTTP answer."""

    body: Body | str
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


HANG_UP, HALF, STALL = "hang up", "half", "stall"
"""Instead of an answer: close the connection, close it in the middle of a body, never answer."""
Answer: TypeAlias = Reply | str
Answers: TypeAlias = Callable[[Body], Answer] | list[Answer]


def said(text: str | None = "hello", *, usage: tuple[int, int] | None = (100, 7), **fields: Any) -> Reply:
    """Return a chat completion; `finish_reason` and whatever is the message's own can be given."""
    finish = fields.pop("finish_reason", "tool_calls" if "tool_calls" in fields else "stop")
    body: Body = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **fields}}],
    }
    if usage is not None:
        body["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)}
    return Reply(body)


def called(name: str, call_id: str = "call_0", /, *, extra: Body | None = None, **arguments: Any) -> Body:
    """Return an item of `tool_calls`."""
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function, **(extra or {})}


def refusal(message: str, *, status: int = 400, headers: dict[str, str] | None = None, **fields: Any) -> Reply:
    """Return an error in OpenAI's form."""
    return Reply({"error": {"message": message, "type": "invalid_request_error", **fields}}, status, headers or {})


@dataclass
class FakeApi:
    answers: Answers
    """A function of the request, or a list whose last item repeats."""
    card: Body | None = None
    """The model's entry of `/models`; without one there is no such route."""
    key: str = ""
    """The only one that `/models` takes, where not empty."""
    url: str = ""
    asked: list[Body] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    hung_up: threading.Event = field(default_factory=threading.Event)

    def answer(self, body: Body) -> Answer:
        self.asked.append(body)
        if callable(self.answers):
            return self.answers(body)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


@contextmanager
def serving(fake: FakeApi) -> Iterator[FakeApi]:
    """Serve on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if fake.key and self.headers.get("authorization") != f"Bearer {fake.key}":
                self._send(refusal(f"Incorrect API key: {self.headers.get('authorization')}", status=401))
            elif fake.card is None:
                self._send(Reply("no such page", 404))
            else:
                self._send(Reply({"object": "list", "data": [fake.card]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.headers.append({name.lower(): value for name, value in self.headers.items()})
            answer = fake.answer(body)
            if isinstance(answer, Reply):
                self._send(answer)
                return
            self.close_connection = True
            if answer == STALL:
                fake.begun.set()
                select.select([self.connection], [], [], 60)
                fake.hung_up.set()
            elif answer == HALF:
                self.send_response(200)
                self.send_header("content-length", "1000")
                self.end_headers()
                self.wfile.write(b'{"choices": [')

        def _send(self, reply: Reply) -> None:
            data = reply.body.encode() if isinstance(reply.body, str) else json.dumps(reply.body).encode()
            self.send_response(reply.status)
            for name, value in {**reply.headers, "content-length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Stay quiet."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
