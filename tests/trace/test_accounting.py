"""Whatever a harness does, every sampled token ends in exactly one named bucket, and a trained one is trained once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from conversations import SYSTEM, TOOLS, USER, Agent
from hypothesis import given, settings
from hypothesis import strategies as st

from clawgym_env.messages import Message, ToolCall
from clawgym_env.trace.calls import ModelCall
from clawgym_env.trace.prefix_tree import BUCKETS, PrefixTree, Selection

DEEDS = (
    "go on",
    "drop the reply",
    "ask again",
    "lose the reply and ask again",
    "go on from a part that arrived",
    "rewrite the arguments",
    "cut the reply",
    "starve the reply",
    "say nothing",
    "ask beside",
    "call a helper",
    "compact",
    "change the system prompt",
    "hang up for good",
)


@dataclass
class Harness:
    """An agent that does what it is told, however odd."""

    agent: Agent = field(default_factory=Agent)
    history: list[Message] = field(default_factory=lambda: [SYSTEM, USER])
    helper: list[Message] = field(default_factory=lambda: [Message("system", "You help."), Message("user", "Count.")])
    turn: int = 0

    def do(self, deed: str) -> None:
        self.turn += 1
        history, agent = self.history, self.agent
        match deed:
            case "go on":
                history += agent.results(self._ask(), "ok")
            case "drop the reply":
                self._ask()
                history.append(Message("user", f"Not like that ({self.turn})."))
            case "ask again":
                self._ask()
                history += agent.results(self._ask(), "ok")
            case "lose the reply and ask again":
                self._ask(delivered=False)
                history += agent.results(self._ask(), "ok")
            case "go on from a part that arrived":
                self._ask(delivered=False)
                history += [Message("assistant", "Tur"), Message("user", "Resume.")]
            case "rewrite the arguments":
                echo, result = agent.results(self._ask(), "What?")
                call = ToolCall(echo.tool_calls[0].id, "write", "{}")
                history += [Message("assistant", echo.content, tool_calls=(call,)), result]
            case "cut the reply":
                cut = agent.ask(history, f"Turn {self.turn} and", closed=False)
                history += [agent.echo(cut), Message("user", "Resume.")]
            case "starve the reply":
                starved = agent.ask(history, "T", starved=True, closed=False)
                history += [agent.echo(starved), Message("user", "Resume.")]
            case "say nothing":
                agent.ask(history)
                history.append(Message("user", "You said nothing."))
            case "ask beside":
                agent.ask([Message("system", "You are a title generator."), USER], "A title.", tools=())
            case "call a helper":
                call = agent.ask(self.helper, f"Turn {self.turn}.", [("read", {"n": self.turn})], tools=TOOLS[1:])
                self.helper += agent.results(call, "7")
            case "compact":
                words = Message("user", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools. Summarise.")
                agent.ask([*history, words], f"Up to turn {self.turn}.")
                history[1:] = [Message("user", f"Summary: up to turn {self.turn}.")]
            case "change the system prompt":
                history[0] = Message("system", f"You are an agent since turn {self.turn}.")
            case "hang up for good":
                self._ask(delivered=False)

    def _ask(self, *, delivered: bool = True) -> ModelCall:
        return self.agent.ask(self.history, f"Turn {self.turn}.", [("write", {"n": self.turn})], delivered=delivered)


uses = st.sampled_from(["train", "context", "drop"])
selections = st.builds(Selection, main=uses, compaction=uses, subagent=uses, auxiliary=uses, dead=uses)
deeds = st.lists(st.sampled_from(DEEDS), min_size=1, max_size=8)


def rollout(doings: list[str]) -> PrefixTree:
    harness = Harness()
    for deed in doings:
        harness.do(deed)
    tree = harness.agent.builder.freeze()
    tree.validate()
    return tree


@settings(max_examples=150)
@given(deeds, st.one_of(st.just(Selection()), selections))
def test_every_sampled_token_is_in_exactly_one_named_bucket(doings: list[str], selection: Selection) -> None:
    tree = rollout(doings)
    by_call: Counter[str] = Counter()
    for call in tree:
        by_call[selection.bucket(call)] += len(call.token_ids)
    assert tree.buckets(selection) == {name: by_call[name] for name in BUCKETS}
    assert sum(tree.buckets(selection).values()) == tree.num_completion_tokens
    delivered = sum(len(call.token_ids) for call in tree if call.timing.delivered_s is not None)
    assert tree.delivered_fraction == (delivered / tree.num_completion_tokens if tree.num_completion_tokens else 1.0)


@settings(max_examples=150)
@given(deeds, st.one_of(st.just(Selection()), selections))
def test_trained_tokens_are_those_of_the_bucket_each_once_after_its_own_prompt(
    doings: list[str], selection: Selection
) -> None:
    tree = rollout(doings)
    seen: list[int] = []
    for row in tree.rows(selection):
        for index in np.unique(row.call_indices[row.loss_mask]).tolist():
            call = tree[index]
            seen.append(index)
            assert row.token_ids[: call.history_len].tolist() == tree.history(index).tolist()
            assert row.loss_mask[call.prompt_len : call.history_len].all()
            assert row.logprobs[call.prompt_len : call.history_len].tolist() == call.logprobs.tolist()
        assert row.loss_mask.sum() == sum(row.call_indices >= 0)
    assert sorted(seen) == [call.index for call in tree if len(call.token_ids) and selection.bucket(call) == "trained"]
    assert not any(tree[index].starved or tree[index].state == "undelivered" for index in seen)


@settings(max_examples=150)
@given(deeds)
def test_by_default_only_the_main_agents_live_replies_are_trained(doings: list[str]) -> None:
    tree = rollout(doings)
    trained = {call.index for call in tree if Selection().bucket(call) == "trained"}
    assert trained == {c.index for c in tree if (c.kind, c.state, c.starved) == ("main", "live", False)}
    on_paths = {index for path in tree.trajectories() for index in path.calls}
    assert trained <= on_paths
    for path in tree.trajectories():
        parents = [tree[index].lineage_parent for index in path.calls]
        assert parents == [None, *path.calls[:-1]], "one unbroken lineage"
