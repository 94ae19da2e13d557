"""The comparisons: engine with tree, tree with itself, spliced prompt with full render, run with scenario.

Pure functions over the teacher's records and a frozen tree; each returns the problems it finds, none when all is well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from clawgym_env.engine.base import TokenIds
from clawgym_env.fidelity.report import Divergence, Problem, divergence
from clawgym_env.fidelity.scenarios import Expectation
from clawgym_env.fidelity.teacher import Record
from clawgym_env.rendering import message_dicts, tool_dicts
from clawgym_env.trace.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from renderers.base import Renderer

Decode = Callable[[Sequence[int]], str]


def same_tokens(records: Sequence[Record], tree: PrefixTree, decode: Decode) -> Iterator[Problem]:
    """Yield where the tree's calls are not, bit for bit, what the engine was asked and answered."""
    by_id = {call.id: call for call in tree}
    for number, record in enumerate(records):
        call = by_id.pop(record.call_id, None)
        if call is None:
            yield Problem(f"Expected the engine's call {number} in the tree, got none")
            continue
        for name, asked, kept in (
            ("prompt", record.prompt_token_ids, tree.prompt(call.index)),
            ("sampled tokens", record.token_ids, call.token_ids),
        ):
            parted = divergence(asked, kept, call=call.index, decode=decode)
            if parted is not None:
                yield Problem(f"Expected the {name} of the engine in the tree", parted)
        if record.logprobs.tobytes() != call.logprobs.tobytes():
            yield Problem(f"Expected the log-probabilities of call #{call.index} to be the engine's, bit for bit")
    for call in by_id.values():
        yield Problem(f"Expected every call of the tree to be the engine's, got #{call.index} of nobody's")


def sound_tree(tree: PrefixTree, decode: Decode, *, append_only: bool) -> Iterator[Problem]:
    """Yield where the tree breaks its own rules: the history chain, and each sampled token in one bucket.

    Args:
        append_only: every call that goes on from another begins with all of its tokens; otherwise it holds its reply.
    """
    try:
        tree.validate()
    except ValueError as error:
        yield Problem(str(error))
        return
    for call in tree:
        if call.lineage_parent is None or call.drift_reason is not None:
            continue
        parent, prompt = tree[call.lineage_parent], tree.prompt(call.index)
        if append_only:
            history = tree.history(parent.index)
            parted = divergence(history, prompt[: len(history)], call=call.index, decode=decode)
            if parted is not None:
                yield Problem(f"Expected the prompt to begin with the history of call #{parent.index}", parted)
        elif not _holds(prompt, parent.token_ids):
            yield Problem(f"Expected the prompt of call #{call.index} to hold the reply of call #{parent.index}")
    yield from _buckets(tree)


def _buckets(tree: PrefixTree) -> Iterator[Problem]:
    buckets = tree.buckets()
    if sum(buckets.values()) != tree.num_completion_tokens:
        yield Problem(f"Expected {tree.num_completion_tokens} sampled tokens over all buckets, got {dict(buckets)}")
    trained: dict[int, int] = {}
    for row in tree.rows():
        for index in np.unique(row.call_indices[row.loss_mask]).tolist():
            mine = row.loss_mask & (row.call_indices == index)
            trained[index] = trained.get(index, 0) + int(mine.sum())
            if not np.array_equal(row.token_ids[mine], tree[index].token_ids):
                yield Problem(f"Expected the trained tokens of call #{index} to be the sampled ones")
    if sum(trained.values()) != buckets["trained"]:
        yield Problem(f"Expected {buckets['trained']} trained tokens over all rows, got {sum(trained.values())}")


def same_render(
    records: Sequence[Record], tree: PrefixTree, renderer: Renderer, decode: Decode
) -> tuple[Divergence | None, list[Problem]]:
    """Compare every spliced prompt with a full render of its request.

    They may part only inside a reply: a policy writes JSON in its own spelling, a template may forget old reasoning,
    and splicing exists for that. Anywhere else the bridge has written something else than the template would, and that
    is a problem.

    Returns:
        The first divergence inside a reply, and the problems.
    """
    by_id = {call.id: call for call in tree}
    drift: Divergence | None = None
    problems: list[Problem] = []
    for number, record in enumerate(records):
        call = by_id.get(record.call_id)
        if call is None or call.lineage_parent is None:
            continue
        rendered = renderer.render_ids(
            message_dicts(record.request.messages), tools=tool_dicts(record.request.tools), add_generation_prompt=True
        )
        whole = np.array(rendered, dtype=np.int32)
        parted = divergence(whole, record.prompt_token_ids, call=call.index, decode=decode)
        if parted is None:
            continue
        if _inside_reply(
            record.prompt_token_ids, parted.position, records[:number], set(renderer.get_stop_token_ids())
        ):
            drift = drift or parted
        else:
            problems.append(
                Problem("Expected the spliced prompt to be a full render but for the replies in it", parted)
            )
    return drift, problems


def _inside_reply(prompt: TokenIds, position: int, earlier: Sequence[Record], stops: set[int]) -> bool:
    """Whether a position of a prompt lies in an earlier reply, or right behind one that was cut before its close."""
    for record in earlier:
        reply = record.token_ids
        cut = not len(reply) or int(reply[-1]) not in stops
        for start in range(max(position - len(reply) + (not cut), 0), position + 1):
            if len(reply) and np.array_equal(prompt[start : start + len(reply)], reply):
                return True
    return False


def as_expected(tree: PrefixTree, expect: Expectation, *, segments: int, append_only: bool) -> Iterator[Problem]:
    """Yield where the run is not what the scenario expects of this harness."""
    main = [call for call in tree if call.kind == "main"]
    if expect.main_calls is not None and len(main) != expect.main_calls:
        yield Problem(f"Expected {expect.main_calls} main calls, got {len(main)}")
    subagents = sum(call.kind == "subagent" for call in tree)
    if subagents != expect.subagent_calls:
        yield Problem(f"Expected {expect.subagent_calls} calls of sub-agents, got {subagents}")
    kept = sum(path.kind == "main" for path in tree.trajectories())
    if kept != segments:
        yield Problem(f"Expected one kept main trajectory for each of {segments} segments, got {kept}")
    if (forks := count_forks(tree)) > expect.forks:
        yield Problem(f"Expected at most {expect.forks} main calls off the kept path, got {forks}")
    for call in main:
        if append_only and call.drift_reason is not None and call.drift_reason not in expect.drift:
            yield Problem(f"Expected call #{call.index} to go on from its parent's tokens, got {call.drift_reason}")


def count_forks(tree: PrefixTree) -> int:
    """Return how many main calls the harness did not go on from."""
    return sum(call.kind == "main" and call.state != "live" for call in tree)


def main_drift(tree: PrefixTree) -> tuple[str, ...]:
    """Return why main calls restarted their tokens."""
    return tuple(call.drift_reason for call in tree if call.kind == "main" and call.drift_reason is not None)


def _holds(prompt: TokenIds, reply: TokenIds) -> bool:
    if not len(reply):
        return True
    starts = np.flatnonzero(prompt == reply[0])
    return any(np.array_equal(prompt[start : start + len(reply)], reply) for start in starts.tolist())
