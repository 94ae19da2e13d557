"""What keeps calls away from servers whose weights are changing or are not known to be right.

A learner's thread closes and opens it; calls of rollouts wait at it on their event loops. Invariant: nobody passes
between `close` and `open`, and after `fail` everybody gets the error until it is closed and opened again.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

from clawgym_env.errors import EngineError


class Gate:
    """Open at first."""

    def __init__(self) -> None:
        self._verdict: Future[None] = Future()
        self._verdict.set_result(None)

    def close(self) -> None:
        """Let nobody pass; those who come wait."""
        if self._verdict.done():
            self._verdict = Future()

    def open(self) -> None:
        """Let everybody pass."""
        self._verdict.set_result(None)

    def fail(self, error: EngineError) -> None:
        """Send everybody away with an error, those who wait too."""
        self._verdict.set_exception(error)

    async def passed(self) -> None:
        """Wait until it is open.

        Raises:
            EngineError: it failed.
        """
        verdict = self._verdict
        if not verdict.done():
            # Shielded: a call that is cancelled here must not cancel the verdict for the others.
            await asyncio.shield(asyncio.wrap_future(verdict))
        error = verdict.exception()
        if error is not None:
            raise EngineError(str(error)) from error
