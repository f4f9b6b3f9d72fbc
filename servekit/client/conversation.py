"""Calls whose input streams, over a WebSocket: both sides send while they read.

HTTP/1.1 clients send a whole request before they read its answer, so an endpoint that answers its
input as it comes could not be talked to. Values go as binary messages, an empty one ends the input;
binary messages come back, and a text is an error. See `gateway/websocket.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Self

from servekit.client.channel import Channel
from servekit.client.exchange import failure
from servekit.client.request import Outgoing, is_file
from servekit.core.aio import aclose
from servekit.core.call import MSGPACK, Payload
from servekit.errors import InvalidInput, InvalidOutput, PayloadTooLarge, ReplicaLost, Unavailable
from servekit.resilience.retry import BROKEN
from servekit.runtime.outbound import values_of
from servekit.spec.body import pack

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection
    from websockets.exceptions import ConnectionClosed

_CLOSE_ERROR: Final = 4000
_TOO_BIG: Final = 1009


def is_stream(body: tuple[Any, ...]) -> bool:
    """Return whether a body is an iterator, and so the input of an endpoint that streams it."""
    return any(isinstance(it, Iterator | AsyncIterator) for it in body) and not is_file(body[0])


async def messages_of(stream: Iterator[Any] | AsyncIterator[Any]) -> AsyncIterator[bytes]:
    """Yield an iterator's values as messages: bytes as they are, all else as MessagePack."""
    values = values_of(stream, asyncio.get_running_loop())
    assert values is not None
    try:
        async for value in values:
            yield value if isinstance(value, bytes) else pack(value)
    finally:
        await aclose(values)


class Conversation:
    """One call under way.

    Args:
        channel: Leads to the gateway.
        socket: The WebSocket.
        call: The call, for its deadline.
        messages: The input; closed with the conversation.

    Attributes:
        headers: Those of the handshake's answer.
    """

    def __init__(
        self,
        channel: Channel,
        socket: "ClientConnection",
        call: Outgoing,
        messages: AsyncIterator[bytes],
    ) -> None:
        self._channel = channel
        self._socket = socket
        self._deadline = call.deadline
        self._messages = messages
        self._feeding = asyncio.ensure_future(self._feed())
        response = socket.response
        self.headers: Mapping[str, str] = {} if response is None else response.headers

    @classmethod
    async def open(cls, channel: Channel, call: Outgoing, messages: AsyncIterator[bytes]) -> Self:
        """Begin a call; nothing of its input is read before the server has taken it.

        Args:
            channel: Leads to the gateway.
            call: Path with the other arguments, headers, and deadline.
            messages: The input, each value as its bytes or as MessagePack.

        Raises:
            CallError: It was refused, or the server was not reached.
        """
        from websockets.asyncio.client import connect  # noqa: PLC0415  (30 ms)
        from websockets.exceptions import InvalidHandshake, InvalidStatus  # noqa: PLC0415

        url = f"ws{channel.url.removeprefix('http')}{call.path}"
        opening = connect(
            url,
            additional_headers=channel.headers | call.headers_now() | {"accept": MSGPACK},
            compression=None,
            open_timeout=None,
            max_size=None,
        )
        try:
            socket = await channel.in_time(opening, call.deadline, f"{url} did not answer")
        except InvalidStatus as error:
            answer = error.response
            raise failure(answer.status_code, bytes(answer.body or b""), answer.headers) from None
        except InvalidHandshake as error:
            raise Unavailable(f"{url} is no WebSocket: {error}", started=False) from error
        except OSError as error:
            raise Unavailable(
                f"nothing answers at {channel.url}: {error}", started=False
            ) from error
        return cls(channel, socket, call, messages)

    async def _feed(self) -> None:
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        try:
            async for message in self._messages:
                if not message:
                    raise InvalidInput("an empty value can't be sent: it would end the input")
                await self._socket.send(message)
            await self._socket.send(b"")
        except ConnectionClosed:
            pass  # whoever reads the answers learns why
        except BaseException:
            self._socket.transport.abort()
            raise
        finally:
            await aclose(self._messages)

    async def answers(self) -> AsyncGenerator[Payload, None]:
        """Yield the answers as they come.

        Raises:
            CallError: As the server raised it, or because the connection broke off.
            Exception: What reading the input has raised.
        """
        from websockets.exceptions import ConnectionClosed  # noqa: PLC0415

        problem = ""
        count = 0
        try:
            while True:
                doing = f"the stream of {self._channel.url} went on, behind {count} chunks"
                message = await self._channel.in_time(self._socket.recv(), self._deadline, doing)
                if isinstance(message, str):
                    problem = message
                else:
                    count += 1
                    yield Payload(MSGPACK, (message,))
        except ConnectionClosed as closed:
            await self._end(closed, problem)
        finally:
            await self.close()

    async def only(self) -> Payload:
        """Return the answer of an endpoint that answers once.

        Raises:
            CallError: As for `answers`.
        """
        found = [payload async for payload in self.answers()]
        if len(found) != 1:
            raise InvalidOutput(f"{len(found)} answers came; the endpoint streams them")
        return found[0]

    async def _end(self, closed: "ConnectionClosed", problem: str) -> None:
        if self._feeding.done() and not self._feeding.cancelled():
            self._feeding.result()
        code = 0 if closed.rcvd is None else closed.rcvd.code
        if problem and code > _CLOSE_ERROR:
            raise failure(code - _CLOSE_ERROR, problem.encode(), {})
        if code == _TOO_BIG:
            raise PayloadTooLarge("a value is larger than the server takes in one message")
        if code != 1000:
            raise ReplicaLost(f"the stream broke off before its end: {closed}", reason=BROKEN)

    async def close(self) -> None:
        """Hang up; the work behind it is cancelled if it has not ended."""
        self._socket.transport.abort()
        self._feeding.cancel()
        await asyncio.wait([self._feeding])
