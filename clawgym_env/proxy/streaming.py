"""Pseudo-streaming: a turn is generated whole, the client is kept alive meanwhile, then it is replayed as events.

Called by `app` with a call that `session` is answering. Invariants: an overflow is a real 400 because nothing is sent
before the prompt is rendered; after the headers a failure cuts the connection before the first content, never an
error event, since harnesses keep partial text; what is replayed is already recorded.
"""

from __future__ import annotations

import logging

from clawgym_env.errors import ClawGymError, ContextOverflow, EngineError, ProxyError
from clawgym_env.messages import ChatRequest
from clawgym_env.proxy.connection import EVENT_STREAM, JSON_STREAM, ClientGone, Connection
from clawgym_env.proxy.session import PendingCall, RolloutSession, SessionClosed
from clawgym_env.proxy.wire import STATUS, WireDialect

logger = logging.getLogger(__name__)


async def answer(
    connection: Connection, dialect: WireDialect, request: ChatRequest, *, session: RolloutSession, call: PendingCall
) -> None:
    """Answer one client with the reply of `call`, whole or as a stream, as this client asked.

    Raises:
        ClientGone: it left; the call goes on for whoever retries.
        ProxyError: the conversation cannot be rendered; nothing has been sent.

    Whatever else breaks is ours: it is the session's `engine_error`, and the client's connection is cut.
    """
    with session.attached(call):
        try:
            if request.stream:
                await connection.until(call.rendered)
                call.rendered.result()
                await _stream(connection, dialect, request, session=session, call=call)
            else:
                await _whole(connection, dialect, request, session=session, call=call)
        except SessionClosed:
            await connection.reset()
        except (ClientGone, ProxyError):
            raise
        except ContextOverflow as overflow:
            await connection.reply(400, dialect.overflow_error(overflow))
        except ClawGymError as error:
            await connection.reply(STATUS["unavailable"], dialect.error_body("unavailable", str(error)))
        except Exception as error:
            logger.exception("A reply could not be written.")
            session.fail(EngineError(f"A reply could not be written: {type(error).__name__}: {error}"))
            await connection.reset()


async def _whole(
    connection: Connection, dialect: WireDialect, request: ChatRequest, *, session: RolloutSession, call: PendingCall
) -> None:
    await connection.until(call.completed)
    if await connection.reply(200, dialect.render_completion(call.completed.result(), request)):
        session.mark_delivered(call)


async def _stream(
    connection: Connection, dialect: WireDialect, request: ChatRequest, *, session: RolloutSession, call: PendingCall
) -> None:
    if call.completed.done():
        call.completed.result()  # a failure that is already known gets its real status
    await connection.start_stream(JSON_STREAM if request.stream_as_array else EVENT_STREAM)
    await connection.write(dialect.opening_event(call.id, request, call.rendered.result()))
    while not await connection.until(call.completed, session.settings.keep_alive_s):
        await connection.write(dialect.keep_alive(call.id, request))
    if call.completed.exception() is not None:
        await connection.reset()
        return
    events = b"".join(dialect.stream_events(call.completed.result(), request))
    if await connection.finish(events):
        session.mark_delivered(call)


async def hold(connection: Connection, session: RolloutSession) -> None:
    """Keep a client waiting without an answer until it leaves or the session ends: the budget is spent."""
    try:
        await connection.until(session.closed)
    except ClientGone:
        return
    await connection.reset()
