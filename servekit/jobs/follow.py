"""Reading a job's events to their end, past the loss of whoever tells them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from math import inf
from typing import Final

import msgspec

from servekit.core.call import Call, Handler, Payload, now
from servekit.core.job import JobEvent
from servekit.errors import ReplicaLost, Unavailable

_AGAIN_S: Final = 0.5


async def follow(
    handler: Handler, ask: Callable[[int], Call], *, after: int = 0, give_up_s: float = inf
) -> AsyncGenerator[tuple[int, Payload]]:
    """Yield each event with its number; when they break off, those that are missing are asked for.

    Args:
        handler: Answers the calls.
        ask: Returns the call for the events behind a number.
        after: Number of the last event that is known.
        give_up_s: How long nobody may answer.

    Raises:
        CallError: There is no such job, or nobody has answered for too long.
    """
    heard = now()
    while True:
        try:
            reply = await handler(ask(after))
            assert reply.stream is not None
            try:
                async for chunk in reply.stream:
                    after = msgspec.json.decode(bytes(chunk.segments[0]), type=JobEvent).number
                    heard = now()
                    yield after, chunk
            finally:
                await reply.aclose()
        except (ReplicaLost, Unavailable):
            if now() - heard > give_up_s:
                raise
            await asyncio.sleep(_AGAIN_S)
        else:
            return
