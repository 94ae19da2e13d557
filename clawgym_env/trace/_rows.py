"""How rollouts and calls look as SQLite rows: the schema of the store and the lossless way there and back.

Token arrays are little-endian blobs, and a call holds its new tokens only, so that a row's size does not depend on
how long the conversation already is. Pure but for the connection it is handed; `trace.store` owns threads and files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, Union

import numpy as np

from clawgym_env.engine.base import ApiUsage, SamplingParams, VersionSpan
from clawgym_env.grading.base import Grade, JudgeUsage
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.trace.calls import CallTiming, ModelCall, pack_array, unpack_array
from clawgym_env.trace.prefix_tree import PrefixTree

SCHEMA_VERSION = "4"
SCHEMA = f"""
BEGIN;
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('schema_version', '{SCHEMA_VERSION}');
CREATE TABLE calls (
    rollout_id TEXT NOT NULL, id TEXT NOT NULL, call_index INTEGER NOT NULL,
    lineage_parent INTEGER, prefix_parent INTEGER, prefix_len INTEGER NOT NULL,
    delta_token_ids BLOB NOT NULL, token_ids BLOB NOT NULL, logprobs BLOB NOT NULL, policy_versions BLOB NOT NULL,
    sampling TEXT NOT NULL, finish_reason TEXT NOT NULL, kind TEXT NOT NULL, state TEXT NOT NULL,
    dialect TEXT NOT NULL, drift_reason TEXT, request_hash TEXT NOT NULL, role_hash TEXT NOT NULL,
    starved INTEGER NOT NULL, arrived_s REAL NOT NULL, generated_s REAL NOT NULL, delivered_s REAL,
    api_prompt_tokens INTEGER, api_completion_tokens INTEGER, routed_experts BLOB,
    PRIMARY KEY (rollout_id, id)
);
CREATE TABLE rollouts (
    id TEXT PRIMARY KEY, group_id TEXT NOT NULL, group_index INTEGER NOT NULL,
    task_id TEXT NOT NULL, harness TEXT NOT NULL, policy TEXT NOT NULL, seed INTEGER NOT NULL,
    stop_reason TEXT NOT NULL, exclusion TEXT, reward REAL, reward_components TEXT, grader_output TEXT,
    judge_usage TEXT,
    instruction TEXT NOT NULL, response TEXT NOT NULL, error TEXT NOT NULL,
    harness_exit_code INTEGER, harness_output TEXT NOT NULL, timing TEXT NOT NULL,
    rewritten_calls INTEGER NOT NULL
);
CREATE INDEX rollouts_by_group ON rollouts (group_id, group_index);
CREATE TABLE batches (
    update_index INTEGER NOT NULL, position INTEGER NOT NULL, rollout_id TEXT NOT NULL,
    PRIMARY KEY (update_index, position)
) WITHOUT ROWID;
CREATE TABLE cursor (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
COMMIT;
"""
"""`reward` is NULL without a grade, `api_*` unless the call was relayed, `routed_experts` (a NumPy file) unless a
mixture of experts answered and told. `batches` holds the order in which an update trains its rollouts."""

Cell: TypeAlias = Union[str, bytes, int, float, None]
Row: TypeAlias = dict[str, Cell]

_SETTLES_LATER = ("call_index", "lineage_parent", "kind", "state", "drift_reason", "delivered_s")
"""Columns of a call that may still change between its commit and the end of the rollout; arrays never do."""


def write_calls(rollout_id: str, calls: Sequence[ModelCall]) -> Callable[[sqlite3.Connection], None]:
    """Return a transaction that stores calls. They are encoded in it: the caller may be the proxy's event loop."""

    def write(connection: sqlite3.Connection) -> None:
        for call in calls:
            row = _call_row(rollout_id, call)
            upsert(connection, "calls", row, key=("rollout_id", "id"), update=_SETTLES_LATER)

    return write


def write_rollout(rollout: Rollout) -> Callable[[sqlite3.Connection], None]:
    """Return a transaction that stores a finished rollout and makes its calls exactly those of its tree."""
    row = _rollout_row(rollout)
    write_tree = write_calls(rollout.id, rollout.tree.calls)
    kept = {call.id for call in rollout.tree.calls}

    def write(connection: sqlite3.Connection) -> None:
        stored = connection.execute("SELECT id FROM calls WHERE rollout_id = ?", (rollout.id,)).fetchall()
        stale = [(rollout.id, found["id"]) for found in stored if found["id"] not in kept]
        connection.executemany("DELETE FROM calls WHERE rollout_id = ? AND id = ?", stale)
        write_tree(connection)
        upsert(connection, "rollouts", row, key=("id",))

    return write


def upsert(
    connection: sqlite3.Connection,
    table: str,
    row: Mapping[str, Cell],
    *,
    key: Sequence[str] = ("name",),
    update: Sequence[str] | None = None,
) -> None:
    """Insert a row; where `key` exists already, set the columns `update` (default: all)."""
    columns = tuple(row)
    connection.execute(_upsert(table, columns, tuple(key), tuple(update or columns)), tuple(row.values()))


@functools.cache
def _upsert(table: str, columns: tuple[str, ...], key: tuple[str, ...], update: tuple[str, ...]) -> str:
    changes = ", ".join(f"{column} = excluded.{column}" for column in update)
    return (
        f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
    )


def read_calls(connection: sqlite3.Connection, rollout_id: str) -> tuple[ModelCall, ...]:
    """Return the stored calls of a rollout in order of commit."""
    found = connection.execute("SELECT * FROM calls WHERE rollout_id = ? ORDER BY call_index", (rollout_id,))
    return tuple(_read_call(row) for row in found)


def read_rollout(row: sqlite3.Row, calls: Sequence[ModelCall]) -> Rollout:
    """Return the rollout a row and its calls were written from."""
    grade = None
    if row["reward"] is not None:
        grade = Grade(
            row["reward"],
            json.loads(row["reward_components"]),
            _text(row["grader_output"]),
            JudgeUsage(**json.loads(row["judge_usage"])),
        )
    return Rollout(
        id=row["id"],
        task_id=_text(row["task_id"]),
        harness=row["harness"],
        policy=row["policy"],
        group_id=row["group_id"],
        index=row["group_index"],
        seed=row["seed"],
        tree=PrefixTree(calls),
        stop_reason=StopReason(row["stop_reason"]),
        grade=grade,
        exclusion=row["exclusion"],
        instruction=_text(row["instruction"]),
        response=_text(row["response"]),
        error=_text(row["error"]),
        harness_exit_code=row["harness_exit_code"],
        harness_output=_text(row["harness_output"]),
        timing=json.loads(row["timing"]),
        rewritten_calls=row["rewritten_calls"],
    )


def _rollout_row(rollout: Rollout) -> Row:
    grade = rollout.grade
    return {
        "id": rollout.id,
        "group_id": rollout.group_id,
        "group_index": rollout.index,
        "task_id": _cell(rollout.task_id),
        "harness": rollout.harness,
        "policy": rollout.policy,
        "seed": rollout.seed,
        "stop_reason": rollout.stop_reason.value,
        "exclusion": rollout.exclusion,
        "reward": None if grade is None else float(grade.reward),
        "reward_components": None if grade is None else json.dumps(dict(grade.components)),
        "grader_output": None if grade is None else _cell(grade.output),
        "judge_usage": None if grade is None else json.dumps(dataclasses.asdict(grade.judge_usage)),
        "instruction": _cell(rollout.instruction),
        "response": _cell(rollout.response),
        "error": _cell(rollout.error),
        "harness_exit_code": rollout.harness_exit_code,
        "harness_output": _cell(rollout.harness_output),
        "timing": json.dumps(dict(rollout.timing)),
        "rewritten_calls": rollout.rewritten_calls,
    }


def _call_row(rollout_id: str, call: ModelCall) -> Row:
    usage = call.api_usage
    spans = np.array([(s.version, s.start, s.end) for s in call.policy_versions], dtype="<i8")
    return {
        "rollout_id": rollout_id,
        "id": call.id,
        "call_index": call.index,
        "lineage_parent": call.lineage_parent,
        "prefix_parent": call.prefix_parent,
        "prefix_len": call.prefix_len,
        "delta_token_ids": call.delta_token_ids.astype("<i4").tobytes(),
        "token_ids": call.token_ids.astype("<i4").tobytes(),
        "logprobs": call.logprobs.astype("<f4").tobytes(),
        "policy_versions": spans.tobytes(),
        "sampling": call.sampling.model_dump_json(),
        "finish_reason": call.finish_reason,
        "kind": call.kind,
        "state": call.state,
        "dialect": call.dialect,
        "drift_reason": call.drift_reason,
        "request_hash": call.request_hash,
        "role_hash": call.role_hash,
        "starved": int(call.starved),
        "arrived_s": call.timing.arrived_s,
        "generated_s": call.timing.generated_s,
        "delivered_s": call.timing.delivered_s,
        "api_prompt_tokens": None if usage is None else usage.prompt_tokens,
        "api_completion_tokens": None if usage is None else usage.completion_tokens,
        "routed_experts": None if call.routed_experts is None else pack_array(call.routed_experts),
    }


def _read_call(row: sqlite3.Row) -> ModelCall:
    spans = np.frombuffer(row["policy_versions"], dtype="<i8").reshape(-1, 3)
    return ModelCall(
        id=row["id"],
        index=row["call_index"],
        lineage_parent=row["lineage_parent"],
        prefix_parent=row["prefix_parent"],
        prefix_len=row["prefix_len"],
        delta_token_ids=np.frombuffer(row["delta_token_ids"], dtype="<i4"),
        token_ids=np.frombuffer(row["token_ids"], dtype="<i4"),
        logprobs=np.frombuffer(row["logprobs"], dtype="<f4"),
        policy_versions=tuple(VersionSpan(*map(int, span)) for span in spans),
        sampling=SamplingParams.model_validate_json(row["sampling"]),
        finish_reason=row["finish_reason"],
        kind=row["kind"],
        state=row["state"],
        dialect=row["dialect"],
        drift_reason=row["drift_reason"],
        request_hash=row["request_hash"],
        role_hash=row["role_hash"],
        starved=bool(row["starved"]),
        timing=CallTiming(row["arrived_s"], row["generated_s"], row["delivered_s"]),
        api_usage=None
        if row["api_prompt_tokens"] is None
        else ApiUsage(prompt_tokens=row["api_prompt_tokens"], completion_tokens=row["api_completion_tokens"]),
        routed_experts=None if row["routed_experts"] is None else unpack_array(row["routed_experts"]),
    )


def _cell(text: str) -> str | bytes:
    """Return text as SQLite can hold it: JSON may smuggle lone surrogates in, which UTF-8 refuses."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")
    return text


def _text(cell: str | bytes) -> str:
    return cell if isinstance(cell, str) else cell.decode("utf-8", "surrogatepass")
