"""Real harnesses' recorded traffic goes through the live proxy, and every token of it is where it belongs.

`CLAWGYM_TRAFFIC` names a folder of recordings. The project's own few, written by hand, are always replayed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from expected import APPEND_ONLY, EXPECTED, HAND_WRITTEN, Expected
from invariants import check
from recordings import Recording, load, recordings
from replayer import Replayed, replay

from clawgym_env import registry
from clawgym_env.harness import HarnessAdapter
from clawgym_env.messages import Dialect
from clawgym_env.trace.prefix_tree import PrefixTree, Selection

OWN = Path(__file__).parent / "data"
BY_HAND = "hand"
"""The version of a harness that never sent what is written down here."""
TRAFFIC = os.environ.get("CLAWGYM_TRAFFIC")
FILES = recordings(Path(TRAFFIC)) if TRAFFIC else []
needs_traffic = pytest.mark.skipif(not FILES, reason="CLAWGYM_TRAFFIC names no folder of recorded traffic")


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def adapter_of(recording: Recording) -> HarnessAdapter | None:
    """Return the adapter that knows this harness's markers; None where there is none."""
    name = next((name for name in registry.HARNESSES if recording.harness.startswith(f"{name}-")), None)
    if name is None:
        return None
    version = recording.harness.removeprefix(f"{name}-")
    options = {"openclaw": f"?api={dialect_of(recording)}"}
    if version != BY_HAND:
        options["claude-code"] = f"?version={version}"
    return registry.adapter(name + options.get(name, ""))


def dialect_of(recording: Recording) -> Dialect:
    return next(exchange.dialect for exchange in recording.exchanges if exchange.dialect is not None)


def append_only(recording: Recording) -> bool:
    return recording.harness.startswith(APPEND_ONLY) or dialect_of(recording) == "responses"


def counted(tree: PrefixTree, refused: int) -> Expected:
    """Count a tree the way the table does."""
    buckets = [Selection().bucket(call) for call in tree]
    main = [call for call in tree if call.kind == "main"]
    return Expected(
        kept=tuple(sum(buckets[at] == "trained" for at in path.calls) for path in tree.trajectories()),
        compaction=buckets.count("compaction"),
        subagent=buckets.count("subagent"),
        auxiliary=buckets.count("auxiliary"),
        dead=sum(call.state == "dead" for call in main),
        retry=sum(call.state == "retry" for call in main),
        undelivered=sum(call.state == "undelivered" for call in main),
        starved=sum(call.starved for call in main),
        refused=refused,
        drift=sum(call.drift_reason is not None for call in tree),
    )


def replayed(file: Path) -> tuple[Recording, Replayed]:
    recording = load(file)
    result = asyncio.run(replay(recording, adapter_of(recording)))
    check(result.tree, result.policy, append_only=append_only(recording))
    return recording, result


def hold_to(table: Mapping[str, Expected], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording, result = replayed(file)
    counts = counted(result.tree, result.refused)
    row = table.get(recording.name)
    if row is None:
        with capsys.disabled():
            print(f"\n{recording.name} is in no table: {counts}")  # noqa: T201 (what there is to know of it)
        return
    assert counts == row, f"\n{result.tree.outline()}"


@needs_traffic
@pytest.mark.parametrize("file", FILES or [Path()], ids=name_of)
def test_recorded_traffic_comes_to_what_the_table_says(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hold_to(EXPECTED, file, capsys)


@needs_traffic
def test_the_table_holds_every_scenario_of_the_recorded_harnesses() -> None:
    harnesses = {row.partition("/")[0] for row in EXPECTED}
    found = {name_of(file) for file in FILES if file.parent.name in harnesses}
    present = {name.partition("/")[0] for name in found}
    assert found == {row for row in EXPECTED if row.partition("/")[0] in present}


@pytest.mark.parametrize("file", recordings(OWN), ids=name_of)
def test_a_hand_written_recording_comes_to_what_its_row_says(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert name_of(file) in HAND_WRITTEN
    hold_to(HAND_WRITTEN, file, capsys)


def test_an_altered_token_context_or_log_probability_does_not_pass() -> None:
    recording = load(OWN / "mini-swe-agent-hand" / "dropped-replies.jsonl")
    result = asyncio.run(replay(recording))
    last = result.tree[len(result.tree) - 1]
    for name in ("token_ids", "delta_token_ids", "logprobs"):
        array = getattr(last, name).copy()
        array[0] += 1
        altered = PrefixTree([*result.tree.calls[:-1], dataclasses.replace(last, **{name: array})])
        with pytest.raises((AssertionError, KeyError)):
            check(altered, result.policy, append_only=True)
