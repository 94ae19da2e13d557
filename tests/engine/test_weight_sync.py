"""A policy under training at vLLM servers: what an update does, and that no wrong weights are ever sampled from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_vllm import Body, FakeVllm, reply, serving
from fake_weights import Weights, fake_server, make_policy, moved
from model_families import FAMILIES, write_folder

from clawgym_env import registry
from clawgym_env.engine.base import Generation, SamplingParams
from clawgym_env.engine.vllm import VllmEngine, VllmSettings
from clawgym_env.engine.vllm.errors import ForeignWeights, WeightSyncError
from clawgym_env.engine.weight_sync import FileSync
from clawgym_env.errors import EngineError
from clawgym_env.policy import Policy

PROMPT = list(range(5, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("served") / "policy", FAMILIES["qwen3"])


@pytest.fixture
def policy(folder: Path) -> Policy:
    return make_policy(folder)


@pytest.fixture
def at(policy: Policy, folder: Path) -> Iterator[tuple[FakeVllm, Weights]]:
    """A server that was started from other weights than the policy's."""
    server, weights = fake_server(make_policy(folder, seed=1), folder)
    with serving(server):
        yield server, weights


def bound(server: FakeVllm, policy: Policy, **settings: object) -> VllmEngine:
    chosen = VllmSettings(reconnect_s=0.2, **settings)  # type: ignore[arg-type]
    return VllmEngine.connect(server.url, cache=Path("nowhere"), policy=policy, settings=chosen)


def ask(engine: VllmEngine, prompt: list[int] = PROMPT, max_tokens: int = 6) -> Generation:
    return asyncio.run(engine.generate(prompt, SamplingParams(max_tokens=max_tokens, seed=1)))


def gap(generation: Generation, policy: Policy, prompt: list[int] = PROMPT) -> float:
    """Return the largest difference to the policy's own log-probabilities, in nats."""
    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *generation.token_ids.tolist()]])
        logits = policy.module(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(-1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return float(np.abs(generation.logprobs - expected).max())


def test_the_policys_weights_are_in_the_server_from_the_start(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    engine = bound(at[0], policy)
    assert gap(ask(engine), policy) < 1e-4
    assert (engine.policy_version, policy.version) == (0, 0)


def test_an_update_is_sampled_from_and_dated(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy)
    before = ask(engine)
    server.controls.clear()
    assert engine.update_weights(lambda: moved(policy)) == 1
    after = ask(engine)
    assert gap(before, policy) > 1e-2
    assert gap(after, policy) < 1e-4
    assert [(span.version, span.start, span.end) for span in before.policy_versions] == [(0, 0, 6)]
    assert [(span.version, span.start, span.end) for span in after.policy_versions] == [(1, 0, 6)]
    assert server.controls == [
        "/pause?mode=keep&clear_cache=true",
        "/update_weight_version",
        "/collective_rpc",
        "/update_weight_version",
        "/resume",
    ]


def test_adapters_are_merged_into_what_the_server_gets(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    from learners.grpo import TreeGRPO

    learner = TreeGRPO(policy, lora=4, engine=bound(at[0], policy))
    engine = learner.engine()
    assert isinstance(engine, VllmEngine)
    frozen = {name: value.clone() for name, value in policy.module.named_parameters() if "lora" not in name}

    def train_adapters() -> None:
        with torch.no_grad():
            for name, parameter in policy.module.named_parameters():
                if "lora" in name:
                    parameter.add_(torch.randn_like(parameter), alpha=0.3)

    engine.update_weights(train_adapters)
    assert gap(ask(engine), policy) < 1e-4
    assert all(torch.equal(value, dict(policy.module.named_parameters())[name]) for name, value in frozen.items())


def test_a_learner_that_goes_on_sets_the_version_and_tokens_are_dated_by_it(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    engine = bound(at[0], policy)
    engine.update_weights(lambda: moved(policy))
    policy.version = 7  # as `load_state_dict` does, after its update
    assert [span.version for span in ask(engine).policy_versions] == [7]
    engine.update_weights(lambda: moved(policy))
    assert [span.version for span in ask(engine).policy_versions] == [8]


# The four traps.


@pytest.mark.parametrize("trap", ["clears", "salts"])
def test_a_stale_prefix_is_never_reused_while_one_of_two_guards_works(
    at: tuple[FakeVllm, Weights], policy: Policy, trap: str
) -> None:
    server, weights = at
    setattr(weights, trap, False)
    engine = bound(server, policy)
    ask(engine)
    engine.update_weights(lambda: moved(policy))
    assert gap(ask(engine), policy) < 1e-4


def test_a_stale_prefix_that_slips_through_is_seen_by_the_comparison(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    server, weights = at
    engine = bound(server, policy)
    weights.clears = weights.salts = False
    engine.update_weights(lambda: None)  # its comparison fills the cache
    with pytest.raises(WeightSyncError, match=r"within 0\.001 nats"):
        engine.update_weights(lambda: moved(policy))


def test_weights_that_went_in_half_stop_the_run_until_a_reload_succeeds(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    server, weights = at
    engine = bound(server, policy)
    weights.breaks_after = 3
    with pytest.raises(WeightSyncError, match="reload") as failure:
        engine.update_weights(lambda: moved(policy))
    assert "collective_rpc" in str(failure.value)
    num_asked = len(server.asked)
    with pytest.raises(EngineError, match="trainer's weights"):
        ask(engine)
    assert len(server.asked) == num_asked
    assert not server.running.is_set(), "nobody else samples from it either"
    weights.breaks_after = None
    engine.reload()
    generation = ask(engine)
    assert gap(generation, policy) < 1e-4
    assert [span.version for span in generation.policy_versions] == [1]


@pytest.mark.parametrize("route", ["/pause", "/collective_rpc", "/update_weight_version", "/resume"])
def test_a_step_that_fails_stops_the_run_with_the_cause(
    at: tuple[FakeVllm, Weights], policy: Policy, route: str
) -> None:
    server, _ = at
    engine = bound(server, policy)
    server.refuses = {route}
    with pytest.raises(WeightSyncError, match=route):
        engine.update_weights(lambda: moved(policy))
    with pytest.raises(EngineError, match=route):
        ask(engine)


def test_weights_that_were_not_loaded_are_seen_by_the_comparison(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy)
    server.reload = lambda folder: None
    with pytest.raises(WeightSyncError, match="off by"):
        engine.update_weights(lambda: moved(policy))


def test_an_optimizer_that_fails_half_way_leaves_nothing_to_sample(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    engine = bound(at[0], policy)

    def half() -> None:
        moved(policy)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.update_weights(half)
    with pytest.raises(EngineError, match="half-way"):
        ask(engine)
    engine.reload()
    assert gap(ask(engine), policy) < 1e-4


def test_a_reply_across_an_update_keeps_the_version_of_each_token(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy)
    whole = server.answer
    old = server.weights

    def across(body: Body) -> Body | int:
        answer = whole(body)
        assert isinstance(answer, dict)
        if body["token_ids"] == PROMPT:
            spans = [(old, 0, 2), (server.weights, 2, 6)]
            answer["choices"][0]["weight_versions"] = reply([], spans=spans)["choices"][0]["weight_versions"]
        return answer

    server.answer = across
    engine.update_weights(lambda: moved(policy))
    spans = ask(engine).policy_versions
    assert [(span.version, span.start, span.end) for span in spans] == [(0, 0, 2), (1, 2, 6)]


def test_a_reload_names_the_weights_since_the_server_does_not(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy)
    first = server.weights
    engine.update_weights(lambda: moved(policy))
    assert first != server.weights != "default"


def test_half_loaded_weights_have_no_name_that_is_trusted(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, weights = at
    engine = bound(server, policy)
    before = server.weights
    weights.breaks_after = 3
    with pytest.raises(WeightSyncError):
        engine.update_weights(lambda: moved(policy))
    assert server.weights != before, "else a sequence that somebody resumes would be dated by the weights before"
    with pytest.raises(ForeignWeights):
        engine._version_of(server.weights)


def test_a_failed_update_gives_up_the_calls_that_wait_for_their_turn_too(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    server, weights = at
    engine = bound(server, policy, max_concurrency=1)
    server.asked.clear()
    server.stalls = True

    async def run() -> list[Generation | BaseException]:
        calls = [asyncio.ensure_future(engine.generate(PROMPT, SamplingParams())) for _ in range(3)]
        await asyncio.to_thread(server.begun.wait, 30)
        weights.breaks_after = 3
        with pytest.raises(WeightSyncError):
            await asyncio.to_thread(engine.update_weights, lambda: moved(policy))
        answers = await asyncio.gather(*calls, return_exceptions=True)
        await engine.close()
        return answers

    answers = asyncio.run(run())
    assert all(isinstance(answer, EngineError) for answer in answers), answers
    assert len(server.asked) == 1, "the others would hang at a server that stays paused"


def test_a_server_that_comes_back_is_compared_whatever_it_calls_its_weights(
    at: tuple[FakeVllm, Weights], policy: Policy, folder: Path
) -> None:
    server, weights = at
    engine = bound(server, policy)
    weights.module.load_state_dict(make_policy(folder, seed=3).module.state_dict())
    weights.clear()
    engine._replicas[0].lost = True
    with pytest.raises(EngineError, match="off by"):
        ask(engine)


# Others at the same server, and around the update.


def test_a_server_that_somebody_else_updates_is_given_the_weights_again(
    at: tuple[FakeVllm, Weights], policy: Policy, folder: Path
) -> None:
    server, weights = at
    engine = bound(server, policy)
    weights.module.load_state_dict(make_policy(folder, seed=3).module.state_dict())
    server.weights = "somebody's"
    assert gap(ask(engine), policy) < 1e-4
    assert server.weights != "somebody's"


def test_a_server_that_never_holds_our_weights_is_an_error(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy)
    server.answer = lambda body: reply([7], finish="length")
    with pytest.raises(EngineError) as failure:
        ask(engine)
    assert "default" in str(failure.value)
    assert isinstance(failure.value.__cause__, ForeignWeights)


def test_what_is_sampled_during_an_update_waits_for_the_comparison(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    server, weights = at
    engine = bound(server, policy)
    arrived, compared = threading.Event(), threading.Event()
    whole = server.answer

    def slow(body: Body) -> Body | int:
        if body["token_ids"] == PROMPT:
            arrived.set()
            server.running.wait(30)
            compared.wait(30)
        return whole(body)

    server.answer = slow

    async def run() -> Generation:
        task = asyncio.create_task(engine.generate(PROMPT, SamplingParams(max_tokens=6)))
        await asyncio.to_thread(arrived.wait, 30)

        def step() -> None:
            weights.breaks_after = 3  # the load fails
            moved(policy)

        with pytest.raises(WeightSyncError):
            await asyncio.to_thread(engine.update_weights, step)
        compared.set()
        return await task

    with pytest.raises(EngineError, match="trainer's weights"):
        asyncio.run(run())


def test_a_paused_engine_stays_paused_through_an_update(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy)

    async def run() -> None:
        await engine.pause()
        await asyncio.to_thread(engine.update_weights, lambda: moved(policy))
        assert not server.running.is_set()
        await engine.resume()
        assert server.running.is_set()

    asyncio.run(run())


def test_on_one_gpu_the_server_sleeps_while_the_trainer_works(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    server, _ = at
    engine = bound(server, policy, sleep=True)
    server.controls.clear()
    engine.update_weights(lambda: server.controls.append("step"))
    assert server.controls == [
        "/sleep?level=1&mode=keep",
        "step",
        "/wake_up?tags=weights",
        "/update_weight_version",
        "/collective_rpc",
        "/update_weight_version",
        "/wake_up?tags=kv_cache",
        "/resume",
    ]
    engine.sleep()
    server.controls.clear()
    assert gap(ask(engine), policy) < 1e-4
    assert server.controls == ["/wake_up"]


def test_a_server_that_clawgym_did_not_start_is_updated_too(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    at[0].extended = False
    engine = bound(at[0], policy)
    engine.update_weights(lambda: moved(policy))
    assert gap(ask(engine), policy) < 1e-4


def test_a_policy_has_one_engine_at_a_time(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    engine = bound(at[0], policy)
    with pytest.raises(EngineError, match="one open engine"):
        bound(at[0], policy)
    asyncio.run(engine.close())
    asyncio.run(bound(at[0], policy).close())


def test_a_server_without_the_routes_of_updates_is_refused_with_the_flag(
    at: tuple[FakeVllm, Weights], policy: Policy
) -> None:
    at[0].dev_mode = False
    with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE"):
        bound(at[0], policy)


def test_a_wider_tolerance_can_be_said(at: tuple[FakeVllm, Weights], policy: Policy) -> None:
    at[0].reload = lambda folder: None
    with pytest.raises(WeightSyncError, match="tolerance"):
        bound(at[0], policy)
    engine = registry.engine(f"vllm:{at[0].url}?tolerance=1000", policy=policy)
    asyncio.run(engine.close())


def test_files_are_where_they_were_asked_for_and_go_with_the_engine(
    at: tuple[FakeVllm, Weights], policy: Policy, tmp_path: Path
) -> None:
    engine = bound(at[0], policy, weights=tmp_path)
    engine.update_weights(lambda: moved(policy))
    assert len(list(tmp_path.iterdir())) == 1, "those before are gone"
    asyncio.run(engine.close())
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_stops_the_run(at: tuple[FakeVllm, Weights], policy: Policy, tmp_path: Path) -> None:
    class Full(FileSync):
        def publish(self, policy: Policy) -> None:
            raise OSError("No space left on device")

    sync = FileSync(tmp_path)
    engine = VllmEngine.connect(at[0].url, cache=Path("nowhere"), policy=policy, sync=sync)
    sync.__class__ = Full
    with pytest.raises(WeightSyncError, match="No space left"):
        engine.update_weights(lambda: moved(policy))
