"""The serving half of a connection: the peer's calls that run here, and their answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from servekit.core.call import Buffer, Call, Handler, Load, Payload, Reply, now
from servekit.errors import CallError, Cancelled, ExecutionError, Unavailable, WireError
from servekit.observe.log import get_logger
from servekit.wire.caller import Send
from servekit.wire.frames import CallHeader, Encode, ErrorHeader, Kind, ReplyHeader, encode
from servekit.wire.streams import OutgoingStream

_log = get_logger("servekit.wire")
_pack = msgspec.msgpack.Encoder().encode
_call: Any = CallHeader
_unpack_call = msgspec.msgpack.Decoder[CallHeader](_call).decode
_unpack_credit = msgspec.msgpack.Decoder(int).decode


class Callee:
    """Calls and streams of the peer.

    Args:
        loop: The loop it belongs to.
        send: Takes the buffers of a frame.
        handler: Answers the calls.
        own_load: Gives the figures that ride on each reply.
        blocked: Returns what to wait for while the peer does not read, else None.

    Attributes:
        encode: Makes the frames that carry payloads.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Send,
        handler: Handler,
        own_load: Callable[[], Load],
        blocked: Callable[[], asyncio.Future[None] | None],
    ) -> None:
        self._loop = loop
        self._send = send
        self.encode: Encode = encode
        self._handler = handler
        self._own_load = own_load
        self._blocked = blocked
        self._running: dict[int, asyncio.Task[None]] = {}
        self._streams: dict[int, OutgoingStream] = {}
        self._idle: asyncio.Future[None] | None = None
        self._leaving = False

    def leave(self) -> None:
        """Take no new calls; the peer is told, and those that cross that are refused unstarted."""
        if not self._leaving:
            self._leaving = True
            self._send(encode(Kind.GOAWAY, 0))

    async def drained(self) -> None:
        """Wait until no call of the peer runs here."""
        while self._running:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)

    def lose(self) -> None:
        """Cancel everything that the peer waits for: the connection has ended."""
        for task in list(self._running.values()):
            _cancel_once(task)

    # -- what the peer sends -----------------------------------------------------------------

    def on_call(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Start a call.

        Raises:
            WireError: Its id is in use.
        """
        if id_ in self._running:
            raise WireError(f"call id {id_} is already in use")
        remaining, content_type, call = _unpack_call(header)
        call.payload = Payload(content_type, segments)
        if remaining is not None:
            call.deadline = now() + remaining
        self._running[id_] = self._loop.create_task(self._serve(id_, call))

    def on_cancel(self, id_: int) -> None:
        """Cancel a call, if it still runs."""
        if (task := self._running.get(id_)) is not None:
            # Not at once: a task cancelled before it began never runs, not even its `finally`.
            self._loop.call_soon(_cancel_once, task)

    def on_credit(self, id_: int, header: Buffer) -> None:
        """Take note that the peer wants more chunks of a stream."""
        if (stream := self._streams.get(id_)) is not None:
            stream.grant(_unpack_credit(header))

    # -- answers -----------------------------------------------------------------------------

    async def _serve(self, id_: int, call: Call) -> None:
        try:
            if self._leaving:
                raise Unavailable("the replica is draining", reason="draining", started=False)
            reply = await self._handler(call)
            payload = reply.payload
            if payload is not None:
                head = payload.content_type, self._own_load(), reply.queue_s, False
                self._send(self.encode(Kind.REPLY, id_, _pack(head), payload.segments))
            else:
                await self._serve_stream(id_, reply)
        except CallError as error:
            self._send_error(id_, error)
        except asyncio.CancelledError:
            self._send_error(id_, Cancelled("the call was cancelled"))
        except Exception as error:  # noqa: BLE001  (the last boundary before the wire)
            _log.exception("call failed", request_id=call.request_id)
            self._send_error(id_, ExecutionError(f"internal error: {type(error).__name__}"))
        finally:
            del self._running[id_]
            if not self._running and self._idle is not None:
                self._idle.set_result(None)
                self._idle = None

    async def _serve_stream(self, id_: int, reply: Reply) -> None:
        assert reply.stream is not None
        window = self._streams[id_] = OutgoingStream(
            self._loop, lambda chunks: self._send_chunks(id_, chunks)
        )
        try:
            head: ReplyHeader = "", self._own_load(), reply.queue_s, True
            self._send(encode(Kind.REPLY, id_, _pack(head)))
            async for chunk in reply.stream:
                await window.credit()
                if (blocked := self._blocked()) is not None:
                    await asyncio.shield(blocked)
                window.write(chunk)
            window.flush()
            self._send(encode(Kind.END, id_))
        finally:
            window.flush()
            del self._streams[id_]
            await reply.aclose()

    def _send_chunks(self, id_: int, chunks: list[Payload]) -> None:
        content_type = chunks[0].content_type.encode()
        if len(chunks) == 1:
            self._send(self.encode(Kind.CHUNK, id_, content_type, chunks[0].segments))
        else:
            segments = [chunk.segments[0] for chunk in chunks]
            self._send(self.encode(Kind.CHUNKS, id_, content_type, segments))

    def _send_error(self, id_: int, error: CallError) -> None:
        head = ErrorHeader(
            error.code,
            error.message,
            error.reason,
            error.retry_after_s,
            [dict(field) for field in error.fields],
            error.started,
            self._own_load(),
        )
        try:
            frame = encode(Kind.ERROR, id_, _pack(head))
        except Exception:  # noqa: BLE001  (too long, or not text: the caller must not wait for ever)
            message = str(error.message)[:1000].encode("utf-8", "replace").decode()
            short = msgspec.structs.replace(head, message=message, reason=error.code, fields=[])
            frame = encode(Kind.ERROR, id_, _pack(short))
        self._send(frame)


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancel a task, but not again: that would cut its cleaning up short."""
    if not task.cancelling():
        task.cancel()
