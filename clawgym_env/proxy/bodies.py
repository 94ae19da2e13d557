"""Request bodies, read at the cost of what is new in them.

Harnesses send the whole conversation with every call, so all but the end of a body has been read before. A session
keeps the latest body of each conversation, and a dialect reads through its `BodyReader`: where a body repeats a known
one up to the end of its conversation, only the rest is parsed, and items read before are the same objects again, with
the messages they were translated to. Invariant: what is returned equals what the body says when it is read alone.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import orjson

from clawgym_env.messages import Dialect, Json, Message
from clawgym_env.proxy import wire
from clawgym_env.trace.latest import Latest

LONGEST_KEPT = 1 << 20
"""Bytes of a body. Longer ones are read alone: 128k tokens are less, and an agent's own code may send what it likes."""
_MARK = secrets.randbits(53)
"""Put into a list to know it again. No client can have written it."""
_LOOK = 64
"""Bytes in which the end of a list must show behind its last item: there is only white space between."""


@dataclass(frozen=True, eq=False)
class _ReadBody:
    """A body that was read, and how far the next one can go on from it."""

    body: bytes
    dialect: Dialect
    name: str
    """Of the field that holds the conversation."""
    items: list[Json]
    """Of the conversation. Never changed."""
    messages: list[tuple[Message, ...]]
    """What each of the first items was translated to."""
    fields: dict[str, Json]
    """Those before the conversation; not known where `end` is 0."""
    end: int = 0
    """Where in `body` the first `num_known` items end; 0 when it was read alone and nobody has looked."""
    num_known: int = 0


class BodyReader:
    """Reads the bodies of one rollout. Thread-safe: of two at once one may be read alone next time."""

    def __init__(self) -> None:
        self._latest: Latest[_ReadBody] = Latest()
        self._compared: tuple[bytes, _ReadBody | None, int] | None = None
        """The body that was last asked about and is still to be read, and what it has most in common with."""

    def num_known(self, body: bytes) -> int:
        """Return how many bytes of a body need not be parsed again, as far as that can be seen at a glance."""
        before, shared = self._nearest(body)
        return 0 if before is None or not _may_go_on(before, body, shared) else shared

    def read_object(self, body: bytes, name: str, dialect: Dialect) -> dict[str, Json]:
        """Parse a body that must be a JSON object and whose conversation is the list `name`.

        Raises:
            ProxyError: it is not an object.
        """
        before, shared = self._nearest(body)
        self._compared = None
        known = before is not None and (before.name, before.dialect) == (name, dialect)
        read = _go_on(before, body, shared) if before is not None and known else None
        if read is None:
            try:
                fields = orjson.loads(body)
            except orjson.JSONDecodeError:
                return wire.read_object(body)  # leniently, or not at all; the next one may be read otherwise
            if not isinstance(fields, dict) or not isinstance(items := fields.get(name), list):
                return wire.read_object(body)
            read = _ReadBody(body, dialect, name, items, [], {}), fields
        if len(body) <= LONGEST_KEPT:
            same = before is not None and shared > len(before.body) // 2  # also told anew, or marked in other places
            self._latest.keep(read[0], before, gone_on=same or read[0].end > 0)
        return read[1]

    def translate(self, items: list[Json], read: Callable[[Json, str], Iterable[Message]], name: str) -> list[Message]:
        """Return the messages of a list that `read_object` has returned, items known before as they were translated.

        Args:
            read: translates one item; the text is its place, for errors. Must depend on nothing else.
        """
        known = self._latest.find(lambda known: known.items is items)
        messages = [] if known is None else known.messages
        for at in range(len(messages), len(items)):
            messages.append(tuple(read(items[at], f"{name}[{at}]")))
        return [message for group in messages for message in group]

    def _nearest(self, body: bytes) -> tuple[_ReadBody | None, int]:
        compared = self._compared
        if compared is None or compared[0] is not body:
            compared = body, *self._latest.nearest(lambda known: _in_common(known, body))
            if len(body) <= LONGEST_KEPT:
                self._compared = compared
        return compared[1:]


def _in_common(known: _ReadBody, body: bytes) -> int:
    """Return how many bytes two bodies begin with alike; 0 when the second has another conversation."""
    if len(body) <= known.end or not body.startswith(known.body[: known.end]):
        return 0
    ours = np.frombuffer(known.body, np.uint8, offset=known.end)
    theirs = np.frombuffer(body, np.uint8, offset=known.end)
    length = min(len(ours), len(theirs))
    different = ours[:length] != theirs[:length]
    return known.end + (int(different.argmax()) if different.any() else length)


def _may_go_on(known: _ReadBody, body: bytes, shared: int) -> bool:
    """Whether two bodies differ where a list ends in the first and goes on in the second."""
    ended, goes_on = (each[shared : shared + _LOOK].lstrip()[:1] for each in (known.body, body))
    return (ended, goes_on) == (b"]", b",")


def _go_on(known: _ReadBody, body: bytes, shared: int) -> tuple[_ReadBody, dict[str, Json]] | None:
    """Return a body read from where it differs from a known one; None unless all known items end right there.

    JSON is read from left to right: what is alike up to there means the same, and the known body tells what it means.
    """
    if not _may_go_on(known, body, shared):
        return None
    try:
        fields = _fields_before(known, shared)
        rest = orjson.loads(b'{"%s":[%d%s' % (known.name.encode(), _MARK, body[shared:]))
    except (orjson.JSONDecodeError, RecursionError):  # the second by comparing what nests deeply
        return None
    new = rest.pop(known.name)
    if fields is None or not isinstance(new, list) or new[:1] != [_MARK]:
        return None
    items = known.items + new[1:]
    read = _ReadBody(body, known.dialect, known.name, items, known.messages.copy(), fields, shared, len(known.items))
    return read, {**fields, known.name: items, **rest}


def _fields_before(known: _ReadBody, end: int) -> dict[str, Json] | None:
    """Return the fields before the conversation of a known body; None when its items do not end at `end`."""
    if known.end:
        later = orjson.loads(b"[0%s]" % known.body[known.end : end])
        return known.fields if len(later) - 1 == len(known.items) - known.num_known else None
    head = orjson.loads(b"%s,%d]}" % (known.body[:end], _MARK))
    last, items = head.popitem()
    return head if last == known.name and items == [*known.items, _MARK] else None
