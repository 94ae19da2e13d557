"""What each recorded scenario must come to, worked out by hand from what its harness sent.

Worked out from the requests, not copied from a run: how many there are, which reply each goes on from, which are asked
again. Faults leave no call behind where no reply was ever drawn to its end: our proxy goes on drawing for a client that
has left, and gives the turn up when the rollout ends. Kinds are told as they are in a rollout, by headers and words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Expected:
    kept: tuple[int, ...] = ()
    """Trained calls of each kept main trajectory, in order."""
    compaction: int = 0
    subagent: int = 0
    auxiliary: int = 0
    dead: int = 0
    """Main calls whose reply the harness did not go on from."""
    retry: int = 0
    undelivered: int = 0
    starved: int = 0
    refused: int = 0
    """Prompts refused because they did not fit."""
    drift: int = 0
    """Calls whose prompt could not simply go on from the reply before."""


NOTHING = Expected()
"""Every request ended in a fault."""
REFUSED = Expected(refused=1)
"""The only prompt did not fit, and the harness gave up."""
THREE = Expected(kept=(3,))
"""Write, check, answer: one trajectory of three calls."""

APPEND_ONLY = ("claude-code", "codex", "gemini-cli", "mini-swe-agent", "pi", "qwen-code")
"""Harnesses that only ever add to their history. OpenClaw does on the Responses API alone."""

CLAUDE_2_0 = {
    # Its reply with broken JSON comes back with another input: a drift, but the run goes on from it. Side calls: two
    # warm-ups and one about each Bash command (two where its output matters).
    "badargs": Expected(kept=(3,), auxiliary=3, drift=1),
    "basic": Expected(kept=(3,), auxiliary=4),
    # Three compactions, each under another system prompt and tool list (hence the drifts). After each the history is
    # one message, three times the same: segments of their own, not retries. 39 = 9 + 3 + 27.
    "compact": Expected(kept=(3, 1, 1, 4), compaction=3, auxiliary=27, drift=3),
    # After the refusal it asks again without streaming.
    "ctx400": Expected(kept=(3,), auxiliary=4, refused=1),
    "subagent": Expected(kept=(3,), subagent=2, auxiliary=3),
}
CLAUDE_2_1 = {
    "401": NOTHING,
    # Three times 429, here a call that nobody waits for, then the same request: it joins that call.
    "429": THREE,
    "500": NOTHING,
    # The echo is `__unparsedToolInput`.
    "badargs": Expected(kept=(3,), drift=1),
    "bare": THREE,
    "basic": THREE,
    # The summary request ends with other words than the main conversation: a branch. What follows is a new opening.
    "compactp": Expected(kept=(3, 5), compaction=1),
    "ctx400": REFUSED,
    # The second request is the first with a hint inside its first message.
    "empty": Expected(kept=(3,), dead=1),
    "fat": Expected(kept=(6, 5, 5, 1), compaction=3),
    "hdr": THREE,
    "lean": THREE,
    # The cut reply stays, and a reminder asks for the rest.
    "maxtok": Expected(kept=(4,)),
    "midreset": THREE,
    "parallel": Expected(kept=(2,)),
    "reset": NOTHING,
    # Two processes, one history.
    "resume": Expected(kept=(4,)),
    "sonnet": THREE,
    # In the background: the main agent is called again after it had finished.
    "subagent": Expected(kept=(4,), subagent=2),
    "subsync": Expected(kept=(3,), subagent=2),
    "think": THREE,
    "tools4": THREE,
    "unktool": THREE,
}
CODEX = {
    "401": NOTHING,
    "429": NOTHING,
    "500": NOTHING,
    # Broken JSON comes back to the letter, so even this is no drift.
    "badargs": THREE,
    "basic": THREE,
    "ctx400": REFUSED,
    "empty": Expected(kept=(1,)),
    # The compaction offers no tools, hence the drift. Its header is masked, so it is told by its words.
    "fat": Expected(kept=(7, 4), compaction=1, drift=1),
    # Recorded with a server that answered 500 throughout.
    "hdr": NOTHING,
    "maxtok": Expected(kept=(1,)),
    "midreset": THREE,
    "parallel": Expected(kept=(2,)),
    "reset": NOTHING,
    "resume": Expected(kept=(4,)),
    "subagent": Expected(kept=(4,), subagent=2),
    "think": THREE,
    "unktool": THREE,
}
MINI_SWE_AGENT = {
    # A reply without a valid call is dropped and complained about; three end the run, the last of them is live. Here:
    # one with broken JSON, two good ones, three answers in words.
    "badargs": Expected(kept=(3,), dead=3),
    "basic": THREE,
    # Never compacts.
    "compact": Expected(kept=(5,)),
    "ctx400": REFUSED,
    "empty": Expected(kept=(3,), dead=3),
    "err429": NOTHING,
    "err500": NOTHING,
    "maxtok": Expected(kept=(3,), dead=3),
    # The retry gets the reply of the call that was cut off: one call.
    "midreset": Expected(kept=(3,), dead=2),
    "parallel": Expected(kept=(2,), dead=2),
    "reset": NOTHING,
    # No such tool: three answers in words.
    "subagent": Expected(kept=(1,), dead=2),
    "think": Expected(kept=(3,), dead=2),
    "unktool": Expected(kept=(3,), dead=3),
}
OPENCLAW = {
    "429": NOTHING,
    "500": NOTHING,
    # The run ends at the broken call.
    "badargs": Expected(kept=(1,)),
    "basic-anthropic-messages": THREE,
    "basic-openai-completions": THREE,
    "basic-openai-responses": THREE,
    # `agent exec` does not compact.
    "compact": Expected(kept=(9,)),
    "ctx400": REFUSED,
    # A user message about the missing answer is added.
    "empty": Expected(kept=(3,), dead=1),
    # From the sixth call on it allows one token.
    "fat": Expected(kept=(5,), starved=6),
    # The last request is the end of another session, whose replies are not in this recording.
    "gateway-basic": Expected(kept=(4,), subagent=1),
    "gateway-compact": Expected(kept=(10,)),
    "gateway-ctx400": REFUSED,
    "gateway-subagent": Expected(kept=(2,), subagent=2),
    "maxtok": Expected(kept=(1,)),
    # The retry words its task differently: the reply that was cut off stays behind.
    "midreset": Expected(kept=(3,), undelivered=1),
    "reset": NOTHING,
    "resp-long": Expected(kept=(7,)),
    # `agent exec` cannot spawn.
    "subagent": Expected(kept=(4,)),
    # Reasoning is dropped from the history, which costs nothing: it is put back by its ids.
    "think": THREE,
    "thinkon": THREE,
    "unktool": THREE,
}
PI = {
    # The echo's arguments are `{}`.
    "badargs": Expected(kept=(3,), drift=1),
    "basic": THREE,
    # The reported usage fills its window, so it allows three calls one token each; the run goes through them.
    "compact": Expected(kept=(6,), starved=3),
    "ctx400": REFUSED,
    "empty": Expected(kept=(1,)),
    "err429": NOTHING,
    "err500": NOTHING,
    # After the fifth call it compacts before every turn: the tail it keeps is context in the next segment.
    "fat": Expected(kept=(5, 1, 1, 1, 1, 1, 1), compaction=6),
    "hdr": THREE,
    "maxtok": Expected(kept=(1,)),
    "midreset": THREE,
    "parallel": Expected(kept=(2,)),
    "reset": NOTHING,
    # It has none.
    "subagent": Expected(kept=(1,)),
    "think": THREE,
    "unktool": THREE,
}
QWEN_CODE = {
    # Broken JSON is taken for a cut reply: the same prompt again with a larger budget.
    "badargs": Expected(kept=(3,), retry=1),
    "basic": THREE,
    "compact": Expected(kept=(9,)),
    "ctx400": REFUSED,
    "empty": Expected(kept=(3,), retry=1),
    "err429": NOTHING,
    "err500": NOTHING,
    "maxtok": Expected(kept=(3,), retry=1),
    # It goes on from the part that had arrived (a drift) and merges both parts afterwards (another): the first reply
    # never arrived whole, the second was drawn in the context it was asked in.
    "midreset": Expected(kept=(3,), undelivered=1, drift=2),
    "parallel": Expected(kept=(2,)),
    "reset": NOTHING,
    "subagent": Expected(kept=(4,), subagent=2),
    "think": THREE,
    "unktool": THREE,
}

EXPECTED: Mapping[str, Expected] = {
    f"{harness}/{scenario}": row
    for harness, rows in {
        "claude-code-2.0.76": CLAUDE_2_0,
        "claude-code-2.1.332": CLAUDE_2_1,
        "codex-0.171.0": CODEX,
        "mini-swe-agent-2.4.6": MINI_SWE_AGENT,
        "openclaw-2026.9.6": OPENCLAW,
        "pi-1.6.0": PI,
        "qwen-code-0.24.4": QWEN_CODE,
    }.items()
    for scenario, row in rows.items()
}

HAND_WRITTEN: Mapping[str, Expected] = {
    # Empty, hinted at; a helper beside the main agent, which breaks its JSON (a drift, and the summary shares it).
    "claude-code-hand/helpers-and-compaction": Expected(kept=(3, 2), compaction=1, subagent=2, dead=1, drift=2),
    # With its header whole, the compaction is one.
    "codex-hand/helper-and-compaction": Expected(kept=(2, 2), compaction=1, subagent=2, drift=1),
    # Empty, hinted at; ids made up by the harness, thoughts left out; a helper that has to `complete_task`.
    "gemini-cli-hand/added-ids": Expected(kept=(3,), subagent=1, dead=1),
    # Broken JSON and an answer in words, both dropped.
    "mini-swe-agent-hand/dropped-replies": Expected(kept=(3,), dead=2),
    # Cut off, worded anew; empty; then a budget of one token.
    "openclaw-hand/moving-tail": Expected(kept=(2,), dead=1, undelivered=1, starved=1),
    # Emptied arguments (a drift), a budget of one token, compaction.
    "pi-hand/compaction": Expected(kept=(2, 2), compaction=1, starved=1, drift=1),
    # Cut, asked again, cut off, gone on from the part that had arrived (a drift), merged (another).
    "qwen-code-hand/merged-parts": Expected(kept=(2,), retry=1, undelivered=1, drift=2),
}
