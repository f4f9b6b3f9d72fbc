"""The calling half of a connection: calls that wait for the peer's reply, and their deadlines."""

import asyncio
from collections.abc import Callable, Sequence
from contextvars import Context
from functools import partial
from math import inf
from typing import Any, Final
from weakref import WeakValueDictionary

import msgspec

from servekit.core.call import Buffer, Call, Load, Payload, Reply, now
from servekit.errors import DeadlineExceeded, PayloadTooLarge, ReplicaLost, WireError
from servekit.wire.feed import Feed
from servekit.wire.frames import Encode, Kind, ReplyHeader, encode
from servekit.wire.payloads import encode_chunks, read_error
from servekit.wire.streams import IncomingStream

Send = Callable[[Sequence[Buffer]], None]

_TICK_S: Final = 0.005
"""Deadlines that pass within this time may be seen together: so much late, never early."""

_pack = msgspec.msgpack.Encoder().encode
_reply: Any = ReplyHeader
_unpack_reply = msgspec.msgpack.Decoder[ReplyHeader](_reply).decode
_unpack_credit = msgspec.msgpack.Decoder(int).decode


class Caller:
    """Calls and streams made from this side.

    Args:
        loop: The loop it belongs to.
        send: Takes the buffers of a frame.
        blocked: Returns what to wait for while the peer does not read, else None.

    Attributes:
        encode: Makes the frames that carry payloads.
        usable: New calls may be made: the peer is there, and has not said that it leaves.
        load: The peer's latest figures.
        called_at: When the last call was made, on `now`'s clock.
        version: Version label of the peer's service.
        replica: The peer's id.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Send,
        blocked: Callable[[], asyncio.Future[None] | None],
    ) -> None:
        self._loop = loop
        self._send = send
        self._blocked = blocked
        self.encode: Encode = encode
        self._last_id = 0
        self._pending: dict[int, tuple[asyncio.Future[Reply], float | None]] = {}
        # Weak, so that a stream which its reader dropped is closed.
        self._streams: WeakValueDictionary[int, IncomingStream] = WeakValueDictionary()
        self._feeds: dict[int, Feed] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._settled: asyncio.Future[None] | None = None
        self._sweep_at = inf
        self._sweeper: asyncio.TimerHandle | None = None
        self.usable = True
        self.load = Load()
        self.called_at = 0.0
        self.version = ""
        self.replica = ""

    @property
    def ongoing(self) -> int:
        """Calls and streams that have not ended."""
        return len(self._pending) + len(self._streams)

    async def call(self, call: Call) -> Reply:
        """Send a call and wait for its reply; cancelling the wait cancels the work.

        Raises:
            CallError: As the peer answered; `ReplicaLost` when the connection ended,
                `DeadlineExceeded` when the call's deadline passed first.
        """
        if not self.usable:
            raise ReplicaLost("the connection to the replica has ended", started=False)
        deadline, remaining = call.deadline, None
        self.called_at = at = now()
        if deadline is not None:
            if (remaining := deadline - at) <= 0:
                raise DeadlineExceeded(
                    "the deadline passed before the call was sent", started=False
                )
            if deadline < self._sweep_at:
                self._sweep(deadline, remaining)
        id_ = self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        payload = call.payload
        header = _pack((remaining, payload.content_type, call))
        try:
            kind = Kind.CALL if call.chunks is None else Kind.OPEN
            frame = self.encode(kind, id_, header, payload.segments)
        except WireError as error:
            raise PayloadTooLarge(f"the call can't be sent: {error}", started=False) from error
        self._send(frame)
        if call.chunks is not None:
            self._feeds[id_] = Feed(self._loop, self._send, self._input, id_, call, self._blocked)
        reply: asyncio.Future[Reply] = self._loop.create_future()
        self._pending[id_] = reply, deadline
        try:
            return await reply
        except asyncio.CancelledError:
            self._send(encode(Kind.CANCEL, id_))
            raise
        finally:
            del self._pending[id_]
            if self._feeds and id_ not in self._streams:
                self._stop_feed(id_)
            if self._settled is not None:
                self._settle()

    async def ping(self) -> None:
        """Wait for the peer's event loop to answer."""
        id_ = self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        pong = self._pings[id_] = self._loop.create_future()
        self._send(encode(Kind.PING, id_))
        try:
            await pong
        finally:
            del self._pings[id_]

    async def settled(self) -> None:
        """Wait until no call is under way."""
        while self.ongoing:
            self._settled = self._settled or self._loop.create_future()
            await asyncio.shield(self._settled)

    def _settle(self) -> None:
        if self._settled is not None and not self.ongoing:
            self._settled.set_result(None)
            self._settled = None

    # -- deadlines ---------------------------------------------------------------------------

    # Nearly no call ever expires. So none has a timer: one looks at all of them when the earliest
    # deadline that it was set for has come.

    def _sweep(self, when: float, after_s: float) -> None:
        """Look for expired calls at `when`, in `after_s` seconds."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        self._sweep_at = when
        # In a context of its own: that of a call would keep the call's arrays until then.
        self._sweeper = self._loop.call_later(after_s, self._expire, context=Context())

    def _expire(self) -> None:
        self._sweep_at, self._sweeper = inf, None
        time, earliest = now(), inf
        for id_, (reply, deadline) in self._pending.items():
            if deadline is None or reply.done():
                continue
            if deadline <= time:
                self._send(encode(Kind.CANCEL, id_))
                reply.set_exception(DeadlineExceeded("the deadline passed while the call ran"))
            elif deadline < earliest:
                earliest = deadline
        for id_, stream in list(self._streams.items()):
            if stream.deadline is None:
                continue
            if stream.deadline <= time:
                self._send(encode(Kind.CANCEL, id_))
                stream.end(DeadlineExceeded("the deadline passed while the call ran"))
            elif stream.deadline < earliest:
                earliest = stream.deadline
        if earliest < inf:
            self._sweep(earliest, max(earliest - time, _TICK_S))

    # -- what the peer sends -----------------------------------------------------------------

    def on_reply(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Take an answer, or the start of a stream."""
        content_type, self.load, queue_s, is_stream = _unpack_reply(header)
        pending = self._pending.get(id_)
        if pending is None or pending[0].done():
            return  # cancelled or expired meanwhile; a CANCEL is on its way
        reply, deadline = pending
        payload = stream = None
        if is_stream:
            stream = self._streams[id_] = IncomingStream(
                self._loop, partial(self._grant, id_), partial(self._forget, id_), deadline
            )
        else:
            payload = Payload(content_type, segments)
        reply.set_result(Reply(payload, stream, queue_s, self.version, self.replica))

    def on_chunk(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Take one chunk of any number of segments."""
        if (stream := self._streams.get(id_)) is not None:
            stream.push(header, segments)

    def on_chunks(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        """Take as many chunks as there are segments."""
        if (stream := self._streams.get(id_)) is not None:
            stream.push_each(header, segments)

    def on_end(self, id_: int, header: Buffer) -> None:
        """Take the end of a stream, or a failed call."""
        error = None
        if len(header):
            error, self.load = read_error(header)
        if (stream := self._streams.get(id_)) is not None:
            stream.end(error)
        elif (pending := self._pending.get(id_)) is not None and not pending[0].done():
            pending[0].set_exception(error or WireError("a call ended without a reply"))

    def on_input_credit(self, id_: int, header: Buffer) -> None:
        """Take note that the peer wants more of a call's input."""
        if (feed := self._feeds.get(id_)) is not None:
            feed.grant(_unpack_credit(header))

    def on_pong(self, id_: int) -> None:
        """Take the answer to a ping."""
        if (pong := self._pings.get(id_)) is not None and not pong.done():
            pong.set_result(None)

    def lose(self) -> None:
        """Fail everything that waits for the peer: the connection has ended."""
        self.usable = False
        if self._sweeper is not None:
            self._sweeper.cancel()
        error = ReplicaLost(f"the connection to replica {self.replica or '?'} was lost")
        waiting: list[asyncio.Future[Reply] | asyncio.Future[None]] = list(self._pings.values())
        waiting += [reply for reply, _ in self._pending.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        for stream in list(self._streams.values()):
            stream.end(error)
        for id_ in list(self._feeds):
            self._stop_feed(id_)

    def _grant(self, id_: int, count: int) -> None:
        self._send(encode(Kind.CREDIT, id_, _pack(count)))

    def _input(self, id_: int, chunks: list[Payload]) -> list[Buffer]:
        return encode_chunks(self.encode, Kind.INPUT, Kind.INPUTS, id_, chunks)

    def _stop_feed(self, id_: int) -> None:
        if (feed := self._feeds.pop(id_, None)) is not None:
            feed.stop()

    def _forget(self, id_: int, closed_early: bool) -> None:
        self._streams.pop(id_, None)
        self._stop_feed(id_)
        self._settle()
        if closed_early:
            self._send(encode(Kind.CANCEL, id_))
