"""The rollout store: everything a run has sampled and graded, in one SQLite file of the run directory.

The proxy commits every call before its reply leaves, the pool commits every finished rollout, a trainer commits the
ordered ids of a batch before its update. One writer thread gathers what is waiting into one transaction (group
commit). Invariants: what `add_*` has returned from survives `kill -9` (WAL, synchronous=NORMAL; not a power loss), a
loaded rollout equals the stored one bit for bit, and bytes grow with new tokens only.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from clawgym_env.errors import ClawGymError
from clawgym_env.messages import Json
from clawgym_env.rollout import Rollout
from clawgym_env.trace import _rows
from clawgym_env.trace.calls import ModelCall

FILE_NAME = "rollouts.sqlite"
_MAX_GROUP = 512

_Write = Callable[[sqlite3.Connection], None]


class _Receipt(Protocol):
    """What tells a caller how its write ended; the part of `concurrent.futures.Future` that a writer uses."""

    def set_running_or_notify_cancel(self) -> bool:
        """Return whether the caller still waits."""

    def set_result(self, result: None) -> None:
        """Say that it is committed."""

    def set_exception(self, exception: Exception) -> None:
        """Say why it is not."""


class StoreError(ClawGymError):
    """The store cannot be opened, or does not hold what was asked for."""


class RolloutStore:
    """Open the store of a run directory, making both where missing.

    Args:
        path: the run directory, on a local disk (SQLite's WAL does not work over a network).
        read_only: look on while another process writes, or look at a finished run.

    Raises:
        StoreError: another process writes to it, it does not exist (read-only), or its schema is another version's.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._file = self.path / FILE_NAME
        self._lock = None if read_only else _lock(self.path)
        self._queue: queue.SimpleQueue[tuple[_Write, _Receipt] | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()
        try:
            if read_only:
                self._check_readable()
            else:
                self._connection = _open_for_writing(self._file)
        except BaseException:
            if self._lock is not None:
                self._lock.close()
            raise
        self._writer: threading.Thread | None = None
        if not read_only:
            self._writer = threading.Thread(target=self._write_loop, name="clawgym-store", daemon=True)
            self._writer.start()

    # ---- writing

    async def add_call(self, rollout_id: str, call: ModelCall) -> None:
        """Store one call of a running rollout; returns when it is committed."""
        await self._written(_rows.write_calls(rollout_id, [call]))

    async def add_rollout(self, rollout: Rollout) -> None:
        """Store a finished rollout; returns when it is committed.

        Calls that `add_call` stored are completed (kind, state), missing ones are added, and those of an abandoned
        attempt under the same rollout id are removed.
        """
        await self._written(_rows.write_rollout(rollout))

    def add_batch(self, update: int, rollout_ids: Sequence[str], *, stale: Sequence[str] = ()) -> None:
        """Store which rollouts, in which order, update number `update` is about to train on. Blocks until committed.

        A repeated `update` replaces the earlier batch.

        Args:
            stale: those that were sampled too long ago; their exclusion becomes "stale".
        """
        rows = [(update, position, rollout_id) for position, rollout_id in enumerate(rollout_ids)]

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM batches WHERE update_index = ?", (update,))
            connection.executemany("INSERT INTO batches VALUES (?, ?, ?)", rows)
            connection.executemany("UPDATE rollouts SET exclusion = 'stale' WHERE id = ?", [(one,) for one in stale])

        self._write_now(write)

    def set_cursor(self, name: str, value: Json) -> None:
        """Remember where a run stands (the sampler's position, say). Blocks until committed."""
        text = json.dumps(value)
        self._write_now(lambda connection: _rows.upsert(connection, "cursor", {"name": name, "value": text}))

    # ---- reading

    def rollout_ids(self) -> tuple[str, ...]:
        """Return the ids of all finished rollouts, ordered by (group, index), never by arrival."""
        with self._reader() as connection:
            found = connection.execute("SELECT id FROM rollouts ORDER BY group_id, group_index, id").fetchall()
        return tuple(str(row["id"]) for row in found)

    def rollouts(self) -> Iterator[Rollout]:
        """Yield every finished rollout, ordered by (group, index), loading one at a time."""
        for rollout_id in self.rollout_ids():
            yield self.load(rollout_id)

    def load(self, rollout_id: str) -> Rollout:
        """Return one finished rollout, equal to the one that was stored.

        Raises:
            StoreError: there is none of that id.
        """
        with self._reader() as connection:
            row = connection.execute("SELECT * FROM rollouts WHERE id = ?", (rollout_id,)).fetchone()
            if row is None:
                raise StoreError(
                    f"Expected a finished rollout of {self._file}, got the id {rollout_id!r}. See rollout_ids()."
                )
            return _rows.read_rollout(row, _rows.read_calls(connection, rollout_id))

    def calls(self, rollout_id: str) -> tuple[ModelCall, ...]:
        """Return the calls stored so far of a rollout, finished or not."""
        with self._reader() as connection:
            return _rows.read_calls(connection, rollout_id)

    def unfinished(self) -> tuple[str, ...]:
        """Return ids that have calls but no rollout: cut off by a crash, or still running."""
        query = "SELECT DISTINCT rollout_id FROM calls WHERE rollout_id NOT IN (SELECT id FROM rollouts) ORDER BY 1"
        with self._reader() as connection:
            return tuple(str(row["rollout_id"]) for row in connection.execute(query))

    def batches(self) -> Mapping[int, tuple[str, ...]]:
        """Return the ordered rollout ids of every stored batch, by update number."""
        found: dict[int, list[str]] = {}
        with self._reader() as connection:
            for row in connection.execute("SELECT * FROM batches ORDER BY update_index, position"):
                found.setdefault(row["update_index"], []).append(row["rollout_id"])
        return {update: tuple(ids) for update, ids in found.items()}

    def cursor(self, name: str) -> Json:
        """Return what `set_cursor` stored under `name`, None when nothing."""
        with self._reader() as connection:
            row = connection.execute("SELECT value FROM cursor WHERE name = ?", (name,)).fetchone()
        if row is None:
            return None
        value: Json = json.loads(row["value"])
        return value

    # ---- life

    def close(self) -> None:
        """Commit what is waiting and let the file go. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            self._queue.put(None)
        if self._writer is not None:
            self._writer.join()
            self._connection.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> RolloutStore:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_now(self, write: _Write) -> None:
        future: Future[None] = Future()
        self._submit(write, future)
        future.result()

    async def _written(self, write: _Write) -> None:
        receipt = _LoopReceipt()
        self._submit(write, receipt)
        await receipt.future

    def _submit(self, write: _Write, receipt: _Receipt) -> None:
        with self._closing:
            if self._closed or self.read_only:
                state = "closed" if self._closed else "read-only"
                raise StoreError(f"Expected a store open for writing, got a {state} one: {self._file}.")
            self._queue.put((write, receipt))

    def _write_loop(self) -> None:
        for first in iter(self._queue.get, None):
            group = [first]
            while len(group) < _MAX_GROUP and not self._queue.empty():
                item = self._queue.get()
                if item is None:
                    self._queue.put(None)  # `close` queued it last: ends the loop after this group.
                    break
                group.append(item)
            # A write whose caller was cancelled before this line is skipped; after it, it cannot be.
            self._commit([item for item in group if item[1].set_running_or_notify_cancel()])

    def _commit(self, group: Sequence[tuple[_Write, _Receipt]]) -> None:
        if not group:
            return
        try:
            with self._connection:
                for write, _ in group:
                    write(self._connection)
        except Exception as error:
            if len(group) > 1:  # One bad write must not take its neighbours down.
                for item in group:
                    self._commit([item])
            else:
                group[0][1].set_exception(error)
            return
        for _, receipt in group:
            receipt.set_result(None)

    @contextmanager
    def _reader(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(f"{self._file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            yield connection

    def _check_readable(self) -> None:
        if not self._file.is_file():
            raise StoreError(f"Expected a rollout store at {self._file}, got nothing there. Give a run directory.")
        with self._reader() as connection:
            _check_schema(connection, self._file)


class _LoopReceipt:
    """Tells a coroutine, which asyncio's own future does at a fraction of the cost of a thread's. A `_Receipt`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def set_running_or_notify_cancel(self) -> bool:
        return not self.future.cancelled()

    def set_result(self, result: None) -> None:
        self._settle(lambda: self.future.set_result(result))

    def set_exception(self, exception: Exception) -> None:
        self._settle(lambda: self.future.set_exception(exception))

    def _settle(self, settle: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
            self._loop.call_soon_threadsafe(lambda: None if self.future.done() else settle())


def _lock(path: Path) -> _LockFile:
    path.mkdir(parents=True, exist_ok=True)
    return _LockFile(path / f"{FILE_NAME}.lock")


class _LockFile:
    """An advisory lock that dies with the process, so that a crashed run never blocks its resume."""

    def __init__(self, path: Path) -> None:
        self._handle = path.open("w")
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._handle.close()
            raise StoreError(
                f"Expected {path.parent} to be written by one run, got a second one. "
                "Choose another run directory, or open it with read_only=True."
            ) from error

    def close(self) -> None:
        self._handle.close()


def _open_for_writing(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, check_same_thread=False)
    try:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            connection.executescript(_rows.SCHEMA)
        _check_schema(connection, file)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise _no_store(file, error) from error
    except StoreError:
        connection.close()
        raise
    return connection


def _check_schema(connection: sqlite3.Connection, file: Path) -> None:
    try:
        row = connection.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    except sqlite3.DatabaseError as error:
        raise _no_store(file, error) from error
    version = row["value"] if row is not None else "none"
    if version != _rows.SCHEMA_VERSION:
        raise StoreError(
            f"Expected schema version {_rows.SCHEMA_VERSION} in {file}, got {version}. "
            "Read it with the ClawGym version that wrote it."
        )


def _no_store(file: Path, error: sqlite3.DatabaseError) -> StoreError:
    return StoreError(f"Expected a rollout store, got {file}: {error}. Choose another run directory.")
