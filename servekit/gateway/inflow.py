"""What a client sends by way of ASGI, as the chunks of a call, for as long as it stays.

Messages are taken as they come, also while nobody asks for them, so that a client that leaves is
noticed at once; a few may wait, after that the client has to.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Final, TypeVar

from starlette.types import Message, Receive

from servekit.core.call import Payload
from servekit.errors import CallError

T = TypeVar("T")

_WAITING: Final = 64
_LEAVE_S: Final = 5.0
"""What a call gets to end by itself when its client has left in good order."""
_IN_ORDER: Final = (1000, 1001)
"""Codes with which a WebSocket is closed on purpose (RFC 6455, 7.4.1)."""


class Inflow:
    """One client's messages.

    Args:
        receive: ASGI's.
        convert: Makes a chunk of a message; None ends the input. May raise a `CallError`, which
            the reader of the chunks gets.

    Attributes:
        left: The client is gone.
        answered: The client has all of its answer; what still runs is no longer its own.
    """

    def __init__(self, receive: Receive, convert: Callable[[Message], Payload | None]) -> None:
        self._receive = receive
        self._convert = convert
        self._waiting: asyncio.Queue[Payload | CallError | None] = asyncio.Queue(_WAITING)
        self.left = self.answered = False

    async def chunks(self) -> AsyncIterator[Payload]:
        """Yield the input."""
        while (chunk := await self._waiting.get()) is not None:
            if isinstance(chunk, CallError):
                raise chunk
            yield chunk

    async def while_there(self, answer: Coroutine[Any, Any, T]) -> T:
        """Run what answers the client, and end it when the client has left.

        Raises:
            CancelledError: It was ended.
        """
        answering = asyncio.ensure_future(answer)
        reading = asyncio.ensure_future(self._read())
        try:
            await asyncio.wait((answering, reading), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done() and not self.answered:
                await asyncio.wait((answering,), timeout=_LEAVE_S if reading.result() else 0)
            if not self.answered:
                answering.cancel()
            return await answering
        finally:
            reading.cancel()
            answering.cancel()
            await asyncio.gather(reading, answering, return_exceptions=True)

    async def _read(self) -> bool:
        """Take messages until the client has left; returns whether it did so in good order."""
        while True:
            message = await self._receive()
            self.left = message["type"].endswith(".disconnect")
            try:
                chunk: Payload | CallError | None = self._convert(message)
            except CallError as error:
                chunk = error
            await self._waiting.put(chunk)
            if self.left:
                await self._waiting.put(None)
                return message.get("code", 1000) in _IN_ORDER
