"""The admin API of a standalone proxy: opens, shows and ends rollouts of harnesses that somebody else runs.

A Starlette app on a listener of its own, beside the one that harnesses call (`standalone` starts both). Invariants:
without the token nothing is told, not even which routes exist; the model-side listener never serves these routes nor
this one the model's; a rollout that was ended is forgotten here and lives on in the store, where there is one.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from clawgym_env import registry
from clawgym_env.engine.base import Engine, SamplingParams
from clawgym_env.errors import ClawGymError
from clawgym_env.harness import HarnessAdapter
from clawgym_env.proxy.app import ProxyServer
from clawgym_env.proxy.session import RolloutSession
from clawgym_env.rollout import Rollout, StopReason
from clawgym_env.runner import MODEL_NAME
from clawgym_env.tasks.task import Limits
from clawgym_env.trace.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from clawgym_env.trace.store import RolloutStore


class RolloutOrder(BaseModel):
    """Body of `POST /rollouts`; what is left out is the server's default."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    limits: Limits = Limits()
    """Calls and tokens are enforced here; wall clock and grading belong to whoever runs the harness."""
    sampling: SamplingParams = SamplingParams()
    harness: str | None = None
    """An adapter's name, options as in "openclaw?api=chat": it classifies the calls and takes nonces out."""
    seed: int = 0


class RolloutTicket(BaseModel):
    """Answer of `POST /rollouts`: where the harness finds its model."""

    id: str
    key: str
    """The model side's only credential; it is part of the URL."""
    base_url: str
    """`http://HOST:PORT/r/KEY`; OpenAI clients want `/v1` behind it."""
    model: str
    """A suggestion: every model name is answered by the same policy."""
    context_length: int
    """Tokens of prompt and reply together."""


class RolloutStatus(BaseModel):
    """How far a rollout is; an item of `GET /rollouts`."""

    id: str
    harness: str | None
    running: bool
    num_calls: int
    num_sampled_tokens: int
    stop_reason: StopReason | None
    """The budget that is spent (calls are held from then on) or `engine_error`; None while calls are answered."""
    error: str | None


class RolloutView(RolloutStatus):
    """Answer of `GET` and `DELETE /rollouts/<id>`."""

    buckets: Mapping[str, int]
    """Sampled tokens by what becomes of them under the default selection."""
    delivered_fraction: float
    tree: Mapping[str, JsonValue]
    """`PrefixTree.to_json`; provisional kinds and states while `running`."""


@dataclass(slots=True, eq=False)
class _Open:
    session: RolloutSession
    harness: str | None
    seed: int
    opened_at: float = field(default_factory=time.monotonic)


class AdminApi:
    """The rollouts of one standalone proxy. `app` is the ASGI application to serve."""

    def __init__(
        self,
        server: ProxyServer,
        engine: Engine,
        *,
        base_url: str,
        token: str,
        sampling: SamplingParams = SamplingParams(),
        limits: Limits = Limits(),
        store: RolloutStore | None = None,
    ) -> None:
        """Serve rollouts of `engine` on a started server.

        Args:
            base_url: of the model-side listener, without a path.
            token: what a client must show as `Authorization: Bearer TOKEN`.
            sampling, limits: of a rollout whose order says nothing else.
            store: gets every call before its reply leaves, and every ended rollout.
        """
        self._server = server
        self._engine = engine
        self._base_url = base_url
        self._sampling = sampling
        self._limits = limits
        self._store = store
        self._rollouts: dict[str, _Open] = {}
        routes = [
            Route("/rollouts", self._open, methods=["POST"]),
            Route("/rollouts", self._list, methods=["GET"]),
            Route("/rollouts/{id}", self._show, methods=["GET"]),
            Route("/rollouts/{id}", self._end, methods=["DELETE"]),
        ]
        handlers = {HTTPException: _http_error, ValidationError: _bad_order, ClawGymError: _refused, 500: _broken}
        self.app: ASGIApp = _TokenGate(Starlette(routes=routes, exception_handlers=handlers), token)

    async def _open(self, request: Request) -> Response:
        order = RolloutOrder.model_validate_json(await request.body() or b"{}")
        rollout_id = secrets.token_hex(6)
        on_call = None if self._store is None else functools.partial(self._store.add_call, rollout_id)
        session = self._server.open_session(
            self._engine,
            sampling=self._sampling.model_copy(update=_given(order.sampling)),
            limits=self._limits.model_copy(update=_given(order.limits)),
            adapter=_known_adapter(order.harness),
            seed=order.seed,
            on_call=on_call,
        )
        self._rollouts[rollout_id] = _Open(session, order.harness, order.seed)
        ticket = RolloutTicket(
            id=rollout_id,
            key=session.key,
            base_url=f"{self._base_url}/r/{session.key}",
            model=MODEL_NAME,
            context_length=session.context_length,
        )
        return _json(ticket, HTTPStatus.CREATED)

    async def _list(self, request: Request) -> Response:
        return JSONResponse(
            {"rollouts": [_status(name, one).model_dump(mode="json") for name, one in self._rollouts.items()]}
        )

    async def _show(self, request: Request) -> Response:
        name, one = self._find(request)
        return await _view(_status(name, one), one.session.snapshot())

    async def _end(self, request: Request) -> Response:
        name, one = self._find(request)
        del self._rollouts[name]  # at once: whoever asks while it settles is told that it is gone
        tree = await one.session.settle()
        if self._store is not None:
            await self._store.add_rollout(_finished(name, one, tree))
        return await _view(_status(name, one), tree)

    def _find(self, request: Request) -> tuple[str, _Open]:
        name: str = request.path_params["id"]
        if name not in self._rollouts:
            raise HTTPException(HTTPStatus.NOT_FOUND, f"Expected the id of an open rollout, got {name!r}.")
        return name, self._rollouts[name]


class _TokenGate:
    """Answers 401 to whoever does not show the token, before anything else is looked at."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shown = Headers(scope=scope).get("authorization", "")
        if secrets.compare_digest(shown.encode(), self._expected):
            await self._app(scope, receive, send)
        else:
            refusal = _error(HTTPStatus.UNAUTHORIZED, "Expected the admin token as 'Authorization: Bearer TOKEN'.")
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)


def _given(model: BaseModel) -> dict[str, object]:
    """Return only what a client wrote, so that the server's defaults hold for the rest."""
    return model.model_dump(exclude_unset=True)


def _known_adapter(name: str | None) -> HarnessAdapter | None:
    """Return a built-in adapter. Import paths are for the command line: a token is no licence to run code here."""
    if name is None:
        return None
    if (plain := name.partition("?")[0]) not in registry.HARNESSES:
        raise registry.UnknownName("harness", plain, registry.HARNESSES)
    return registry.adapter(name)


def _status(name: str, one: _Open) -> RolloutStatus:
    session = one.session
    return RolloutStatus(
        id=name,
        harness=one.harness,
        running=not session.closed.done(),
        num_calls=session.num_calls,
        num_sampled_tokens=session.num_sampled_tokens,
        stop_reason=session.exhausted.result() if session.exhausted.done() else None,
        error=None if session.engine_error is None else str(session.engine_error),
    )


async def _view(status: RolloutStatus, tree: PrefixTree) -> Response:
    def write() -> Response:
        return _json(
            RolloutView(
                **status.model_dump(),
                buckets=tree.buckets(),
                delivered_fraction=tree.delivered_fraction,
                tree=tree.to_json(),
            )
        )

    return await asyncio.to_thread(write)  # a tree may be many megabytes


def _finished(name: str, one: _Open, tree: PrefixTree) -> Rollout:
    """Return the ended rollout as the store keeps it: whole but for the task and the grade, which only others know."""
    session = one.session
    return Rollout(
        id=name,
        task_id="",
        harness=one.harness or "",
        policy=MODEL_NAME,
        group_id=name,
        index=0,
        seed=one.seed,
        tree=tree,
        stop_reason=session.exhausted.result() if session.exhausted.done() else StopReason.COMPLETED,
        grade=None,
        exclusion="ungraded",
        instruction="",
        response="",
        error="" if session.engine_error is None else str(session.engine_error),
        timing={"total": time.monotonic() - one.opened_at},
    )


def _json(model: BaseModel, status: HTTPStatus = HTTPStatus.OK) -> Response:
    return Response(model.model_dump_json(), status, media_type="application/json")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": message}, status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, error.detail)


async def _bad_order(request: Request, error: Exception) -> Response:
    assert isinstance(error, ValidationError)
    problems = (f"{'.'.join(map(str, one['loc'])) or 'body'}: {one['msg']}" for one in error.errors())
    return _error(HTTPStatus.BAD_REQUEST, "; ".join(problems))


async def _refused(request: Request, error: Exception) -> Response:
    return _error(HTTPStatus.BAD_REQUEST, str(error))


async def _broken(request: Request, error: Exception) -> Response:
    return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
