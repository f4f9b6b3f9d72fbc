"""A mounted ASGI app in its replica: one conversation per call, and its lifespan."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

import msgspec

from servekit.core.call import Call, Payload, Reply
from servekit.core.context import RequestContext
from servekit.errors import SetupError
from servekit.runtime.admission import Admission
from servekit.runtime.endpoints import Chunks
from servekit.runtime.meter import Meter
from servekit.runtime.slots import Slots
from servekit.wire.messages import pack_message, unpack_message

_Message: TypeAlias = MutableMapping[str, Any]
AsgiApp: TypeAlias = Callable[
    [Any, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]
]

_AHEAD: Final = 16
"""Messages that an app may send before the client has read them."""
_ASGI: Final = {"version": "3.0", "spec_version": "2.4"}


class Mounted:
    """The runner of an app's calls.

    Args:
        app: What the author's method returned.
        where: `Service.method`.
        slots: Limits how many conversations run at once.
        meter: Gets the figures.
    """

    def __init__(self, app: AsgiApp, where: str, slots: Slots, meter: Meter) -> None:
        self._app = app
        self._where = where
        self._admission = Admission(slots, meter)
        self._state: dict[str, Any] = {}
        self.lifespan = Lifespan(app, where, self._state)

    async def __call__(self, call: Call, context: RequestContext) -> Reply:
        """Begin one conversation, and return when the app has begun to answer.

        Raises:
            CallError: There is no room, time is up, or the app raised before it answered.
        """
        admission = self._admission
        admission.check()
        waited = 0.0 if admission.enter(call) else await admission.wait(call)
        messages = self._converse(call)
        chunks = Chunks(messages, pack_message, context, where=self._where, release=admission.leave)
        try:
            await chunks.start()
        except BaseException:
            await chunks.aclose()
            raise
        return Reply(stream=chunks, queue_s=waited)

    async def _converse(self, call: Call) -> AsyncIterator[_Message]:
        scope: dict[str, Any] = msgspec.msgpack.decode(call.payload.segments[0])
        scope |= {"asgi": _ASGI, "state": self._state.copy()}
        scope["headers"] = [tuple(header) for header in scope["headers"]]
        for name in ("client", "server"):
            if scope[name] is not None:
                scope[name] = tuple(scope[name])
        sent: asyncio.Queue[_Message | None] = asyncio.Queue()
        room = asyncio.Semaphore(_AHEAD)

        async def send(message: _Message) -> None:
            await room.acquire()
            sent.put_nowait(message)

        receive = Received(scope["type"], call.chunks)

        async def run() -> None:
            try:
                await self._app(scope, receive, send)
            except Exception:
                if not receive.gone:  # else it has just found out
                    raise
            finally:
                sent.put_nowait(None)

        running = asyncio.get_running_loop().create_task(run())
        try:
            while (message := await sent.get()) is not None:
                room.release()
                yield message
            await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class Received:
    """ASGI's `receive`: the client's messages, and that it has left for ever after.

    Attributes:
        gone: The app knows that the client has left.
    """

    def __init__(self, kind: str, chunks: AsyncIterator[Payload] | None) -> None:
        self._farewell: dict[str, Any] = {"type": f"{kind}.disconnect"}
        if kind == "websocket":
            self._farewell["code"] = 1005
        self._chunks = chunks
        self.gone = False

    async def __call__(self) -> _Message:
        """Return the next message."""
        chunk = None if self._chunks is None else await anext(self._chunks, None)
        message = self._farewell.copy() if chunk is None else unpack_message(chunk)
        self.gone = message["type"].endswith(".disconnect")
        return message


class Lifespan:
    """Start-up and shut-down of an app that cares for them (ASGI lifespan protocol 2.0)."""

    def __init__(self, app: AsgiApp, where: str, state: dict[str, Any]) -> None:
        self._app = app
        self._where = where
        self._state = state
        self._events: asyncio.Queue[_Message] = asyncio.Queue()
        self._answer: asyncio.Future[_Message] | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Let the app start up.

        Raises:
            SetupError: It says that it failed.
        """
        loop = asyncio.get_running_loop()
        scope = {"type": "lifespan", "asgi": _ASGI, "state": self._state}
        self._running = loop.create_task(self._run(scope))
        answer = await self._tell("lifespan.startup")
        if answer["type"] == "lifespan.startup.failed":
            raise SetupError(f"{self._where}: {answer.get('message') or 'its start-up failed'}")

    async def stop(self) -> None:
        """Let the app shut down."""
        if self._running is not None and not self._running.done():
            await self._tell("lifespan.shutdown")
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _tell(self, event: str) -> _Message:
        """Tell the app what happens; one that ends or raises instead of answering doesn't care."""
        assert self._running is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._events.put_nowait({"type": event})
        await asyncio.wait((self._answer, self._running), return_when=asyncio.FIRST_COMPLETED)
        return self._answer.result() if self._answer.done() else {"type": ""}

    async def _run(self, scope: Any) -> None:
        async def send(message: _Message) -> None:
            if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)

        with contextlib.suppress(Exception):  # that is how an app says that it has no lifespan
            await self._app(scope, self._events.get, send)
