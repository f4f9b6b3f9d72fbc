"""A mounted ASGI app, which runs in the replicas: its messages travel as the chunks of one call.

What ASGI's `receive` gives here goes to the replica, what the app sends there comes back; so bodies
stream both ways, WebSockets work, and a task in the background keeps its slot until it is done.
"""

import asyncio
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from servekit.core.call import MSGPACK, Call, Handler, Payload, now
from servekit.errors import CallError, Cancelled, ExecutionError, PayloadTooLarge, is_shed
from servekit.gateway.answer import CLOSE_ERROR, asgi_error
from servekit.gateway.guarded import CALLER
from servekit.gateway.inflow import Inflow
from servekit.gateway.request import read_call
from servekit.gateway.routes import Route
from servekit.observe.log import get_logger
from servekit.wire.messages import pack_message, unpack_message

_log = get_logger("servekit.gateway")
_PASSED_ON = ("type", "http_version", "method", "scheme", "path", "query_string", "subprotocols")


class Mount:
    """One mounted app.

    Args:
        route: Its path is the prefix of the app's own.
        handler: Answers the calls.
    """

    def __init__(self, route: Route, handler: Handler) -> None:
        self._route = route
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request or WebSocket."""
        route, started = self._route, now()
        code = 500
        conversation = _Conversation(route, scope, receive, send)
        try:
            call = read_call(route, scope["headers"], started)
            call.caller = scope.get(CALLER, "")
            call.idempotent = False
            call.payload = Payload(MSGPACK, (msgspec.msgpack.encode(_scope(route, scope)),))
            call.chunks = conversation.inflow.chunks()
            await conversation.inflow.while_there(conversation.answer(call, self._handler))
            code = conversation.status
        except CallError as error:
            code = Cancelled.status if conversation.is_over else error.status
            if is_shed(error):
                route.shed(error.reason)
            await conversation.fail(error, receive)
        except asyncio.CancelledError:
            code = Cancelled.status
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
        except Exception:  # noqa: BLE001  (the last boundary before the client)
            if not conversation.is_over:
                _log.exception("mounted app failed", path=scope["path"])
                await conversation.fail(ExecutionError("internal error"), receive)
        finally:
            route.answered(code, "", now() - started)


class _Conversation:
    """What goes to and fro for one request."""

    def __init__(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        self._route = route
        self._scope = scope
        self._send = send
        self._size = 0
        self._begun = False
        self.inflow = Inflow(receive, self._convert)
        self.status = 200

    @property
    def is_over(self) -> bool:
        """Whether the client is gone, or has all of its answer."""
        return self.inflow.left or self.inflow.answered

    def _convert(self, message: Message) -> Payload:
        self._size += len(message.get("body") or b"")
        if self._size > self._route.max_body:
            raise PayloadTooLarge(
                f"the body is larger than {self._route.path} takes ({self._route.max_body} bytes)"
            )
        return pack_message(message)

    async def answer(self, call: Call, handler: Handler) -> None:
        reply = await handler(call)
        try:
            assert reply.stream is not None
            async for chunk in reply.stream:
                message = unpack_message(chunk)
                self._begun = True
                if message["type"].endswith(".response.start"):
                    self.status = message["status"]
                elif message["type"] == "http.response.body" and not message.get("more_body"):
                    self.inflow.answered = True  # what follows is work in the background
                await self._send(message)
        finally:
            await reply.aclose()

    async def fail(self, error: CallError, receive: Receive) -> None:
        """Answer with an error; an answer that is under way breaks off."""
        if not self._begun:
            await asgi_error(error, self._scope, receive, self._send)
        elif self._scope["type"] == "websocket" and not self.inflow.left:
            code = CLOSE_ERROR + error.status
            await self._send({"type": "websocket.close", "code": code, "reason": error.reason})


def _scope(route: Route, scope: Scope) -> dict[str, Any]:
    """Return the parts of a scope that are data."""
    passed = {name: scope[name] for name in _PASSED_ON if name in scope}
    return passed | {
        "raw_path": scope.get("raw_path"),
        "root_path": scope.get("root_path", "") + route.path.rstrip("/"),
        "headers": [list(header) for header in scope["headers"]],
        "client": scope.get("client"),
        "server": scope.get("server"),
        "extensions": {
            name: {} for name in scope.get("extensions", {}) if name == "websocket.http.response"
        },
    }
