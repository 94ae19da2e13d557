"""A call that is held because the budget is spent, when everything ends around it."""

from __future__ import annotations

import asyncio
from typing import cast

from proxy_rig import CHAT, ask, eventually, run, running

from clawgym_env.proxy.listener import Listener, PeerProtocol
from clawgym_env.tasks.task import Limits


def test_cutting_a_connection_that_is_closed_already_is_no_error() -> None:
    """The rollout's end and the listener's come at the same time, and either may be first."""

    async def test() -> None:
        async with running(limits=Limits(max_calls=1)) as rig:
            await rig.post(CHAT, ask())
            before = rig.session.last_request_at
            reader, _ = await rig.send(CHAT, ask("more"))
            await eventually(lambda: rig.session.last_request_at != before)
            (listener,) = cast("set[Listener]", rig.server._listeners)
            peers = [cast(PeerProtocol, protocol) for protocol in listener._state.connections]
            for peer in peers:
                peer.transport.abort()
            await asyncio.sleep(0)
            for peer in peers:
                peer.reset()
            assert await reader.read() == b""

    run(test)
