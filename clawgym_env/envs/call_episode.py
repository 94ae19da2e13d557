"""One rollout whose model calls are answered from outside, as a walk from call to call.

`CallEnv` steps it; between two steps the harness waits for its reply, while its clock runs. Used on the background
loop. Invariant: either a call is `asked`, or the episode is over and its `rollout` is there; interrupted or ended
early, it has closed its sandbox before it says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Coroutine
from typing import Any

from clawgym_env.engine.base import Engine, Generation, SamplingParams
from clawgym_env.engine.caller import AskedCall, CallerEngine
from clawgym_env.errors import ClawGymError
from clawgym_env.rollout import Rollout


class CallEpisode:
    """Made by `begin`."""

    def __init__(self, engine: CallerEngine, running: asyncio.Task[list[Rollout]]) -> None:
        self.asked: AskedCall | None = None
        """The call that waits for its reply."""
        self.rollout: Rollout | None = None
        """Set at the end."""
        self._engine = engine
        self._running = running

    @classmethod
    async def begin(cls, engine: CallerEngine, rollouts: Coroutine[Any, Any, list[Rollout]]) -> CallEpisode:
        """Start a rollout of `engine` and wait for its first call, or for its end where it makes none.

        Raises:
            HarnessNotInstalled, HarnessUnsuitable: nothing was started.
        """
        episode = cls(engine, asyncio.create_task(rollouts))
        await episode._advance()
        return episode

    async def answer(self, outcome: Generation | ClawGymError) -> None:
        """Settle the asked call and wait for the next one, or for the end.

        Of calls that wait at the same time the one that was asked first is next. An error is the engine's: the call is
        asked once more, and a second one ends the rollout.
        """
        if self.asked is not None:
            self.asked.settle(outcome)
            await self._advance()

    async def sample(self, engine: Engine, sampling: SamplingParams) -> Generation | ClawGymError:
        """Let an engine sample the reply to the asked call, and return that or its failure.

        Should the rollout end meanwhile the sequence is aborted, and the failure says so.

        Args:
            sampling: how it samples; seed and budget are the call's.
        """
        over = ClawGymError("The rollout ended before the reply was there.")
        asked = self.asked
        if asked is None:
            return over
        budget = min(sampling.max_tokens, asked.sampling.max_tokens)
        sampling = sampling.model_copy(update={"max_tokens": budget, "seed": asked.sampling.seed})
        sampled = asyncio.get_running_loop().create_task(
            engine.generate(asked.prompt_token_ids, sampling), context=asked.context
        )
        try:
            await asyncio.wait({sampled, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not sampled.done():
                return over
            generation = sampled.result()
            # An engine that drew nothing, such as one that relays, has said so.
            return dataclasses.replace(generation, sampling=generation.sampling or sampling)
        except ClawGymError as error:
            return error
        finally:
            await _cancelled(sampled)

    async def outline(self) -> str:
        """Draw the tree so far and the call that waits."""
        if self.asked is None:
            return ""
        tree = self.asked.call.snapshot()
        return f"{tree.outline()}\n#{len(tree)} {self.asked.kind} waits".lstrip("\n")

    async def end(self) -> None:
        """Give the rollout up and wait until its sandbox is closed. Idempotent."""
        self.asked = None
        await _cancelled(self._running)

    async def _advance(self) -> None:
        asking = asyncio.create_task(self._engine.next_call())
        try:
            try:
                await asyncio.wait({asking, self._running}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                await _cancelled(asking)
        except asyncio.CancelledError:  # Ctrl-C in the middle of a step
            await self.end()
            raise
        self.asked = None
        if self._running.done():
            self.rollout = self._running.result()[0]
        else:
            self.asked = asking.result()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end, which nobody asks about any more."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
