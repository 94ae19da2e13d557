"""Rows for other trainers: what a rollout trained here would be in TRL, verl and slime.

From `Rollout`s (or a run's store) to plain values in each project's own field names, one JSON object a line with
`write_jsonl`. A rollout gives one row for each path of its tree that trains something. Invariant: ids and
log-probabilities are those that were sampled, nothing is rendered or encoded again, and over the rows of a rollout
every trained token has mask 1 exactly once. Trainers that take group statistics over rows count a rollout as often as
it has rows; ours take them over rollouts.

The policy itself needs no export: a run's `checkpoint` and every folder of `clawgym_env.policy.save_policy` are plain
Hugging Face folders, chat template included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from clawgym_env.rollout import TRUNCATED, Rollout
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.prefix_tree import Selection, TokenRow
from learners.rows import exclusion_under, refuse_relayed, trained_rows


class TrlRow(TypedDict):
    """What a `rollout_func` of TRL's `GRPOTrainer` returns for one completion; keys beyond these reach its rewards."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]
    """Of each completion id; 0 where it was not sampled in this row."""
    env_mask: list[int]
    """1 where the policy sampled the id, 0 where the harness wrote it."""
    reward: float
    group_id: str
    rollout_id: str


class VerlMetrics(TypedDict):
    """The part of verl's `AgentLoopMetrics` that is known afterwards."""

    generate_sequences: float
    """Seconds that the calls trained in the row took to be answered."""


class VerlRow(TypedDict):
    """The fields of verl's `AgentLoopOutput`."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float]
    reward_score: float
    num_turns: int
    """As verl counts them: the calls trained in this row, and what the harness said before each."""
    metrics: VerlMetrics
    extra_fields: dict[str, str]
    """`uid` names the group, as verl's data does."""


class SlimeRow(TypedDict):
    """The fields of slime's `Sample`, for `Sample.from_dict`."""

    group_index: int
    """Counts the groups in order of appearance."""
    index: int
    """Counts the rows."""
    prompt: str
    tokens: list[int]
    """Prompt and response."""
    response_length: int
    reward: float
    loss_mask: list[int]
    """Of the response."""
    rollout_log_probs: list[float]
    """Of the response."""
    weight_versions: list[str]
    status: str
    metadata: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Split:
    """A row cut before its first trained token."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]
    calls: tuple[int, ...]
    """Those whose tokens are trained in the row."""
    versions: tuple[int, ...]


def trl_rows(rollouts: Iterable[Rollout], selection: Selection = Selection()) -> Iterator[TrlRow]:
    """Yield the rows of all rollouts that a learner with this selection would train on.

    Raises:
        ValueError: a trained call was sampled with top-p, top-k or temperature 0, or a rollout was relayed and is not
            marked so.
    """
    for rollout, row in _splits(rollouts, selection):
        yield TrlRow(
            prompt_ids=row.prompt,
            completion_ids=row.response,
            logprobs=row.logprobs,
            env_mask=row.mask,
            reward=rollout.reward,
            group_id=rollout.group_id,
            rollout_id=rollout.id,
        )


def verl_rows(rollouts: Iterable[Rollout], selection: Selection = Selection()) -> Iterator[VerlRow]:
    """Yield rows as `trl_rows` does."""
    for rollout, row in _splits(rollouts, selection):
        yield VerlRow(
            prompt_ids=row.prompt,
            response_ids=row.response,
            response_mask=row.mask,
            response_logprobs=row.logprobs,
            reward_score=rollout.reward,
            num_turns=2 * len(row.calls),
            metrics=VerlMetrics(generate_sequences=sum(_seconds(rollout.tree[call]) for call in row.calls)),
            extra_fields={**_origin(rollout), "uid": rollout.group_id},
        )


def slime_rows(rollouts: Iterable[Rollout], selection: Selection = Selection()) -> Iterator[SlimeRow]:
    """Yield rows as `trl_rows` does."""
    groups: dict[str, int] = {}
    for index, (rollout, row) in enumerate(_splits(rollouts, selection)):
        yield SlimeRow(
            group_index=groups.setdefault(rollout.group_id, len(groups)),
            index=index,
            prompt=rollout.instruction,
            tokens=row.prompt + row.response,
            response_length=len(row.response),
            reward=rollout.reward,
            loss_mask=row.mask,
            rollout_log_probs=row.logprobs,
            weight_versions=[str(version) for version in row.versions],
            status="truncated" if rollout.stop_reason in TRUNCATED else "completed",
            metadata=_origin(rollout),
        )


def write_jsonl(rows: Iterable[Mapping[str, object]], file: Path) -> int:
    """Write one JSON object a line, replacing the file, and return how many."""
    file.parent.mkdir(parents=True, exist_ok=True)
    count = 0
    with file.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(json.dumps(row) + "\n")
            count += 1
    return count


def _splits(rollouts: Iterable[Rollout], selection: Selection) -> Iterator[tuple[Rollout, _Split]]:
    for rollout in rollouts:
        if rollout.exclusion != "relayed":
            refuse_relayed(rollout)
        if exclusion_under(rollout, selection) is None:
            for row in trained_rows(rollout, selection):
                yield rollout, _split(row)


def _split(row: TokenRow) -> _Split:
    start = int(row.loss_mask.argmax())
    mask = row.loss_mask[start:]
    return _Split(
        prompt=row.token_ids[:start].tolist(),
        response=row.token_ids[start:].tolist(),
        mask=mask.astype(int).tolist(),
        logprobs=row.logprobs[start:].tolist(),
        calls=tuple(sorted(set(row.call_indices[start:][mask].tolist()))),
        versions=tuple(sorted(set(row.policy_versions[start:][mask].tolist()))),
    )


def _seconds(call: ModelCall) -> float:
    return call.timing.generated_s - call.timing.arrived_s


def _origin(rollout: Rollout) -> dict[str, str]:
    return {
        "rollout_id": rollout.id,
        "group_id": rollout.group_id,
        "task_id": rollout.task_id,
        "harness": rollout.harness,
        "stop_reason": rollout.stop_reason.value,
    }
