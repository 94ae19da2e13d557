"""Imitation of finished rollouts: which tokens carry loss, and that they become likelier."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learner_fakes import Turn, make_policy, make_rollout

from clawgym_env.policy import Policy
from clawgym_env.rendering import ChatMLRenderer
from clawgym_env.rollout import Rollout
from clawgym_env.tasks.task import SolutionStep, Task
from clawgym_env.tokenizer import byte_tokenizer
from clawgym_env.trace.prefix_tree import Selection
from clawgym_env.trace.store import RolloutStore
from learners.cold_start import batch_loss
from learners.demonstrations import demonstrate
from learners.grpo import TreeGRPO
from learners.sft import examples_of, finetune

TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def policy() -> Policy:
    made = make_policy(vocab_size=TOKENIZER.vocab_size, max_position_embeddings=4096)
    made.tokenizer, made.renderer, made.context_length = TOKENIZER, ChatMLRenderer(TOKENIZER), 4096
    return made


BRANCHED = [
    Turn(delta=[10, 11], reply=[20, 21]),
    Turn(delta=[12], reply=[22], parent=0, state="dead"),
    Turn(delta=[12], reply=[23, 24], parent=0),
    Turn(delta=[13, 14], reply=[25], kind="compaction"),
]


def test_only_what_was_sampled_on_kept_paths_carries_loss() -> None:
    [example] = examples_of([make_rollout(BRANCHED, 1.0)])
    assert example.token_ids.tolist() == [10, 11, 20, 21, 12, 23, 24]
    assert example.token_ids[example.loss_mask].tolist() == [20, 21, 23, 24]


def test_targets_that_carry_no_loss_have_no_gradient() -> None:
    """The logit of a token that is context only is pushed down, never up, wherever it is not asked for."""
    trained = policy()
    head = trained.module.get_output_embeddings()
    assert head is not None
    batch_loss(trained.module, examples_of([make_rollout(BRANCHED, 1.0)])).backward()  # type: ignore[no-untyped-call]
    hidden = trained.module.get_decoder()(torch.tensor([[10, 11, 20, 21, 12, 23, 24]])).last_hidden_state[0]
    predictors = hidden[[1, 2, 4, 5]].detach()  # of the four tokens that were sampled
    probabilities = torch.softmax(head(predictors).detach(), -1)
    probabilities[range(4), [20, 21, 23, 24]] -= 1.0
    expected = probabilities.T @ predictors / 4
    assert torch.allclose(head.weight.grad, expected, atol=1e-5)


@pytest.mark.parametrize("kept_in", ["memory", "store", "folder"])
def test_imitated_rollouts_become_likelier_and_bad_ones_are_left_out(tmp_path: Path, kept_in: str) -> None:
    good = [make_rollout([Turn([1, 2, n], [5, 6, 7])], 1.0, group="a", index=n) for n in range(6)]
    bad = [make_rollout([Turn([1, 2, n], [8, 9])], 0.2, group="b", index=n) for n in range(3)]
    ungraded = [make_rollout([Turn([1, 2], [9])], None, group="c")]
    with RolloutStore(tmp_path) as store:

        async def fill() -> None:
            for rollout in [*bad, *good, *ungraded]:
                await store.add_rollout(rollout)

        asyncio.run(fill())
        source = {"memory": [*bad, *good, *ungraded], "store": store, "folder": tmp_path}[kept_in]
        assert len(examples_of(source, min_reward=0.5)) == 6
        trained = policy()
        before = {name: _likelihood(trained, group) for name, group in (("good", good), ("bad", bad))}
        loss = finetune(trained, source, min_reward=0.5, num_epochs=20, batch_size=4, learning_rate=1e-2)
    assert _likelihood(trained, good) > before["good"] + 1.0
    assert _likelihood(trained, bad) < before["bad"]
    assert loss == pytest.approx(-_likelihood(trained, good), abs=0.5)


def test_the_order_depends_on_the_seed_alone() -> None:
    rollouts = [make_rollout([Turn([1, 2, n], [5, n])], 1.0, index=n) for n in range(5)]
    first, second, other = (policy() for _ in range(3))
    for trained, seed in ((first, 1), (second, 1), (other, 2)):
        finetune(trained, rollouts, batch_size=2, learning_rate=1e-2, seed=seed)
    weights = [next(trained.module.parameters()) for trained in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_an_open_engine_forgets_what_it_cached_of_the_old_weights() -> None:
    from clawgym_env.engine.torch_engine import TorchEngine

    trained = policy()
    engine = TorchEngine(trained)
    finetune(trained, [make_rollout([Turn([1, 2], [5])], 1.0)])
    assert engine.policy_version == trained.version == 1
    asyncio.run(engine.close())


def test_nothing_to_learn_from_and_another_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of reward 0.5 or more, got none"):
        finetune(policy(), [make_rollout([Turn([1], [2])], 0.4)], min_reward=0.5)
    with pytest.raises(ValueError, match=r"below \d+, got 5000"):
        finetune(policy(), [make_rollout([Turn([1], [5000])], 1.0)])


STEPS = {
    "Say hi": [SolutionStep("write", {"path": "a.txt", "content": "hi ☃"})],
    "Say hi twice": [
        SolutionStep("write", {"path": "a.txt", "content": "hi"}),
        SolutionStep("bash", {"command": "ls"}),
    ],
}
TASKS = [Task(id=f"task-{n}", instruction=text) for n, text in enumerate(STEPS)]


def test_a_demonstration_is_what_the_policy_would_have_sampled_in_the_harness_own_prompt() -> None:
    rollouts = demonstrate(
        policy(),
        TASKS,
        lambda task: STEPS[task.instruction],
        harness="agent-loop",
        grader=lambda task, workspace: float((workspace / "a.txt").read_text().startswith("hi")),
        max_concurrency=2,
    )
    assert [rollout.reward for rollout in rollouts] == [1.0, 1.0]
    said = [[TOKENIZER.decode(call.token_ids.tolist()) for call in rollout.tree] for rollout in rollouts]
    call = '<tool_call>{"name": "write", "arguments": {"path": "a.txt", "content": "hi ☃"}}</tool_call><|im_end|>'
    assert said[0] == [call, "Done.<|im_end|>"]
    assert len(said[1]) == 3
    example, *rest = examples_of(rollouts[:1])
    assert not rest
    assert TOKENIZER.decode(example.token_ids[example.loss_mask].tolist()) == f"{call}Done.<|im_end|>"
    rendered = TOKENIZER.decode(rollouts[0].tree.prompt(0).tolist())
    assert "You are an agent in a sandbox" in rendered
    assert rollouts[0].index == 0
    assert len({rollout.group_id for rollout in rollouts}) == 2


def test_what_cannot_be_said_or_told_apart_is_refused() -> None:
    same = [TASKS[0], TASKS[0].model_copy(update={"id": "again"})]
    with pytest.raises(ValueError, match="Expected tasks of different instructions, got 1 for 2"):
        demonstrate(policy(), same, lambda task: STEPS[task.instruction])
    with pytest.raises(ValueError, match="got 'copy_in'"):
        demonstrate(policy(), TASKS, lambda task: [SolutionStep("copy_in", {"source": "/", "path": "b"})])


def _likelihood(trained: Policy, rollouts: list[Rollout]) -> float:
    with torch.no_grad():
        return -float(np.mean([batch_loss(trained.module, [example]).item() for example in examples_of(rollouts)]))


def test_a_policy_with_adapters_is_taught_through_them() -> None:
    pytest.importorskip("peft")
    taught = policy()
    TreeGRPO(taught, lora=2)
    frozen = {name: p.detach().clone() for name, p in taught.module.named_parameters() if not p.requires_grad}
    batch = examples_of([make_rollout(BRANCHED, 1.0)])
    before = batch_loss(taught.module, batch).item()
    finetune(taught, [make_rollout(BRANCHED, 1.0)], num_epochs=20, learning_rate=1e-2)
    assert batch_loss(taught.module, batch).item() < before - 0.1
    assert all(torch.equal(p, frozen[name]) for name, p in taught.module.named_parameters() if name in frozen)


def test_branching_is_judged_by_its_own_selection() -> None:
    rollout = make_rollout([Turn([1, 2], [3 + turn]) for turn in range(6)], 1.0)
    assert examples_of([rollout])
    assert not examples_of([rollout], selection=Selection(max_leaves=4))
    wide = make_rollout([Turn([1, 2], [3])] * 17, 1.0)
    marked = dataclasses.replace(wide, exclusion="over_branched")
    assert not examples_of([marked])
    assert examples_of([marked], selection=Selection(max_leaves=64))
