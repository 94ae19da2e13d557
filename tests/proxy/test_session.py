"""What a call goes through: joining, budgets, sampling, failure, delivery, settling. Over a real socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from proxy_rig import CHAT, MESSAGES, GatedEngine, Rig, ask, eventually, run, running

from clawgym_env.engine.base import Generation, SamplingParams, TokenIds
from clawgym_env.engine.scripted import ScriptedEngine, ScriptedReply, tool_call
from clawgym_env.messages import ChatRequest
from clawgym_env.proxy import chat
from clawgym_env.proxy.session import UNKNOWN_FIELDS, SessionSettings, cut_at_stop
from clawgym_env.rollout import StopReason
from clawgym_env.tasks.task import Limits
from clawgym_env.testing import InProcessHarness
from clawgym_env.tokenizer import TextTokenizer
from clawgym_env.trace.calls import ModelCall


def content(answer: httpx.Response) -> Any:
    return answer.json()["choices"][0]["message"]["content"]


def test_an_identical_request_joins_the_call_in_flight() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            first = asyncio.create_task(rig.post(CHAT, ask()))
            await eventually(lambda: engine.started == 1)
            second = asyncio.create_task(rig.post(CHAT, ask(stream=False)))
            await eventually(lambda: len(rig.session.requests) == 2)
            engine.gate.set()
            answers = await asyncio.gather(first, second)
            assert [content(answer) for answer in answers] == ["hello", "hello"]
            assert answers[0].json()["id"] == answers[1].json()["id"]
            assert engine.started == 1
            assert len(await rig.session.settle()) == 1

    run(test)


class Stamped(InProcessHarness):
    """A harness that stamps some messages with the time."""

    def rewrite(self, request: ChatRequest) -> ChatRequest:
        messages = tuple(
            dataclasses.replace(message, content=re.sub(r"at \d\d:\d\d", "at 00:00", message.content))
            for message in request.messages
        )
        return dataclasses.replace(request, messages=messages)


def test_requests_that_differ_in_what_the_adapter_rewrites_are_one_and_are_counted() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine, adapter=Stamped()) as rig:
            first = asyncio.create_task(rig.post(CHAT, ask("at 12:01")))
            await eventually(lambda: engine.started == 1)
            second = asyncio.create_task(rig.post(CHAT, ask("at 12:02")))
            await eventually(lambda: len(rig.session.requests) == 2)
            engine.gate.set()
            answers = await asyncio.gather(first, second)
            assert answers[0].json()["id"] == answers[1].json()["id"]
            await rig.post(CHAT, ask("nothing to rewrite"))
            assert (rig.session.num_calls, rig.session.num_rewritten_calls) == (2, 1)

    run(test)


def test_after_full_delivery_the_same_request_is_a_new_sample_with_a_seed_of_its_own() -> None:
    async def test() -> None:
        engine = GatedEngine()
        engine.gate.set()
        async with running(engine, seed=7) as rig:
            answers = [await rig.post(CHAT, ask()) for _ in range(2)]
            assert answers[0].json()["id"] != answers[1].json()["id"]
            assert len({sampling.seed for sampling in engine.sampling}) == 2
            assert rig.session.num_calls == 2

    run(test)


def test_seeds_depend_on_the_rollouts_seed_only() -> None:
    async def seeds(seed: int) -> list[int | None]:
        engine = GatedEngine()
        engine.gate.set()
        async with running(engine, seed=seed) as rig:
            for _ in range(2):
                await rig.post(CHAT, ask())
        return [sampling.seed for sampling in engine.sampling]

    async def test() -> None:
        assert await seeds(1) == await seeds(1)
        assert set(await seeds(1)).isdisjoint(await seeds(2))

    run(test)


def test_a_hang_up_leaves_the_reply_for_the_retry() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            _, writer = await rig.send(CHAT, ask())
            await eventually(lambda: engine.started == 1)
            writer.close()
            await eventually(lambda: not any(call.waiters for call in rig.session._pending))
            engine.gate.set()
            await eventually(lambda: rig.session.num_calls == 1)
            assert content(await rig.post(CHAT, ask())) == "hello"
            assert engine.started == 1
            (call,) = (await rig.session.settle()).calls
            assert (call.state, call.timing.delivered_s is not None) == ("live", True)

    run(test)


def test_a_reply_nobody_came_back_for_is_undelivered() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            _, writer = await rig.send(CHAT, ask(stream=True))
            await eventually(lambda: engine.started == 1)
            writer.close()
            await eventually(lambda: not any(call.waiters for call in rig.session._pending))
            engine.gate.set()
            await eventually(lambda: rig.session.num_calls == 1)
            (call,) = (await rig.session.settle()).calls
            assert (call.state, call.timing.delivered_s) == ("undelivered", None)

    run(test)


def test_a_turn_is_given_up_after_the_grace_time() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine, settings=SessionSettings(retry_grace_s=0.01)) as rig:
            _, writer = await rig.send(CHAT, ask())
            await eventually(lambda: engine.started == 1)
            writer.close()
            await eventually(lambda: engine.cancelled == 1)
            engine.gate.set()
            assert content(await rig.post(CHAT, ask())) == "hello"
            assert engine.started == 2

    run(test)


def test_what_is_kept_of_requests_does_not_grow_with_what_an_agents_code_sends() -> None:
    async def test() -> None:
        async with running(limits=Limits(max_calls=1)) as rig:
            unknown = {f"field{i}": i for i in range(1000)}
            heavy = ask(temperature=0.5, tool_choice=["x" * 99] * 1000) | unknown
            await rig.post(CHAT, heavy)
            for i in range(3):  # the budget is spent: a held request leaves no more behind
                body = ask(f"again {i}") | {f"more{i}_{j}": j for j in range(1000)}
                with pytest.raises(httpx.ReadTimeout):
                    await rig.http.post(rig.url(CHAT), json=body, timeout=0.1)
            await eventually(lambda: len(rig.session.requests) == 4)
            assert rig.session.requests[0].client_sampling == {"temperature": 0.5}
            assert len(rig.session.unknown_fields) == UNKNOWN_FIELDS

    run(test)


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
def test_a_prompt_many_times_the_window_is_refused_uncounted(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["hello"], context_length=500)) as rig:
            monkeypatch.setattr(TextTokenizer, "encode_literal", lambda self, text: pytest.fail("It was tokenised."))
            answer = await rig.post(path, ask("x" * 40_000))
            assert (answer.status_code, rig.session.num_calls) == (400, 0)
            assert answer.json()["error"]["message"] == "prompt is too long: 10000 tokens > 500 maximum"
            assert rig.session.overflowed == (path == MESSAGES)

    run(test)


@pytest.mark.parametrize(
    "fields",
    [{"model": "m" * 1001}, {"messages": [{"role": "user"}] * 65}, {"stop": ["s"] * 257}],
    ids=["model", "messages", "stop"],
)
def test_a_request_of_a_size_no_harness_sends_is_refused(fields: dict[str, Any]) -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["hello"], context_length=64)) as rig:
            assert (await rig.post(CHAT, ask() | fields)).status_code == 400

    run(test)


def test_the_policys_sampling_wins_and_the_clients_is_logged() -> None:
    async def test() -> None:
        engine = GatedEngine()
        engine.gate.set()
        async with running(engine, sampling=SamplingParams(temperature=0.7, max_tokens=40)) as rig:
            await rig.post(CHAT, ask(temperature=0.0, top_p=0.1, max_tokens=99, verbosity="low"))
            assert (engine.sampling[0].temperature, engine.sampling[0].top_p) == (0.7, 1.0)
            assert rig.session.requests[0].client_sampling == {"temperature": 0.0, "top_p": 0.1}
            assert rig.session.unknown_fields == {"verbosity"}

    run(test)


@pytest.mark.parametrize(
    ("client", "policy", "window", "expected"),
    [(20, 40, 90, 20), (80, 40, 90, 40), (80, 60, 30, 30), (None, 60, 90, 60)],
)
def test_the_smallest_budget_holds(client: int | None, policy: int, window: int, expected: int) -> None:
    async def test() -> None:
        probe = ScriptedEngine(["x"])
        async with running(probe) as rig:
            prompt = (await rig.post(MESSAGES + "/count_tokens", ask())).json()["input_tokens"]
        engine = GatedEngine(["y" * 200], context_length=prompt + window)
        engine.gate.set()
        async with running(engine, sampling=SamplingParams(max_tokens=policy)) as rig:
            body = ask()
            body["max_tokens"] = client
            answer = await rig.post(CHAT, body)
            assert engine.sampling[0].max_tokens == expected
            assert answer.json()["usage"]["completion_tokens"] == expected
            assert answer.json()["choices"][0]["finish_reason"] == "length"
            assert rig.session.window_cut is (expected == window)

    run(test)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("bash", '{"command": "echo \\ud83d"}'),
        ("ba\\ud83dsh", "{}"),
        ("bash", '{"x": ' + "[" * 300 + "]" * 300 + "}"),
    ],
)
def test_whatever_json_the_policy_writes_is_delivered_and_recognised(
    path: str, stream: bool, name: str, arguments: str
) -> None:
    async def test() -> None:
        reply = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        engine = ScriptedEngine([reply, "done"], context_length=8192)
        async with running(engine, sampling=SamplingParams(max_tokens=4096)) as rig:
            answer = await rig.post(path, ask(stream=stream, max_tokens=4096))
            assert answer.status_code == 200
            call = json.loads(f'{{"name": "{name}", "arguments": {arguments}}}')
            told = call["name"].replace("\ud83d", "\ufffd")
            if path == CHAT:
                function = {"name": told, "arguments": json.dumps(call["arguments"])}
                echo: dict[str, Any] = {"role": "assistant", "tool_calls": [{"id": "", "function": function}]}
            else:
                block = {"type": "tool_use", "id": "", "name": told, "input": call["arguments"]}
                echo = {"role": "assistant", "content": [block]}
            body = ask()
            body["messages"] += [echo, {"role": "user", "content": "go on"}]
            data = json.dumps(body)  # halves of surrogate pairs as escapes, as JavaScript and Python write them
            assert (await rig.http.post(rig.url(path), content=data)).status_code == 200
            tree = await rig.session.settle(quiet_s=0.0)
            assert [(call.lineage_parent, call.drift_reason) for call in tree] == [(None, None), (0, None)]
            assert rig.session.engine_error is None

    run(test)


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_cannot_be_written_cuts_the_connection_and_is_ours(
    stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> bytes:
        raise TypeError("no such thing in JSON")

    monkeypatch.setattr(chat, "render_completion", broken)
    monkeypatch.setattr(chat, "stream_events", broken)

    async def test() -> None:
        async with running() as rig:
            with pytest.raises(httpx.TransportError):
                await rig.post(CHAT, ask(stream=stream))
            assert "no such thing in JSON" in str(rig.session.engine_error)
            assert rig.session.exhausted.result() is StopReason.ENGINE_ERROR

    run(test)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize("where", ["tools", "messages"])
def test_a_request_that_nests_too_deeply_is_the_clients_error(where: str) -> None:
    async def test() -> None:
        async with running() as rig:
            for depth in (600, 900, 960, 20_000):
                deep = '{"a":' * depth + "1" + "}" * depth
                tools = f'[{{"name": "t", "input_schema": {deep}}}]' if where == "tools" else "[]"
                block = f'[{{"type": "tool_use", "id": "1", "name": "t", "input": {deep}}}]'
                echo = f', {{"role": "assistant", "content": {block if where == "messages" else "[]"}}}'
                data = f'{{"messages": [{{"role": "user", "content": "hi"}}{echo}], "tools": {tools}}}'
                answer = await rig.http.post(rig.url(MESSAGES), content=data)
                assert answer.status_code in (200, 400)
                assert rig.session.engine_error is None
            assert answer.status_code == 400

    run(test)


@pytest.mark.parametrize(("budget", "starved"), [(1, True), (15, True), (16, False)])
def test_a_reply_under_a_tiny_client_budget_is_marked_as_starved(budget: int, starved: bool) -> None:
    async def test() -> None:
        async with running() as rig:
            await rig.post(CHAT, ask(max_tokens=budget))
            assert (await rig.session.settle())[0].starved is starved

    run(test)


def test_a_spent_call_budget_holds_the_next_call_and_tells_the_runner() -> None:
    async def test() -> None:
        async with running(limits=Limits(max_calls=2)) as rig:
            for text in ("one", "two"):
                assert (await rig.post(CHAT, ask(text))).status_code == 200
            assert not rig.session.exhausted.done()
            held = asyncio.create_task(rig.post(CHAT, ask("three")))
            assert await rig.session.exhausted is StopReason.MAX_CALLS
            assert not held.done()
            assert len(await rig.session.settle()) == 2
            with pytest.raises(httpx.TransportError):
                await held

    run(test)


def test_a_spent_token_budget_is_named() -> None:
    async def test() -> None:
        async with running(limits=Limits(max_total_tokens=6)) as rig:
            await rig.post(CHAT, ask("one"))
            assert rig.session.num_sampled_tokens == 6
            held = asyncio.create_task(rig.post(CHAT, ask("two")))
            assert await rig.session.exhausted is StopReason.TOKEN_BUDGET
            held.cancel()

    run(test)


def test_calls_in_flight_end_before_the_runner_hears_of_the_budget() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine, limits=Limits(max_calls=1)) as rig:
            first = asyncio.create_task(rig.post(CHAT, ask("one")))
            await eventually(lambda: engine.started == 1)
            held = asyncio.create_task(rig.post(CHAT, ask("two")))
            await eventually(lambda: len(rig.session.requests) == 2)
            assert not rig.session.exhausted.done()
            engine.gate.set()
            assert content(await first) == "hello"
            assert await rig.session.exhausted is StopReason.MAX_CALLS
            held.cancel()

    run(test)


def test_endless_overflow_ends_the_rollout() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["x"], context_length=16)) as rig:
            for _ in range(32):
                assert (await rig.post(CHAT, ask())).status_code == 400
            assert await rig.session.exhausted is StopReason.CONTEXT_LENGTH

    run(test)


class FailingEngine(ScriptedEngine):
    """Fails `failures` times, then answers."""

    def __init__(self, failures: int) -> None:
        super().__init__(lambda prompt, turn: self._next())
        self.failures = failures

    def _next(self) -> ScriptedReply:
        self.failures -= 1
        return ScriptedReply("hello", error="out of memory" if self.failures >= 0 else None)


def test_an_engine_failure_is_retried_once() -> None:
    async def test() -> None:
        async with running(FailingEngine(1)) as rig:
            assert content(await rig.post(CHAT, ask())) == "hello"
            assert rig.session.engine_error is None

    run(test)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_lasting_engine_failure_is_a_503_and_ends_the_rollout(path: str) -> None:
    async def test() -> None:
        async with running(FailingEngine(2)) as rig:
            answer = await rig.post(path, ask())
            assert answer.status_code == 503
            assert "out of memory" in answer.json()["error"]["message"]
            assert str(rig.session.engine_error) == "out of memory"
            assert await rig.session.exhausted is StopReason.ENGINE_ERROR

    run(test)


class LyingEngine(ScriptedEngine):
    """Returns one logprob too few."""

    async def generate(self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams) -> Generation:
        whole = await super().generate(prompt_token_ids, sampling)
        return Generation(whole.token_ids, whole.logprobs[1:], whole.finish_reason, whole.policy_versions)


def test_incomplete_sampling_evidence_is_refused() -> None:
    async def test() -> None:
        async with running(LyingEngine(["hello"])) as rig:
            assert (await rig.post(CHAT, ask())).status_code == 503
            assert "log-probability for every sampled id, got 6 ids and 5" in str(rig.session.engine_error)
            assert len(await rig.session.settle()) == 0

    run(test)


def test_a_client_stop_sequence_cuts_what_is_shown_not_what_is_recorded() -> None:
    async def test() -> None:
        async with running(ScriptedEngine(["thinking Observation: made up"])) as rig:
            answer = await rig.post(MESSAGES, ask(stop_sequences=["Nothing", "Observation:"]))
            assert answer.json()["content"] == [{"type": "text", "text": "thinking "}]
            assert (answer.json()["stop_reason"], answer.json()["stop_sequence"]) == ("stop_sequence", "Observation:")
            tree = await rig.session.settle()
            assert len(tree[0].token_ids) == len("thinking Observation: made up") + 1

    run(test)


def test_the_earliest_stop_sequence_counts() -> None:
    assert cut_at_stop("a b c", ("c", "b")) == ("a ", "b")
    assert cut_at_stop("a b c", ("x",)) == ("a b c", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_stored_before_its_reply_leaves(stream: bool) -> None:
    async def test() -> None:
        stored: list[ModelCall] = []
        storing = asyncio.Event()

        async def on_call(call: ModelCall) -> None:
            stored.append(call)
            await storing.wait()

        async with running(on_call=on_call) as rig:
            reader, _ = await rig.send(MESSAGES, ask(stream=stream))
            await eventually(lambda: len(stored) == 1)
            seen = await _read_for(reader, 0.1)
            assert b"hello" not in seen
            assert b"message_stop" not in seen
            storing.set()
            await reader.readuntil(b"message_stop" if stream else b"hello")

    run(test)


async def _read_for(reader: asyncio.StreamReader, seconds: float) -> bytes:
    """Return what arrives within some time."""
    data = b""
    try:
        async with asyncio.timeout(seconds):
            while True:
                data += await reader.read(4096)
    except TimeoutError:
        return data


def test_a_store_that_fails_ends_the_rollout() -> None:
    async def test() -> None:
        async def on_call(call: ModelCall) -> None:
            raise OSError("disk full")

        async with running(on_call=on_call) as rig:
            assert (await rig.post(CHAT, ask())).status_code == 503
            assert "rollout store did not take a call: OSError: disk full" in str(rig.session.engine_error)
            assert rig.session.exhausted.result() is StopReason.ENGINE_ERROR

    run(test)


def test_settle_waits_for_a_pending_call() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            answer = asyncio.create_task(rig.post(CHAT, ask()))
            await eventually(lambda: engine.started == 1)
            settled = asyncio.create_task(rig.session.settle(quiet_s=0.05))
            await asyncio.sleep(0.1)
            assert not settled.done()
            engine.gate.set()
            assert content(await answer) == "hello"
            assert len(await settled) == 1
            assert await rig.session.settle() is await settled

    run(test)


def test_settle_gives_up_what_never_ends() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            answer = asyncio.create_task(rig.post(CHAT, ask()))
            await eventually(lambda: engine.started == 1)
            assert len(await rig.session.settle(timeout_s=0.05)) == 0
            assert engine.cancelled == 1
            with pytest.raises(httpx.TransportError):
                await answer

    run(test)


def test_settle_does_not_wait_for_a_turn_whose_client_is_dead() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with running(engine) as rig:
            _, writer = await rig.send(CHAT, ask())
            await eventually(lambda: engine.started == 1)
            writer.close()
            assert len(await rig.session.settle(timeout_s=20.0)) == 0
            assert engine.cancelled == 1

    run(test)


def test_many_calls_at_once_are_each_answered_and_recorded() -> None:
    async def test() -> None:
        engine = ScriptedEngine(lambda prompt, turn: prompt[prompt.index("<") :].split("ID")[1])
        async with running(engine) as rig:
            big = "padding " * 1000  # large enough to be rendered on a worker thread
            answers = await asyncio.gather(*(rig.post(CHAT, ask(f"ID{i}ID {big}")) for i in range(32)))
            assert [content(answer) for answer in answers] == [str(i) for i in range(32)]
            assert len(await rig.session.settle()) == 32

    run(test)


def test_closing_the_server_ends_everything() -> None:
    async def test() -> None:
        engine = GatedEngine()
        rigs: list[Rig] = []
        async with running(engine) as rig:
            rigs.append(rig)
            answer = asyncio.create_task(rig.post(CHAT, ask(stream=True)))
            await eventually(lambda: engine.started == 1)
            await rig.server.close()
            with pytest.raises(httpx.TransportError):
                await answer
        assert rigs[0].session.closed.done()

    run(test)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_the_next_turns_prompt_begins_with_the_exact_ids_of_the_last_one(path: str) -> None:
    async def test() -> None:
        generated: list[list[int]] = []

        class Listening(ScriptedEngine):
            async def generate(
                self, prompt_token_ids: Sequence[int] | TokenIds, sampling: SamplingParams
            ) -> Generation:
                generation = await super().generate(prompt_token_ids, sampling)
                generated.append(generation.token_ids.tolist())
                return generation

        engine = Listening(["look\n" + tool_call("bash", command="ls"), "done"])
        async with running(engine) as rig:
            body = ask()
            first = (await rig.post(path, body)).json()
            if path == CHAT:
                message = first["choices"][0]["message"]
                body["messages"] += [
                    message,
                    {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a.txt"},
                ]
            else:
                result = {"type": "tool_result", "tool_use_id": first["content"][1]["id"], "content": "a.txt"}
                body["messages"] += [
                    {"role": "assistant", "content": first["content"]},
                    {"role": "user", "content": [result]},
                ]
            assert (await rig.post(path, body)).status_code == 200
            tree = await rig.session.settle()
            assert [call.token_ids.tolist() for call in tree.calls] == generated
            assert (tree[1].lineage_parent, tree[1].prefix_parent, tree[1].drift_reason) == (0, 0, None)
            assert tree[1].prefix_len == tree[0].history_len
            assert tree.history(0).tolist() == tree.prompt(1).tolist()[: tree[0].history_len]

    run(test)
