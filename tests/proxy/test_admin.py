from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from proxy_rig import GatedEngine, ask, eventually, run

from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.engine.scripted import ScriptedEngine
from clawgym_env.proxy.standalone import StandaloneProxy, standalone_proxy
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.prefix_tree import PrefixTree
from clawgym_env.trace.store import RolloutStore

TOKEN = "the-token"


@dataclass
class Rig:
    proxy: StandaloneProxy
    admin: httpx.AsyncClient
    model: httpx.AsyncClient

    async def open(self, **order: Any) -> dict[str, Any]:
        response = await self.admin.post("/rollouts", json=order)
        assert response.status_code == 201, response.text
        ticket: dict[str, Any] = response.json()
        return ticket

    async def say(self, ticket: dict[str, Any], *texts: str) -> str:
        """Say something in one conversation, the replies in between played back; return the last reply."""
        messages: list[dict[str, str]] = []
        reply = ""
        for text in texts:
            messages.append({"role": "user", "content": text})
            body = {**ask(), "messages": messages}
            answer = await self.model.post(f"{ticket['base_url']}/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            reply = answer.json()["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})
        return reply


@asynccontextmanager
async def standalone(engine: Engine | None = None, **options: Any) -> AsyncIterator[Rig]:
    engine = engine or ScriptedEngine(["one", "two", "three"])
    async with (
        standalone_proxy(engine, token=TOKEN, **options) as proxy,
        httpx.AsyncClient(base_url=proxy.admin_url, headers={"authorization": f"Bearer {TOKEN}"}) as admin,
        httpx.AsyncClient(timeout=20.0) as model,
    ):
        yield Rig(proxy, admin, model)


def test_an_outside_harness_is_answered_and_its_calls_are_a_tree() -> None:
    async def test() -> None:
        async with standalone() as rig:
            ticket = await rig.open()
            assert ticket["base_url"] == f"{rig.proxy.base_url}/r/{ticket['key']}"
            assert await rig.say(ticket, "a", "b") == "two"
            running = (await rig.admin.get(f"/rollouts/{ticket['id']}")).json()
            assert (running["running"], running["num_calls"], running["stop_reason"]) == (True, 2, None)
            assert PrefixTree.from_json(running["tree"])[1].lineage_parent == 0
            assert await rig.say(ticket, "a", "b", "c") == "three", "a snapshot does not end the rollout"
            ended = (await rig.admin.delete(f"/rollouts/{ticket['id']}")).json()
            tree = PrefixTree.from_json(ended["tree"])
            assert not ended["running"]
            assert len(tree) == ended["num_calls"] == 5
            assert ended["buckets"] == dict(tree.buckets())
            assert sum(ended["buckets"].values()) == ended["num_sampled_tokens"]
            assert ended["delivered_fraction"] == 1.0

    run(test)


def test_rollouts_are_listed_until_they_end_and_keep_apart() -> None:
    async def test() -> None:
        async with standalone() as rig:
            first, second = await rig.open(), await rig.open(harness="pi", seed=3)
            await rig.say(first, "a")
            listed = (await rig.admin.get("/rollouts")).json()["rollouts"]
            assert [(one["id"], one["num_calls"], one["harness"]) for one in listed] == [
                (first["id"], 1, None),
                (second["id"], 0, "pi"),
            ]
            assert (await rig.admin.delete(f"/rollouts/{first['id']}")).status_code == 200
            for method in ("GET", "DELETE"):
                assert (await rig.admin.request(method, f"/rollouts/{first['id']}")).status_code == 404
            assert [one["id"] for one in (await rig.admin.get("/rollouts")).json()["rollouts"]] == [second["id"]]
            dead = await rig.model.post(f"{first['base_url']}/v1/chat/completions", json=ask())
            assert dead.status_code == 404, "the key of an ended rollout is dead"

    run(test)


def test_an_order_overrides_the_servers_defaults_only_where_it_says_so() -> None:
    async def test() -> None:
        defaults = SamplingParams(max_tokens=3, temperature=0.5)
        async with standalone(sampling=defaults, limits=Limits(max_calls=7)) as rig:
            ticket = await rig.open(sampling={"temperature": 0.25}, limits={"max_total_tokens": 1})
            await rig.say(ticket, "a")
            tree = (await rig.admin.delete(f"/rollouts/{ticket['id']}")).json()["tree"]
            sampling = PrefixTree.from_json(tree)[0].sampling
            assert (sampling.temperature, sampling.max_tokens) == (0.25, 3)

    run(test)


def test_a_spent_budget_shows_and_the_call_is_held_until_the_rollout_ends() -> None:
    async def test() -> None:
        async with standalone() as rig:
            ticket = await rig.open(limits={"max_calls": 1})
            await rig.say(ticket, "a")
            held = asyncio.create_task(rig.model.post(f"{ticket['base_url']}/v1/chat/completions", json=ask("more")))
            while (await rig.admin.get(f"/rollouts/{ticket['id']}")).json()["stop_reason"] != "max_calls":
                pass
            assert not held.done()
            ended = (await rig.admin.delete(f"/rollouts/{ticket['id']}")).json()
            assert (ended["stop_reason"], ended["num_calls"]) == ("max_calls", 1)
            with pytest.raises(httpx.TransportError):
                await held

    run(test)


def test_nothing_is_told_without_the_token() -> None:
    async def test() -> None:
        async with standalone() as rig, httpx.AsyncClient(base_url=rig.proxy.admin_url) as stranger:
            ticket = await rig.open()
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": TOKEN}):
                for method, path in [
                    ("GET", "/rollouts"),
                    ("DELETE", f"/rollouts/{ticket['id']}"),
                    ("GET", "/nowhere"),
                ]:
                    refused = await stranger.request(method, path, headers=headers)
                    assert refused.status_code == 401
                    assert "admin token" in refused.json()["error"]
            assert (await rig.admin.get(f"/rollouts/{ticket['id']}")).status_code == 200

    run(test)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"{", "json"),
        (b'{"limit": {}}', "limit"),
        (b'{"limits": {"max_calls": 0}}', "limits.max_calls"),
        (b'{"sampling": {"temperature": "hot"}}', "sampling.temperature"),
        (b'{"harness": "pie"}', "'pi'"),
        (b'{"harness": "claude-code?colour=red"}', "colour"),
        (b'{"harness": "subprocess:Popen?args=true"}', "harness"),
        (b"\xff", "body"),
    ],
)
def test_a_wrong_order_is_a_400_that_names_the_field(body: bytes, word: str) -> None:
    async def test() -> None:
        async with standalone() as rig:
            refused = await rig.admin.post("/rollouts", content=body)
            assert refused.status_code == 400
            assert word in refused.json()["error"].lower()
            assert (await rig.admin.get("/rollouts")).json() == {"rollouts": []}

    run(test)


def test_each_listener_serves_its_own_side_only() -> None:
    async def test() -> None:
        async with standalone() as rig:
            ticket = await rig.open()
            headers = {"authorization": f"Bearer {TOKEN}"}
            for method, path in [("GET", "/rollouts"), ("POST", "/rollouts"), ("GET", f"/rollouts/{ticket['id']}")]:
                answer = await rig.model.request(method, rig.proxy.base_url + path, headers=headers)
                assert answer.status_code == 404
                assert ticket["key"] not in answer.text
            path = f"/r/{ticket['key']}/v1/chat/completions"
            assert (await rig.admin.post(path, json=ask())).json() == {"error": "Not Found"}
            assert (await rig.admin.put("/rollouts")).status_code == 405

    run(test)


def test_a_store_holds_every_call_at_once_and_the_rollout_when_it_ends(tmp_path: Path) -> None:
    async def test() -> None:
        with RolloutStore(tmp_path) as store:
            async with standalone(store=store) as rig:
                ended, left = await rig.open(harness="mini", seed=5), await rig.open()
                await rig.say(ended, "a", "b")
                await rig.say(left, "a")
                assert len(store.calls(ended["id"])) == 2
                final = (await rig.admin.delete(f"/rollouts/{ended['id']}")).json()
            rollout = store.load(ended["id"])
            assert (rollout.harness, rollout.seed, rollout.graded) == ("mini", 5, False)
            assert rollout.tree == PrefixTree.from_json(final["tree"])
            assert store.unfinished() == (left["id"],)

    run(test)


def test_leaving_closes_both_ports_and_gives_up_what_runs() -> None:
    async def test() -> None:
        engine = GatedEngine()
        async with standalone(engine) as rig:
            ticket = await rig.open()
            pending = asyncio.create_task(rig.model.post(f"{ticket['base_url']}/v1/chat/completions", json=ask()))
            await eventually(lambda: engine.started == 1)
            proxy = rig.proxy
        with pytest.raises(httpx.TransportError):
            await pending
        assert engine.cancelled == 1
        async with httpx.AsyncClient() as late:
            for url in (proxy.base_url, proxy.admin_url):
                with pytest.raises(httpx.ConnectError):
                    await late.get(url)

    run(test)
