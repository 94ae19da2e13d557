"""The cold start: what carries loss, that it teaches, and what the recipe of `tiny` feeds it."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from clawgym_env.cache import cache_dir
from clawgym_env.engine.base import SamplingParams
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.messages import Message
from clawgym_env.policy import Policy, load_policy
from clawgym_env.rendering import ChatMLRenderer, message_dicts, parse_reply, tool_dicts
from clawgym_env.tasks.bundled import families
from clawgym_env.tasks.bundled.check import judge
from clawgym_env.tasks.task import Task
from clawgym_env.tokenizer import byte_tokenizer
from harness_adapters.mini.agent import Conversation, parse_arguments, run_tool
from harness_adapters.mini.demonstrations import mini_tools, opening, play
from learners.cold_start import Example, batch_loss, batches, make_example, train
from learners.copying_init import give_copying_heads
from learners.grpo import TreeGRPO
from learners.testing import small_policy
from learners.tiny import Flaws, Recipe, cold_start, make_module, make_tokenizer, spoil

TOKENIZER = byte_tokenizer()
RENDERER = ChatMLRenderer(TOKENIZER)
FAMILIES = [family for family in families() if family.level <= 2]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_module() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def grade(task: Task, folder: str) -> float:
    expected = json.loads(next(f for f in task.hidden_files if f.path == "reward/expected.json").read())
    known = {*expected["inputs"], *(check["file"] for check in expected["checks"])}
    return sum(check["weight"] * judge(folder, check, known) for check in expected["checks"])


def fill(folder: str, task: Task) -> None:
    for file in task.files:
        Path(folder, file.path).write_bytes(file.read())


def test_only_what_the_assistant_would_sample_carries_loss() -> None:
    messages = play("Write it.", {}, [("write", {"path": "a.txt", "content": "balo"})], "Done.")
    example = make_example(RENDERER, messages, mini_tools())
    learnt = TOKENIZER.decode(example.token_ids[example.loss_mask])
    call = '<tool_call>{"name": "write", "arguments": {"path": "a.txt", "content": "balo"}}</tool_call><|im_end|>'
    assert learnt == f"{call}Done.<|im_end|>"


@given(
    shared=st.integers(0, 12),
    lengths=st.lists(st.integers(2, 20), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25)
def test_sharing_the_prefix_changes_neither_loss_nor_gradient(shared: int, lengths: list[int], seed: int) -> None:
    module = small_module()
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 256, shared)
    batch = []
    for length in lengths:
        ids = np.concatenate([prefix, rng.integers(0, 256, length)]).astype(np.int32)
        mask = rng.random(len(ids)) < 0.5
        mask[: max(shared, 1)] = False
        mask[-1] = True
        batch.append(Example(ids, mask))
    total = torch.zeros(())
    for example in batch:
        ids = torch.from_numpy(example.token_ids).long()
        logits = module(input_ids=ids[None]).logits[0, :-1]
        total = (
            total + F.cross_entropy(logits, ids[1:], reduction="none")[torch.from_numpy(example.loss_mask[1:])].sum()
        )
    expected = total / sum(int(example.loss_mask.sum()) for example in batch)
    wanted = torch.autograd.grad(expected, list(module.parameters()))
    loss = batch_loss(module, batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for gradient, reference in zip(torch.autograd.grad(loss, list(module.parameters())), wanted, strict=True):
        assert torch.allclose(gradient, reference, atol=1e-5)


def test_activation_checkpointing_does_not_lose_the_shared_prefix() -> None:
    """A learner that checkpoints may have been made before the cold start of its policy."""
    policy = small_policy()
    mask = np.array([False] * 8 + [True] * 2)
    batch = [Example(np.array([*range(8), 9 + last, 11], np.int32), mask) for last in range(3)]
    policy.module.train()
    plain = batch_loss(policy.module, batch).item()
    TreeGRPO(policy, gradient_checkpointing=True)
    assert batch_loss(policy.module, batch).item() == pytest.approx(plain, abs=1e-5)


def test_every_example_is_in_exactly_one_batch() -> None:
    examples = [Example(np.zeros(n, np.int32), np.ones(n, np.bool_)) for n in range(3, 40)]
    made = batches(examples, 5, np.random.default_rng(0))
    assert sorted(len(example) for batch in made for example in batch) == list(range(3, 40))
    assert max(map(len, made)) == 5


def test_training_teaches_the_answer() -> None:
    module = small_module()
    example = make_example(RENDERER, [Message("user", "Colour?"), Message("assistant", "teal")])
    before = batch_loss(module, [example]).item()
    losses: list[float] = []
    train(
        module,
        iter([[example]] * 60),
        num_steps=60,
        learning_rate=5e-3,
        warmup_steps=5,
        on_step=lambda _, x: losses.append(x),
    )
    assert before > 4.0
    assert batch_loss(module, [example]).item() < 0.3
    assert len(losses) == 60
    assert not module.training


def test_the_oracle_played_through_the_conversation_solves_every_family() -> None:
    for family in FAMILIES:
        instance = family.instance(3)
        task, oracle = instance.task, instance.oracle
        steps = [(step.tool, step.arguments) for step in oracle]
        messages = play(task.instruction, {file.path: file.read() for file in task.files}, steps, "Done.")
        with tempfile.TemporaryDirectory() as folder:
            fill(folder, task)
            results = [run_tool(call.name, call.parsed_arguments(), folder) for m in messages for call in m.tool_calls]
            assert results == [message.content for message in messages if message.role == "tool"]
            assert grade(task, folder) == pytest.approx(1.0), family.name


def test_a_demonstration_is_the_conversation_that_mini_sends() -> None:
    messages = play("Write it.", {}, [("write", {"path": "a.txt", "content": "é\n"})], "Done.")
    sent = Conversation("Write it.")
    sent.add_reply("", messages[2].tool_calls)  # type: ignore[arg-type]
    sent.add_tool_results([(messages[2].tool_calls[0].id, "ok")])
    sent.add_reply("Done.")
    flat = [(m["role"], m["content"]) for m in sent.messages]
    assert flat == [(m.role, m.content) for m in messages]
    body = sent.request("tiny", 100)
    assert [tool["function"] for tool in body["tools"]] == tool_dicts(mini_tools())  # type: ignore[attr-defined]


def test_a_word_is_the_same_tokens_in_the_instruction_and_in_the_call() -> None:
    tokenizer = make_tokenizer(2048, FAMILIES)
    assert tokenizer.vocab_size == 2048
    text = 'Put "balo kemitu" into "redane/sopi.txt" and 4071.'
    call = json.dumps({"path": "redane/sopi.txt", "content": "balo kemitu\n4071"})

    def pieces(string: str) -> str:
        return "|".join(tokenizer.decode([index]) for index in tokenizer.encode(string))

    for part in ("|ba|lo|", "|ke|mi|tu|", "|re|da|ne|/|so|pi|.|", "|4|0|7|1"):
        assert part in pieces(text)
        assert part in pieces(call)
    assert "|\\n|" in pieces(call)
    odd = "日本 \x00 ünï\t    deep\r\n"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd


def test_flaws_come_as_often_as_stated_and_at_most_one_at_a_time() -> None:
    rng = random.Random(0)
    oracle = next(f for f in FAMILIES if f.name == "two_files").instance(0).oracle
    seen: Counter[str] = Counter()
    for _ in range(2000):
        steps = spoil(oracle, Flaws(wrong_word=0.2, wrong_file=0.1, left_out=0.3), rng)
        if len(steps) < len(oracle):
            seen["left out"] += 1
            continue
        changed = [
            key
            for a, b in zip(oracle, steps, strict=True)
            for key in a.arguments
            if a.arguments[key] != b.arguments[key]
        ]
        assert len(changed) <= 1
        seen[changed[0] if changed else "clean"] += 1
    assert seen["left out"] / 2000 == pytest.approx(0.3, abs=0.04)
    assert seen["content"] / 2000 == pytest.approx(0.2, abs=0.04)
    assert seen["path"] / 2000 == pytest.approx(0.1, abs=0.03)


def test_copying_works_before_any_training() -> None:
    torch.manual_seed(1)
    module = make_module(Recipe(), TOKENIZER)
    motif = torch.randint(0, 256, (4, 60))
    ids = torch.cat([motif, motif], dim=1)
    with torch.inference_mode():
        probabilities = module(input_ids=ids).logits.softmax(-1)[:, :-1].gather(2, ids[:, 1:, None])[..., 0]
    assert (probabilities[:, 60:] > 0.5).float().mean() > 0.6
    assert (probabilities[:, :59] > 0.5).float().mean() < 0.05


def test_copying_heads_need_their_shape() -> None:
    with pytest.raises(ValueError, match="Expected hidden size 128"):
        give_copying_heads(small_module())


def test_the_recipe_is_deterministic_and_starts_to_learn() -> None:
    recipe = Recipe(num_steps=4, batch_size=4)
    first, second = cold_start(recipe), cold_start(recipe)
    for a, b in zip(first.module.parameters(), second.module.parameters(), strict=True):
        assert torch.equal(a, b)
    assert first.tokenizer.encode("Write balo") == second.tokenizer.encode("Write balo")


async def play_policy(engine: TorchEngine, policy: Policy, task: Task, seed: int) -> tuple[float, int, int]:
    """Let the policy do a task through mini's conversation; return reward, well-formed replies and replies."""
    tools = mini_tools()
    ids = policy.renderer.render_ids(
        message_dicts(opening(task.instruction)), tools=tool_dicts(tools), add_generation_prompt=True
    )
    well_formed = replies = 0
    with tempfile.TemporaryDirectory() as folder:
        fill(folder, task)
        for turn in range(6):
            generation = await engine.generate(ids, SamplingParams(max_tokens=128, seed=1000 * seed + turn))
            reply = parse_reply(policy.renderer, generation.token_ids.tolist(), tools)
            replies += 1
            well_formed += generation.finish_reason == "stop" and not reply.malformed
            results = [
                Message("tool", run_tool(name, parse_arguments(text), folder), tool_call_id=f"c{i}")
                for i, (name, text) in enumerate(reply.tool_calls)
            ]
            if not results:
                break
            bridged = policy.renderer.bridge_to_next_turn(
                ids, generation.token_ids.tolist(), message_dicts(results), tools=tool_dicts(tools)
            )
            assert bridged is not None
            ids = bridged.token_ids
        return grade(task, folder), well_formed, replies


@pytest.fixture(scope="module")
def tiny() -> Policy:
    return load_policy("tiny", cache=cache_dir())


@pytest.mark.policy
def test_tiny_speaks_the_format_and_has_much_to_gain_on_held_out_tasks(tiny: Policy) -> None:
    async def main() -> list[tuple[float, int, int]]:
        engine = TorchEngine(tiny)
        tasks = [family.instance(i, split="heldout").task for family in FAMILIES for i in range(12)]
        try:
            return await asyncio.gather(*(play_policy(engine, tiny, task, i) for i, task in enumerate(tasks)))
        finally:
            await engine.close()

    outcomes = asyncio.run(main())
    reward = float(np.mean([outcome[0] for outcome in outcomes]))
    assert sum(outcome[1] for outcome in outcomes) / sum(outcome[2] for outcome in outcomes) >= 0.95
    assert 0.15 <= reward <= 0.55


@pytest.mark.policy
def test_tiny_answers_a_prompt_of_twelve_thousand_tokens(tiny: Policy) -> None:
    text = " ".join(f"line {i}" for i in range(4000))
    ids = tiny.renderer.render_ids(message_dicts([Message("user", text)]), add_generation_prompt=True)
    assert len(ids) > 12_000

    async def main() -> int:
        engine = TorchEngine(tiny)
        generation = await engine.generate(ids, SamplingParams(max_tokens=32, seed=0))
        await engine.close()
        return len(generation.token_ids)

    assert asyncio.run(main()) >= 1
