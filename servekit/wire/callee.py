"""The serving half of a connection: the peer's calls that run here, and their answers."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from servekit.core.call import Buffer, Call, Handler, Load, Payload, Reply, now
from servekit.errors import CallError, Cancelled, ExecutionError, Unavailable, WireError
from servekit.observe.log import get_logger
from servekit.wire.caller import Send
from servekit.wire.frames import CallHeader, Encode, Kind, ReplyHeader, encode
from servekit.wire.payloads import encode_chunks, encode_error, read_error
from servekit.wire.streams import IncomingStream, OutgoingStream

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
        self._inputs: dict[int, IncomingStream] = {}
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
        call = self._read(id_, header, segments)
        self._running[id_] = self._loop.create_task(self._serve(id_, call))

    def on_open(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Start a call whose input streams.

        Raises:
            WireError: Its id is in use.
        """
        call = self._read(id_, header, segments)
        call.chunks = self._inputs[id_] = IncomingStream(
            self._loop,
            lambda count: self._send(encode(Kind.INPUT_CREDIT, id_, _pack(count))),
            lambda _: None,
            granted=0,
        )
        self._running[id_] = self._loop.create_task(self._serve_open(id_, call))

    def _read(self, id_: int, header: Buffer, segments: list[Buffer]) -> Call:
        if id_ in self._running:
            raise WireError(f"call id {id_} is already in use")
        unpacked: CallHeader = _unpack_call(header)
        remaining, content_type, call = unpacked
        call.payload = Payload(content_type, segments)
        if remaining is not None:
            call.deadline = now() + remaining
        return call

    async def _serve_open(self, id_: int, call: Call) -> None:
        try:
            await self._serve(id_, call)
        finally:
            self._inputs.pop(id_).cancel()

    def on_input(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Take one chunk of any number of segments of a call's input."""
        if (stream := self._inputs.get(id_)) is not None:
            stream.push((Payload(str(header, "ascii"), segments),))

    def on_inputs(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Take as many chunks of a call's input as there are segments."""
        if (stream := self._inputs.get(id_)) is not None:
            content_type = str(header, "ascii")
            stream.push([Payload(content_type, (segment,)) for segment in segments])

    def on_input_end(self, id_: int, header: Buffer) -> None:
        """Take the end of a call's input, or why it broke off."""
        if (stream := self._inputs.get(id_)) is not None:
            stream.end(read_error(header)[0] if len(header) else None)

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
            await window.send_all(reply.stream, self._blocked)
            self._send(encode(Kind.END, id_))
        finally:
            window.flush()
            del self._streams[id_]
            await reply.aclose()

    def _send_chunks(self, id_: int, chunks: list[Payload]) -> None:
        self._send(encode_chunks(self.encode, Kind.CHUNK, Kind.CHUNKS, id_, chunks))

    def _send_error(self, id_: int, error: CallError) -> None:
        self._send(encode_error(Kind.ERROR, id_, error, self._own_load()))


def _cancel_once(task: asyncio.Task[None]) -> None:
    """Cancel a task, but not again: that would cut its cleaning up short."""
    if not task.cancelling():
        task.cancel()
