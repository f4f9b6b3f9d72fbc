"""One connection: many calls, streams and cancels at once, in both directions.

Frames come in from a transport and go out to it; either side may call the other. Writes made in
one turn of the event loop leave as one. Whatever breaks the format ends this connection and
nothing else: its calls fail with `ReplicaLost`, and the router sends them elsewhere.
"""

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast
from weakref import WeakValueDictionary

import msgspec

from servekit.core.aio import Deadlines
from servekit.core.call import Buffer, Call, Handler, Load, Payload, Reply, now
from servekit.errors import (
    CallError,
    Cancelled,
    DeadlineExceeded,
    ExecutionError,
    PayloadTooLarge,
    ReplicaLost,
    Unavailable,
    WireError,
    call_error,
)
from servekit.observe.log import get_logger
from servekit.wire.frames import (
    LARGE,
    CallHeader,
    ErrorHeader,
    Frame,
    FrameReader,
    Hello,
    Kind,
    ReplyHeader,
    encode,
)
from servekit.wire.greeting import Greeting
from servekit.wire.streams import IncomingStream, OutgoingStream

MAX_FRAME = 1 << 30
"""Largest frame in bytes that a greeted peer may send."""
_MAX_GREETING = 4096
_GREETING_TIMEOUT_S = 5.0

_log = get_logger("servekit.wire")
_pack = msgspec.msgpack.Encoder().encode
_unpack_call = msgspec.msgpack.Decoder(CallHeader).decode
_unpack_reply = msgspec.msgpack.Decoder(ReplyHeader).decode
_unpack_error = msgspec.msgpack.Decoder(ErrorHeader).decode
_unpack_credit = msgspec.msgpack.Decoder(int).decode

_NO_LOAD = Load()


async def refuse(call: Call) -> Reply:
    """Handle calls on a side that takes none."""
    raise Unavailable(f"{call.service}.{call.endpoint}: this peer takes no calls", started=False)


def no_load() -> Load:
    """Return the load of a side that nobody balances on."""
    return _NO_LOAD


class Connection(asyncio.BufferedProtocol):
    """Our protocol over one transport. All methods belong to the loop's thread.

    Args:
        hello: What the peer is told about this side.
        handler: Answers the peer's calls.
        client: Whether this side connected; decides who proves itself first.
        secret: What both sides must prove to know; empty on unix sockets, where the file's mode
            is the guard.
        own_load: Gives the figures that ride on each reply.
        deadlines: Timers of the calls made from here; shared between connections.
        greeting_s: Longest wait for the peer's greeting.

    Attributes:
        peer: The other side's greeting.
        load: The peer's latest figures.
        draining: The peer said GOAWAY: calls under way finish, new ones are refused.
        lost: Resolves when the connection has ended.
        on_goaway: Called when the peer says GOAWAY.
        on_lost: Called when the connection has ended.
    """

    def __init__(
        self,
        hello: Hello,
        *,
        client: bool,
        handler: Handler = refuse,
        secret: bytes = b"",
        own_load: Callable[[], Load] = no_load,
        deadlines: Deadlines | None = None,
        greeting_s: float = _GREETING_TIMEOUT_S,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._handler = handler
        self._own_load = own_load
        self._deadlines = deadlines or Deadlines(loop)
        self._greeting_s = greeting_s
        self._greeting = Greeting(hello, client=client, secret=secret)
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._reader = FrameReader(_MAX_GREETING)
        self._transport: asyncio.Transport | None = None
        self._out: list[Buffer] = []
        self._blocked: asyncio.Future[None] | None = None
        self._last_id = 0
        self._pending: dict[int, asyncio.Future[Reply]] = {}
        # Weak, so that a stream which its reader dropped is closed.
        self._incoming: WeakValueDictionary[int, IncomingStream] = WeakValueDictionary()
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._outgoing: dict[int, OutgoingStream] = {}
        self._pings: dict[int, asyncio.Future[None]] = {}
        self._idle: asyncio.Future[None] | None = None
        self._settled: asyncio.Future[None] | None = None
        self._leaving = False
        self.peer = hello
        self.load = _NO_LOAD
        self.draining = False
        self.lost: asyncio.Future[None] = loop.create_future()
        self.on_goaway: Callable[[Connection], None] | None = None
        self.on_lost: Callable[[Connection], None] | None = None

    # -- calling -----------------------------------------------------------------------------

    @property
    def ongoing(self) -> int:
        """Calls and streams made from here that have not ended."""
        return len(self._pending) + len(self._incoming)

    @property
    def usable(self) -> bool:
        """Whether new calls may be made."""
        return not (self.draining or self.lost.done())

    async def greeted(self) -> None:
        """Wait until both sides have introduced (and proved) themselves.

        Raises:
            WireError: The peer speaks another protocol, or does not know the secret.
        """
        await asyncio.shield(self._greeted)

    async def call(self, call: Call) -> Reply:
        """Send a call and wait for its reply; cancelling the wait cancels the work.

        Raises:
            CallError: As the peer answered; `ReplicaLost` when the connection ended,
                `DeadlineExceeded` when the call's deadline passed first.
        """
        if not self.usable:
            raise ReplicaLost("the connection to the replica has ended", started=False)
        remaining = None
        if call.deadline is not None and (remaining := call.deadline - now()) <= 0:
            raise DeadlineExceeded("the deadline passed before the call was sent", started=False)
        id_ = self._new_id()
        payload = call.payload
        header = CallHeader(
            call.service,
            call.endpoint,
            call.request_id,
            remaining,
            payload.content_type,
            call.accept,
            call.internal,
            call.idempotent,
            call.priority,
            call.attempt,
            call.affinity_key,
            call.traceparent,
            call.headers,
        )
        reply: asyncio.Future[Reply] = self._loop.create_future()
        try:
            frame = encode(Kind.CALL, id_, _pack(header), payload.segments)
        except WireError as error:
            raise PayloadTooLarge(f"the call can't be sent: {error}", started=False) from error
        self._send(frame)
        self._pending[id_] = reply
        timer = None
        if call.deadline is not None:
            timer = self._deadlines.add(call.deadline, lambda: self._expire(id_))
        is_stream = False
        try:
            answer = await reply
            is_stream = answer.stream is not None
        except asyncio.CancelledError:
            self._send(encode(Kind.CANCEL, id_))
            raise
        finally:
            del self._pending[id_]
            if timer is not None and not is_stream:
                self._deadlines.discard(timer)
            if self._settled is not None:
                self._settle()
        return answer

    def _new_id(self) -> int:
        self._last_id = (self._last_id + 1) & 0xFFFFFFFF
        return self._last_id

    def _expire(self, id_: int) -> None:
        error = DeadlineExceeded("the deadline passed while the call ran")
        if (stream := self._incoming.get(id_)) is not None:
            self._send(encode(Kind.CANCEL, id_))
            stream.end(error)
        elif (reply := self._pending.get(id_)) is not None and not reply.done():
            self._send(encode(Kind.CANCEL, id_))
            reply.set_exception(error)

    async def ping(self) -> None:
        """Wait for the peer's event loop to answer."""
        id_ = self._new_id()
        pong = self._pings[id_] = self._loop.create_future()
        self._send(encode(Kind.PING, id_))
        try:
            await pong
        finally:
            del self._pings[id_]

    # -- leaving -----------------------------------------------------------------------------

    def goaway(self) -> None:
        """Tell the peer to send no new calls; those that cross this frame are refused unstarted."""
        if not self._leaving:
            self._leaving = True
            self._send(encode(Kind.GOAWAY, 0))

    async def drained(self) -> None:
        """Wait until no call of the peer runs here."""
        while self._serving:
            self._idle = self._idle or self._loop.create_future()
            await asyncio.shield(self._idle)

    async def settled(self) -> None:
        """Wait until no call made from here is under way."""
        while self.ongoing:
            self._settled = self._settled or self._loop.create_future()
            await asyncio.shield(self._settled)

    def _settle(self) -> None:
        if self._settled is not None and not self.ongoing:
            self._settled.set_result(None)
            self._settled = None

    async def close(self) -> None:
        """Send what is queued, then end the connection; the peer's calls here are cancelled."""
        if self._transport is None or self.lost.done():
            return
        self._flush()
        self._transport.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.shield(self.lost)
        self._transport.abort()

    def abort(self) -> None:
        """End the connection at once; what is queued is lost."""
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: WireError) -> None:
        _log.warning("connection closed", error=str(error), peer=self.peer.replica)
        if not self._greeted.done():
            self._greeted.set_exception(error)
        self.abort()

    # -- transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet the peer."""
        self._transport = cast("asyncio.Transport", transport)
        self._send(self._greeting.start())
        self._loop.call_later(self._greeting_s, self._greeting_is_due)

    def _greeting_is_due(self) -> None:
        if not self._greeted.done():
            self._fail(WireError("the peer did not greet in time"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Fail every call that waits for the peer, cancel every call that it waits for."""
        if self.lost.done():
            return
        self.lost.set_result(None)
        if not self._greeted.done():
            self._greeted.set_exception(WireError("the peer closed the connection"))
        self._greeted.exception()  # nobody has to be waiting for it
        error = ReplicaLost(f"the connection to replica {self.peer.replica or '?'} was lost")
        for reply in self._pending.values():
            if not reply.done():
                reply.set_exception(error)
        for pong in self._pings.values():
            if not pong.done():
                pong.set_exception(error)
        for stream in list(self._incoming.values()):
            stream.end(error)
        for task in list(self._serving.values()):
            task.cancel()
        self.resume_writing()
        if self.on_lost is not None:
            self.on_lost(self)

    def pause_writing(self) -> None:
        """Hold streams back: the peer reads too slowly."""
        self._blocked = self._blocked or self._loop.create_future()

    def resume_writing(self) -> None:
        """Let streams go on."""
        if self._blocked is not None:
            self._blocked.set_result(None)
            self._blocked = None

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return where the transport puts what it reads."""
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Handle every frame that is now whole."""
        try:
            for frame in self._reader.received(nbytes):
                self._on_frame(frame)
        except WireError as error:
            self._fail(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._fail(WireError(f"bad header: {error}"))

    def eof_received(self) -> bool:
        """Close when the peer has."""
        return False

    def _send(self, buffers: list[Buffer]) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += buffers

    def _flush(self) -> None:
        out, self._out = self._out, []
        transport = self._transport
        if not out or transport is None or transport.is_closing():
            return
        if len(out) == 1:
            transport.write(out[0])
        elif sum(map(len, out)) < LARGE:
            transport.write(b"".join(out))
        else:
            transport.writelines(out)

    # -- frames ------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        kind, id_, header, segments = frame
        if not self._greeting.done:
            self._on_greeting(frame)
        elif kind == Kind.CALL:
            self._on_call(id_, header, segments)
        elif kind == Kind.REPLY:
            self._on_reply(id_, header, segments)
        elif kind == Kind.CHUNK:
            if (stream := self._incoming.get(id_)) is not None:
                stream.push((Payload(str(header, "ascii"), segments),))
        elif kind == Kind.CHUNKS:
            if (stream := self._incoming.get(id_)) is not None:
                content_type = str(header, "ascii")
                stream.push([Payload(content_type, (segment,)) for segment in segments])
        elif kind in (Kind.ERROR, Kind.END):
            self._on_end(id_, header)
        elif kind == Kind.CANCEL:
            if (task := self._serving.get(id_)) is not None:
                # Behind its first step: a task cancelled before never runs, not even its `finally`.
                self._loop.call_soon(task.cancel)
        elif kind == Kind.CREDIT:
            if (outgoing := self._outgoing.get(id_)) is not None:
                outgoing.grant(_unpack_credit(header))
        elif kind == Kind.PING:
            self._send(encode(Kind.PONG, id_))
        elif kind == Kind.PONG:
            if (pong := self._pings.get(id_)) is not None and not pong.done():
                pong.set_result(None)
        elif kind == Kind.GOAWAY:
            self.draining = True
            if self.on_goaway is not None:
                self.on_goaway(self)
        else:
            raise WireError(f"frame of kind {kind} after the greeting")

    def _on_greeting(self, frame: Frame) -> None:
        answer = self._greeting.receive(frame)
        if answer:
            self._send(answer)
        if self._greeting.done and self._greeting.peer is not None:
            self.peer = self._greeting.peer
            self._reader.max_frame = MAX_FRAME
            if not self._greeted.done():
                self._greeted.set_result(None)

    def _on_reply(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        head = _unpack_reply(header)
        self.load = head.load
        reply = self._pending.get(id_)
        if reply is None or reply.done():
            return  # cancelled or expired meanwhile; a CANCEL is on its way
        peer = self.peer
        answer = Reply(version=peer.version, replica=peer.replica, queue_s=head.queue_s)
        if head.stream:
            answer.stream = self._incoming[id_] = IncomingStream(
                self._loop,
                lambda count: self._send(encode(Kind.CREDIT, id_, _pack(count))),
                lambda closed_early: self._forget_stream(id_, closed_early),
            )
        else:
            answer.payload = Payload(head.content_type, segments)
        reply.set_result(answer)

    def _forget_stream(self, id_: int, closed_early: bool) -> None:
        self._incoming.pop(id_, None)
        if self._settled is not None:
            self._settle()
        if closed_early and not self.lost.done():
            self._send(encode(Kind.CANCEL, id_))

    def _on_end(self, id_: int, header: Buffer) -> None:
        error = None
        if header:
            head = _unpack_error(header)
            self.load = head.load
            error = call_error(
                head.code,
                head.message,
                reason=head.reason,
                retry_after_s=head.retry_after_s,
                fields=head.fields,
                started=head.started,
            )
        if (stream := self._incoming.get(id_)) is not None:
            stream.end(error)
        elif (reply := self._pending.get(id_)) is not None and not reply.done():
            reply.set_exception(error or WireError("a call ended without a reply"))

    # -- serving -----------------------------------------------------------------------------

    def _on_call(self, id_: int, header: Buffer, segments: list[Buffer]) -> None:
        if id_ in self._serving:
            raise WireError(f"call id {id_} is already in use")
        head = _unpack_call(header)
        remaining = head.remaining_s
        call = Call(
            head.service,
            head.endpoint,
            Payload(head.content_type, segments),
            request_id=head.request_id,
            deadline=None if remaining is None else now() + remaining,
            accept=head.accept,
            internal=head.internal,
            priority=head.priority,
            idempotent=head.idempotent,
            attempt=head.attempt,
            affinity_key=head.affinity_key,
            traceparent=head.traceparent,
            headers=head.headers,
        )
        self._serving[id_] = self._loop.create_task(self._serve(id_, call))

    async def _serve(self, id_: int, call: Call) -> None:
        try:
            if self._leaving:
                raise Unavailable("the replica is draining", reason="draining", started=False)
            reply = await self._handler(call)
            if reply.stream is not None:
                await self._serve_stream(id_, reply)
            elif reply.payload is not None:
                payload = reply.payload
                head = ReplyHeader(payload.content_type, self._own_load(), reply.queue_s)
                self._send(encode(Kind.REPLY, id_, _pack(head), payload.segments))
        except CallError as error:
            self._send_error(id_, error)
        except asyncio.CancelledError:
            self._send_error(id_, Cancelled("the call was cancelled"))
        except Exception as error:  # noqa: BLE001  (the last boundary before the wire)
            _log.exception("call failed", request_id=call.request_id)
            self._send_error(id_, ExecutionError(f"internal error: {type(error).__name__}"))
        finally:
            del self._serving[id_]
            if not self._serving and self._idle is not None:
                self._idle.set_result(None)
                self._idle = None

    async def _serve_stream(self, id_: int, reply: Reply) -> None:
        assert reply.stream is not None
        window = self._outgoing[id_] = OutgoingStream(
            self._loop, lambda chunks: self._send_chunks(id_, chunks)
        )
        try:
            head = ReplyHeader("", self._own_load(), reply.queue_s, stream=True)
            self._send(encode(Kind.REPLY, id_, _pack(head)))
            async for chunk in reply.stream:
                await window.credit()
                if self._blocked is not None:
                    await asyncio.shield(self._blocked)
                window.write(chunk)
            window.flush()
            self._send(encode(Kind.END, id_))
        finally:
            window.flush()
            del self._outgoing[id_]
            await reply.aclose()

    def _send_chunks(self, id_: int, chunks: list[Payload]) -> None:
        content_type = chunks[0].content_type.encode()
        if len(chunks) == 1:
            self._send(encode(Kind.CHUNK, id_, content_type, chunks[0].segments))
        else:
            segments = [chunk.segments[0] for chunk in chunks]
            self._send(encode(Kind.CHUNKS, id_, content_type, segments))

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
