"""The hot path: one ASGI callable from a request's bytes to a call, and from its reply to bytes.

It looks the path up in a dict, reads the headers once, hands the body on as it came, and sends the
answer as it is. The replica decodes, validates and encodes. Everything that is not an endpoint
(docs, probes, metrics) goes to the Starlette app behind it.
"""

import asyncio
from typing import Final

from servekit.core.call import Handler, now
from servekit.errors import CallError, Cancelled, ExecutionError, MethodNotAllowed, is_shed
from servekit.gateway.answer import send_error, send_stream, send_whole
from servekit.gateway.asgi import App, Receive, Scope, Send
from servekit.gateway.request import read_body, read_call, request_id_of
from servekit.gateway.routes import Route, routes_of
from servekit.observe.families import Families
from servekit.observe.log import get_logger
from servekit.spec.app import AppSpec

TASK: Final = "servekit.task"
"""Key of the scope with the task that must end when the client leaves."""

_log = get_logger("servekit.gateway")


class Gateway:
    """The ASGI app.

    Args:
        handler: Takes the calls.
        rest: The ASGI app for everything that is no endpoint.
        families: Gets the figures.
    """

    def __init__(self, handler: Handler, rest: App, families: Families) -> None:
        self._handler = handler
        self._rest = rest
        self._families = families
        self._routes: dict[str, dict[str, Route]] = {}

    def serve(self, app: AppSpec) -> None:
        """Answer for this app from now on; calls under way are not touched."""
        self._routes = routes_of(app, self._families)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        methods = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if methods is None:
            await self._rest(scope, receive, send)
        elif (route := methods.get(scope["method"])) is None:
            error = MethodNotAllowed(f"{scope['path']} takes {', '.join(methods)}")
            error.headers = {"allow": ", ".join(methods)}
            await send_error(send, error, request_id_of(scope))
        else:
            await self._answer(route, scope, receive, send)

    async def _answer(self, route: Route, scope: Scope, receive: Receive, send: Send) -> None:
        scope[TASK] = asyncio.current_task()
        started = now()
        code, version, request_id = 500, "", ""
        try:
            call = read_call(route, scope, started)
            request_id = call.request_id
            call.payload.segments = (await read_body(route, scope, receive),)
            reply = await self._handler(call)
            version = reply.version
            if reply.payload is not None:
                await send_whole(send, call, reply, reply.payload)
                code = 200
            else:
                code = await send_stream(send, call, reply)
        except CallError as error:
            code = error.status
            if is_shed(error):
                route.shed(error.reason)
            await send_error(send, error, request_id or request_id_of(scope))
        except asyncio.CancelledError:
            # The connection is gone, and with it everybody who could see an answer.
            code = Cancelled.status
        except Exception:  # noqa: BLE001  (the last boundary before the client)
            _log.exception("request failed", request_id=request_id, path=scope["path"])
            masked = ExecutionError("internal error")
            await send_error(send, masked, request_id or request_id_of(scope))
        finally:
            route.answered(code, version, now() - started)
