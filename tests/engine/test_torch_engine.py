"""The embedded engine against full transformers forwards, on small random models of every supported shape."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.engine.torch_engine import TorchEngine
from clawgym_env.errors import ContextOverflow, EngineError
from clawgym_env.policy import Policy
from clawgym_env.rendering import ChatMLRenderer
from clawgym_env.tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
STOP = ChatMLRenderer(TOKENIZER).get_stop_token_ids()[0]
SHAPE = {
    "vocab_size": TOKENIZER.vocab_size,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 65536,
}
CONFIGS = {
    "llama-gqa": LlamaConfig(**SHAPE, num_key_value_heads=2, tie_word_embeddings=False),
    "llama-tied-yarn": LlamaConfig(
        **SHAPE,
        num_key_value_heads=4,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "rope_theta": 1e4,
        },
    ),
    "mistral": MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=None),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=1, head_dim=32),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_policy(name: str = "llama-gqa", *, context_length: int = 65536) -> Policy:
    torch.manual_seed(0)
    module: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))  # biases and norms that are not neutral
            else:
                parameter.mul_(4.0)  # spread the logits
        module.lm_head.weight[STOP] *= 0.01 if not CONFIGS[name].tie_word_embeddings else 1.0
    return Policy(module, TOKENIZER, ChatMLRenderer(TOKENIZER), name, None, context_length)


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, length).tolist()


def reference(policy: Policy, ids: list[int], generation: Generation, sampling: SamplingParams) -> np.ndarray[Any, Any]:
    full = torch.tensor([ids + generation.token_ids.tolist()])
    with torch.inference_mode():
        logits = policy.module(input_ids=full).logits[0, len(ids) - 1 : -1].float() / sampling.temperature
    return logits.log_softmax(-1).gather(1, full[0, len(ids) :, None])[:, 0].numpy()


def assert_exact(policy: Policy, ids: list[int], generation: Generation, sampling: SamplingParams) -> None:
    gap = np.abs(generation.logprobs - reference(policy, ids, generation, sampling)).max()
    assert gap <= 1e-4, f"{gap} nats"


def serve(policy: Policy, body: Callable[[TorchEngine], Awaitable[Any]], **options: int) -> Any:
    async def main() -> Any:
        engine = TorchEngine(policy, **options)
        try:
            return await asyncio.wait_for(body(engine), 50)
        finally:
            await engine.close()

    return asyncio.run(main())


def cached_tokens(engine: TorchEngine, ids: list[int]) -> int:
    return 32 * len(engine._prefix.match(np.array(ids, dtype=np.int32)))


def sampling(**values: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 24, "seed": 1, **values})


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probabilities_equal_a_full_forward_in_a_batch_of_mixed_lengths(name: str) -> None:
    policy = make_policy(name)
    requests = [
        (prompt(length, seed=length), sampling(seed=length, temperature=temperature, max_tokens=tokens))
        for length, temperature, tokens in [(1, 1.0, 40), (7, 0.7, 24), (33, 1.3, 9), (500, 1.0, 30), (700, 2.0, 24)]
    ]

    async def body(engine: TorchEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(ids, params) for ids, params in requests))

    for (ids, params), generation in zip(requests, serve(policy, body, prefill_chunk=64), strict=True):
        assert_exact(policy, ids, generation, params)
        assert len(generation.token_ids) == params.max_tokens or generation.token_ids[-1] == STOP


def test_a_group_and_its_next_turns_reuse_cached_prefixes_exactly() -> None:
    policy = make_policy("qwen3")
    shared = prompt(300)

    async def body(engine: TorchEngine) -> None:
        first = await asyncio.gather(*(engine.generate(shared, sampling(seed=seed)) for seed in range(8)))
        assert len({tuple(g.token_ids) for g in first}) == 8, "seeds must differ"
        cached_before = len(engine._prefix)
        assert cached_before >= 288
        for seed, generation in enumerate(first):
            ids = shared + generation.token_ids.tolist() + prompt(50, seed=seed)
            assert cached_tokens(engine, ids) >= 288
            assert_exact(policy, shared, generation, sampling())
            assert_exact(policy, ids, await engine.generate(ids, sampling()), sampling())

    serve(policy, body)


def test_siblings_wait_for_the_shared_prompt_to_be_read_once() -> None:
    policy = make_policy()
    read: list[int] = []
    shared = prompt(640)

    async def body(engine: TorchEngine) -> None:
        forward = engine._decoder.forward

        def counting(token_ids: Any, *rest: Any) -> torch.Tensor:
            read.append(len(token_ids))
            return forward(token_ids, *rest)

        engine._decoder.forward = counting  # type: ignore[method-assign]
        await asyncio.gather(*(engine.generate(shared, sampling(max_tokens=1)) for _ in range(6)))

    serve(policy, body, prefill_chunk=128)
    assert sum(read) < 640 + 6 * 32


@pytest.mark.parametrize("length", [128, 129, 130, 161])
def test_a_prompt_whose_last_chunk_is_one_token_is_shared_too(length: int) -> None:
    policy = make_policy()
    read: list[int] = []

    async def body(engine: TorchEngine) -> None:
        forward = engine._decoder.forward

        def counting(token_ids: Any, *rest: Any) -> torch.Tensor:
            read.append(len(token_ids))
            return forward(token_ids, *rest)

        engine._decoder.forward = counting  # type: ignore[method-assign]
        answers = await asyncio.gather(
            *(engine.generate(prompt(length), sampling(seed=seed, max_tokens=20)) for seed in range(6))
        )
        for answer in answers:
            assert_exact(policy, prompt(length), answer, sampling())

    serve(policy, body, prefill_chunk=128)
    assert sum(read) < length + 6 * (32 + 20)
    assert len(read) < 2 + 2 + 25, "siblings must run together"


def test_a_policy_has_one_open_engine() -> None:
    async def main() -> None:
        policy = make_policy()
        first = TorchEngine(policy)
        with pytest.raises(EngineError, match=r"engine=learner\.engine\(\)"):
            TorchEngine(policy)
        await first.generate(prompt(9), sampling(max_tokens=1))
        await first.close()
        second = TorchEngine(policy)
        await first.close()
        with pytest.raises(EngineError, match="got a second"):
            first.update_weights(lambda: None)
        assert policy.epoch == 0
        with pytest.raises(EngineError, match="got a second"):
            TorchEngine(policy)
        await second.close()
        assert first.update_weights(lambda: None) == 1

    asyncio.run(main())


def test_an_engine_that_was_dropped_or_died_does_not_hold_its_policy() -> None:
    policy = make_policy()
    TorchEngine(policy)  # never called, never closed
    dead = TorchEngine(policy)

    async def main() -> None:
        dead._decoder.forward = None  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineError, match="died"):
            await dead.generate(prompt(9), sampling())
        assert dead._thread is not None
        dead._thread.join()

    asyncio.run(main())
    TorchEngine(policy)


def test_a_version_that_is_set_back_revives_no_old_keys_and_values() -> None:
    policy = make_policy()
    ids = prompt(300)

    def apply() -> None:
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))

    async def body(engine: TorchEngine) -> None:
        running = asyncio.ensure_future(engine.generate(ids, sampling(max_tokens=2000)))
        await engine.generate(ids, sampling(max_tokens=4))
        await asyncio.to_thread(engine.update_weights, apply)
        policy.version = 0  # as a learner does that resumes
        await running
        assert_exact(policy, ids, await engine.generate(ids, sampling()), sampling())
        apply()
        policy.epoch += 1  # weights moved by somebody else
        assert_exact(policy, ids, await engine.generate(ids, sampling()), sampling())

    serve(policy, body)


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        alone = await engine.generate(prompt(40), sampling(seed=7))
        crowd = await asyncio.gather(
            engine.generate(prompt(40), sampling(seed=7)),
            *(engine.generate(prompt(20 + i, seed=i), sampling(seed=i)) for i in range(12)),
        )
        assert alone.token_ids.tolist() == crowd[0].token_ids.tolist()

    serve(policy, body)


def test_tokens_follow_the_softmax() -> None:
    policy = make_policy()
    ids = prompt(5)

    async def body(engine: TorchEngine) -> list[int]:
        drawn = await asyncio.gather(
            *(engine.generate(ids, sampling(seed=seed, max_tokens=1, temperature=0.2)) for seed in range(600))
        )
        return [int(g.token_ids[0]) for g in drawn]

    drawn = serve(policy, body)
    with torch.inference_mode():
        probabilities = (policy.module(input_ids=torch.tensor([ids])).logits[0, -1] / 0.2).softmax(-1)
    best = int(probabilities.argmax())
    expected = float(probabilities[best])
    assert 0.05 < expected < 0.95
    assert abs(drawn.count(best) / 600 - expected) < 5 * (expected * (1 - expected) / 600) ** 0.5


def test_top_k_and_top_p_renormalise() -> None:
    policy = make_policy()
    ids = prompt(30)
    with torch.inference_mode():
        probabilities = policy.module(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
    values, order = probabilities.sort(descending=True)

    async def body(engine: TorchEngine) -> None:
        for seed in range(20):
            one = await engine.generate(ids, sampling(seed=seed, max_tokens=1, top_k=3))
            rank = order.tolist().index(int(one.token_ids[0]))
            assert rank < 3
            assert one.logprobs[0] == pytest.approx(float((values[rank] / values[:3].sum()).log()), abs=1e-4)
            two = await engine.generate(ids, sampling(seed=seed, max_tokens=1, top_p=float(values[0]) / 2))
            assert (int(two.token_ids[0]), float(two.logprobs[0])) == (int(order[0]), pytest.approx(0.0, abs=1e-6))

    serve(policy, body)


def test_temperature_zero_is_greedy() -> None:
    policy = make_policy()
    ids = prompt(20)

    async def body(engine: TorchEngine) -> Generation:
        return await engine.generate(ids, sampling(temperature=0.0, max_tokens=6))

    generation = serve(policy, body)
    with torch.inference_mode():
        full = policy.module(input_ids=torch.tensor([ids + generation.token_ids.tolist()])).logits[0]
    assert full[len(ids) - 1 : -1].argmax(-1).tolist() == generation.token_ids.tolist()
    assert not generation.logprobs.any()


def test_generation_ends_at_the_first_stop_id_which_is_included() -> None:
    policy = make_policy()
    with torch.no_grad():
        policy.module.lm_head.weight.zero_()
        policy.module.lm_head.weight[STOP] = 0.0

    async def body(engine: TorchEngine) -> Generation:
        # Uniform logits: a stop id comes up soon.
        return await engine.generate(prompt(3), sampling(max_tokens=20_000))

    generation = serve(policy, body)
    stops = set(policy.renderer.get_stop_token_ids())
    assert generation.finish_reason == "stop"
    assert [i for i, token in enumerate(generation.token_ids) if int(token) in stops] == [len(generation.token_ids) - 1]


def test_a_reply_ends_at_the_window_and_a_prompt_that_fills_it_is_refused() -> None:
    policy = make_policy(context_length=50)

    async def body(engine: TorchEngine) -> None:
        generation = await engine.generate(prompt(45), sampling())
        assert len(generation.token_ids) <= 5
        with pytest.raises(ContextOverflow, match="fewer than 50 tokens, got 50"):
            await engine.generate(prompt(50), sampling())

    serve(policy, body)


def test_a_weight_update_changes_running_sequences_and_forgets_prefixes() -> None:
    policy = make_policy()
    ids = prompt(200)

    async def body(engine: TorchEngine) -> None:
        running = asyncio.ensure_future(engine.generate(ids, sampling(max_tokens=3000)))
        short = await engine.generate(ids, sampling(max_tokens=4))
        assert short.policy_versions[0].version == 0

        def apply() -> None:
            with torch.no_grad():
                for parameter in policy.module.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))

        assert await asyncio.to_thread(engine.update_weights, apply) == 1
        assert engine.policy_version == policy.version == 1
        assert len(engine._prefix) == 0
        after = await engine.generate(ids, sampling())
        assert_exact(policy, ids, after, sampling())
        assert [span.version for span in after.policy_versions] == [1]
        mixed = await running
        spans = mixed.policy_versions
        assert [span.version for span in spans] == [0, 1]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, len(mixed.token_ids))
        assert cached_tokens(engine, ids + mixed.token_ids.tolist()) < 250, (
            "keys and values of mixed weights must not be cached"
        )

    serve(policy, body)


def test_a_failed_update_is_raised_and_still_counts() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        def apply() -> None:
            raise RuntimeError("out of luck")

        with pytest.raises(RuntimeError, match="out of luck"):
            engine.update_weights(apply)
        assert engine.policy_version == 1
        assert len((await engine.generate(prompt(9), sampling())).token_ids)

    serve(policy, body)


def test_cancelling_frees_the_sequence() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        doomed = asyncio.ensure_future(engine.generate(prompt(10), sampling(max_tokens=60_000)))
        await engine.generate(prompt(11), sampling())
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await engine.generate(prompt(12), sampling())  # a step or more later
        assert not engine._running
        assert not engine._kv._shared

    serve(policy, body)


def test_a_paused_engine_decodes_nothing_until_resumed() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        await engine.pause()
        task = asyncio.ensure_future(engine.generate(prompt(10), sampling()))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert not engine._running
        await engine.resume()
        assert len((await task).token_ids)

    serve(policy, body)


def test_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    policy = make_policy()
    order: list[str] = []

    async def body(engine: TorchEngine) -> None:
        async def ask(name: str, length: int) -> Generation:
            generation = await engine.generate(prompt(length, seed=length), sampling(max_tokens=3))
            order.append(name)
            return generation

        long, _ = await asyncio.gather(ask("long", 12_000), ask("short", 20))
        assert_exact(policy, prompt(12_000, seed=12_000), long, sampling())

    serve(policy, body, prefill_chunk=256)
    assert order == ["short", "long"]


def test_more_requests_than_rows_are_all_answered() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(prompt(9, seed=i), sampling(seed=i)) for i in range(20)))

    assert len(serve(policy, body, max_batch=3, kv_cache_bytes=1)) == 20


def test_the_prefix_cache_stays_within_its_budget() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        for seed in range(6):
            await engine.generate(prompt(200, seed=seed), sampling(max_tokens=1))
            assert len(engine._prefix) <= 512
        assert cached_tokens(engine, prompt(200, seed=5)) == 192
        assert cached_tokens(engine, prompt(200, seed=0)) == 0

    serve(policy, body, prefix_cache_bytes=512 * 2 * 3 * 2 * 16 * 4)


@pytest.mark.parametrize("ids", [[], [5, 100_000], [-1]])
def test_a_prompt_that_cannot_be_read_is_refused_and_harms_nobody(ids: list[int]) -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        with pytest.raises(EngineError, match="Expected"):
            await engine.generate(ids, sampling())
        assert len((await engine.generate(prompt(9), sampling())).token_ids)

    serve(policy, body)


def test_a_dead_engine_fails_every_waiter_and_every_later_call() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        def explode(*_: Any) -> torch.Tensor:
            raise MemoryError("no rows left")

        engine._decoder.forward = explode  # type: ignore[method-assign]
        outcomes = await asyncio.gather(
            *(engine.generate(prompt(9), sampling()) for _ in range(4)), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [EngineError] * 4
        with pytest.raises(EngineError, match="no rows left"):
            await engine.generate(prompt(9), sampling())

    serve(policy, body)


def test_weights_that_are_not_finite_fail_the_call_not_the_engine() -> None:
    policy = make_policy()

    async def body(engine: TorchEngine) -> None:
        kept = policy.module.lm_head.weight.detach().clone()
        with torch.no_grad():
            policy.module.lm_head.weight.fill_(torch.nan)
        for temperature in (0.0, 1.0):
            with pytest.raises(EngineError, match="diverged"):
                await engine.generate(prompt(9), sampling(temperature=temperature))
        with torch.no_grad():
            policy.module.lm_head.weight.copy_(kept)
        assert len((await engine.generate(prompt(9), sampling())).token_ids)

    serve(policy, body)


def test_closing_answers_those_who_wait_and_is_idempotent() -> None:
    async def main() -> None:
        engine = TorchEngine(make_policy())
        assert isinstance(engine, Engine)
        task = asyncio.ensure_future(engine.generate(prompt(10), sampling(max_tokens=60_000)))
        await asyncio.sleep(0.05)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await task
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(prompt(10), sampling())

    asyncio.run(main())


def test_an_architecture_of_another_shape_is_refused_by_name() -> None:
    torch.manual_seed(0)
    config = GemmaConfig(**SHAPE, num_key_value_heads=4, head_dim=16)
    policy = Policy(AutoModelForCausalLM.from_config(config), TOKENIZER, ChatMLRenderer(TOKENIZER), "gemma", None, 1000)
    with pytest.raises(EngineError, match="llama, mistral, qwen2, qwen3, got 'gemma'"):
        TorchEngine(policy)


def test_long_sequences_that_outgrow_their_rows_stay_exact() -> None:
    policy = make_policy()
    ids = [prompt(length, seed=length) for length in (505, 4090, 4095, 5000)]

    async def body(engine: TorchEngine) -> list[Generation]:
        return await asyncio.gather(*(engine.generate(i, sampling(max_tokens=20)) for i in ids))

    for one, generation in zip(ids, serve(policy, body), strict=True):
        assert_exact(policy, one, generation, sampling())
