"""One connection: many calls, streams and cancels at once, in both directions.

Frames come in from a transport and go out to it; either side may call the other (`caller.py`,
`callee.py`). Whatever breaks the format ends this connection and nothing else: its calls fail with
`ReplicaLost`, and the router sends them elsewhere.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from servekit.core.aio import miss_soon
from servekit.core.call import Call, Handler, Load, Reply
from servekit.errors import Unavailable, WireError
from servekit.observe.log import get_logger
from servekit.wire.callee import Callee
from servekit.wire.caller import Caller
from servekit.wire.frames import SHARED, Encode, Frame, FrameReader, Hello, Kind, encode
from servekit.wire.greeting import Greeting
from servekit.wire.outbox import Outbox
from servekit.wire.sharing import Sharing

MAX_FRAME = 1 << 30
"""Largest frame in bytes that a greeted peer may send."""
_SEND_BUFFER = 1 << 20
_MAX_GREETING = 4096
_GREETING_TIMEOUT_S = 5.0

_log = get_logger("servekit.wire")
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
        greeting_s: Longest wait for the peer's greeting.

    Attributes:
        call: Sends a call to the peer and waits for its reply; see `Caller.call`.
        peer: The other side's greeting.
        lost: Resolves when the connection has ended.
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
        greeting_s: float = _GREETING_TIMEOUT_S,
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._greeting_s = greeting_s
        self._greeting = Greeting(hello, client=client, secret=secret)
        self._greeted: asyncio.Future[None] = loop.create_future()
        self._reader = FrameReader(_MAX_GREETING)
        self._transport: asyncio.Transport | None = None
        self._outbox = Outbox(loop)
        self._blocked: asyncio.Future[None] | None = None
        self._caller = Caller(loop, self._outbox.send, lambda: self._blocked)
        self._callee = Callee(loop, self._outbox.send, handler, own_load, lambda: self._blocked)
        self._sharing = Sharing(loop, self._outbox.send, self._encode_by)
        self.call = self._caller.call
        self.peer = hello
        self.lost: asyncio.Future[None] = loop.create_future()
        self.on_lost: Callable[[Connection], None] | None = None

    @property
    def ongoing(self) -> int:
        """Calls and streams made from here that have not ended."""
        return self._caller.ongoing

    @property
    def usable(self) -> bool:
        """Whether new calls may be made: the peer is there, and has not said that it leaves."""
        return self._caller.usable

    @property
    def load(self) -> Load:
        """The peer's latest figures."""
        return self._caller.load

    @property
    def called_at(self) -> float:
        """When the last call was made from here, on `now`'s clock."""
        return self._caller.called_at

    async def greeted(self) -> None:
        """Wait until both sides have introduced (and proved) themselves.

        Raises:
            WireError: The peer speaks another protocol, or does not know the secret.
        """
        await asyncio.shield(self._greeted)

    async def ping(self) -> None:
        """Wait for the peer's event loop to answer."""
        await self._caller.ping()

    # -- leaving -----------------------------------------------------------------------------

    def goaway(self) -> None:
        """Tell the peer to send no new calls; those that cross this frame are refused unstarted."""
        self._callee.leave()

    async def drained(self) -> None:
        """Wait until no call of the peer runs here."""
        await self._callee.drained()

    async def settled(self) -> None:
        """Wait until no call made from here is under way."""
        await self._caller.settled()

    async def close(self) -> None:
        """Send what is queued, then end the connection; the peer's calls here are cancelled."""
        if self._transport is None or self.lost.done():
            return
        self._outbox.flush()
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
        self._outbox.open(self._transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            # Let a whole array lie between the two sides, if the system allows it.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            self._sharing.open(sock)
            self._outbox.on_large = self._sharing.offer
        elif sock is not None:
            miss_soon(sock)
        self._outbox.send(self._greeting.start())
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
        self._caller.lose()
        self._callee.lose()
        self._sharing.close()
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

    # -- frames ------------------------------------------------------------------------------

    def _on_frame(self, frame: Frame) -> None:
        kind, id_, header, segments = frame
        if not self._greeting.done:
            self._on_greeting(frame)
        elif kind == Kind.CALL:
            self._callee.on_call(id_, header, segments)
        elif kind == Kind.REPLY:
            self._caller.on_reply(id_, header, segments)
        elif kind == Kind.CHUNK:
            self._caller.on_chunk(id_, header, segments)
        elif kind == Kind.CHUNKS:
            self._caller.on_chunks(id_, header, segments)
        elif kind in (Kind.ERROR, Kind.END):
            self._caller.on_end(id_, header)
        elif kind == Kind.CANCEL:
            self._callee.on_cancel(id_)
        elif kind == Kind.CREDIT:
            self._callee.on_credit(id_, header)
        elif kind == Kind.OPEN:
            self._callee.on_open(id_, header, segments)
        elif kind == Kind.INPUT:
            self._callee.on_input(id_, header, segments)
        elif kind == Kind.INPUTS:
            self._callee.on_inputs(id_, header, segments)
        elif kind == Kind.INPUT_END:
            self._callee.on_input_end(id_, header)
        elif kind == Kind.INPUT_CREDIT:
            self._caller.on_input_credit(id_, header)
        elif kind == Kind.PING:
            self._outbox.send(encode(Kind.PONG, id_))
        elif kind == Kind.PONG:
            self._caller.on_pong(id_)
        elif kind == Kind.GOAWAY:
            self._caller.usable = False
        elif kind & SHARED:
            self._on_frame((kind ^ SHARED, id_, header, self._sharing.resolve(segments)))
        elif kind == Kind.ARENA:
            self._sharing.on_offer(header)
        elif kind == Kind.MAPPED:
            self._sharing.on_answer(header)
        else:
            raise WireError(f"frame of kind {kind} after the greeting")

    def _encode_by(self, maker: Encode) -> None:
        self._caller.encode = self._callee.encode = maker

    def _on_greeting(self, frame: Frame) -> None:
        answer = self._greeting.receive(frame)
        if answer:
            self._outbox.send(answer)
        peer = self._greeting.peer
        if self._greeting.done and peer is not None:
            self.peer = peer
            self._caller.version, self._caller.replica = peer.version, peer.replica
            self._reader.max_frame = MAX_FRAME
            if not self._greeted.done():
                self._greeted.set_result(None)
