"""A WebSocket to an endpoint whose input streams: messages in are chunks, chunks out are messages.

Text messages are JSON, or the text itself where a chunk is `str`; binary ones are the bytes where a
chunk is `bytes`, else MessagePack, and so they are in the answer if the handshake accepts it. An empty binary message ends the input: the method reads to its
end and answers what it still has. A client that closes has left: its call may end in good order, and
is cancelled if it does not.

A failure after the handshake is a message with an `error` and the close code 4000 + its HTTP status;
before that it is an HTTP answer.
"""

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from servekit.core.call import BINARY, JSON, MSGPACK, Call, Handler, Payload, Reply, now
from servekit.errors import CallError, Cancelled, ExecutionError, is_shed
from servekit.gateway.answer import CLOSE_ERROR, asgi_error, error_document
from servekit.gateway.guarded import CALLER
from servekit.gateway.inflow import Inflow
from servekit.gateway.request import query_document, read_call
from servekit.gateway.routes import Route
from servekit.observe.log import get_logger
from servekit.spec.raw import TEXT

_log = get_logger("servekit.gateway")


class WebSocket:
    """The WebSockets of one endpoint.

    Args:
        route: Where they lead; its endpoint has an `inbound`.
        handler: Answers the calls.
    """

    def __init__(self, route: Route, handler: Handler) -> None:
        self._route = route
        self._handler = handler
        inbound = route.spec.inbound
        assert inbound is not None
        self._text = TEXT if inbound.raw == "text" else JSON
        self._binary = BINARY if inbound.raw == "bytes" else MSGPACK

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one until either side ends it."""
        route, started = self._route, now()
        code = Cancelled.status
        try:
            call = self._call(scope, started)
            await receive()  # websocket.connect
            await send({"type": "websocket.accept"})
            inflow = Inflow(receive, self._chunk)
            call.chunks = inflow.chunks()
            code = await inflow.while_there(self._answer(call, inflow, send))
        except CallError as error:
            code = error.status
            await asgi_error(error, scope, receive, send)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        finally:
            route.answered(code, "", now() - started)

    def _call(self, scope: Scope, started: float) -> Call:
        spec = self._route.spec
        call = read_call(self._route, scope["headers"], started)
        call.caller = scope.get(CALLER, "")
        call.idempotent = False
        call.payload = Payload(JSON, (query_document(scope["query_string"], spec.input),))
        if MSGPACK not in call.accept:
            call.accept = {"bytes": BINARY, "text": TEXT}.get(spec.raw_output, JSON)
        return call

    def _chunk(self, message: Message) -> Payload | None:
        text: str | None = message.get("text")
        if text is not None:
            return Payload(self._text, (text.encode("utf-8", "replace"),))
        data: bytes = message.get("bytes", b"")
        return Payload(self._binary, (data,)) if data else None

    # -- out ---------------------------------------------------------------------------------

    async def _answer(self, call: Call, inflow: Inflow, send: Send) -> int:
        """Answer the call, and close; returns the status to count."""
        try:
            reply = await self._handler(call)
            try:
                await _send_all(reply, send)
            finally:
                await reply.aclose()
        except CallError as error:
            failed = error
        except Exception:  # noqa: BLE001  (the last boundary before the client)
            if inflow.left:
                return Cancelled.status  # nobody is there to send to
            _log.exception("websocket failed", request_id=call.request_id)
            failed = ExecutionError("internal error")
        else:
            if not inflow.left:
                await send({"type": "websocket.close", "code": 1000})
            return 200
        if is_shed(failed):
            self._route.shed(failed.reason)
        if not inflow.left:
            text = error_document(failed, call.request_id).decode()
            await send({"type": "websocket.send", "text": text})
            code = CLOSE_ERROR + failed.status
            await send({"type": "websocket.close", "code": code, "reason": failed.reason[:100]})
        return failed.status


async def _send_all(reply: Reply, send: Send) -> None:
    if reply.payload is not None:
        await send(_message(reply.payload))
    else:
        assert reply.stream is not None
        async for chunk in reply.stream:
            await send(_message(chunk))


def _message(chunk: Payload) -> dict[str, Any]:
    data = bytes(chunk.segments[0])
    if chunk.content_type in (BINARY, MSGPACK):
        return {"type": "websocket.send", "bytes": data}
    return {"type": "websocket.send", "text": data.decode()}
