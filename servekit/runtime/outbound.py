"""An iterator that a caller gives as input, as the chunks of a call.

An async iterator is read on the event loop on which it was given, a plain one in a thread, as its
values may be slow to come; whoever sends them may run on another loop.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

from servekit.core.aio import END, aclose, next_or_end, running_loop
from servekit.errors import InvalidInput
from servekit.spec.schema import InboundSchema


def outbound(
    stream: Any, schema: InboundSchema, accept: str | None, loop: asyncio.AbstractEventLoop
) -> AsyncIterator[Any]:
    """Return the chunks that carry an iterator's values, to be read on `loop`; nothing is read yet.

    Args:
        stream: The iterator.
        schema: The parameter that it is for.
        accept: As in `InputSchema.encode`; None leaves the values as they are.
        loop: Where they are read.

    Raises:
        InvalidInput: It is no iterator.
    """
    if (values := values_of(stream, loop)) is None:
        raise InvalidInput(
            f"{schema.name!r} streams; give an iterator, not {type(stream).__name__}",
            reason="arguments",
            started=False,
        )
    return _encoded(values, schema, accept)


def values_of(stream: Any, loop: asyncio.AbstractEventLoop) -> AsyncIterator[Any] | None:
    """Return an iterator's values, to be read on `loop`; None if it is none."""
    if hasattr(stream, "__aiter__"):
        home = running_loop()
        return aiter(stream) if home in (None, loop) else _from_loop(aiter(stream), home)
    if hasattr(stream, "__iter__") and not isinstance(stream, str | bytes):
        return _from_thread(iter(stream))
    return None


async def _encoded(
    values: AsyncIterator[Any], schema: InboundSchema, accept: str | None
) -> AsyncIterator[Any]:
    try:
        async for value in values:
            yield value if accept is None else schema.encode(value, accept=accept)
    finally:
        await aclose(values)


async def _from_loop(
    values: AsyncIterator[Any], home: asyncio.AbstractEventLoop
) -> AsyncIterator[Any]:
    async def there(work: Coroutine[Any, Any, Any]) -> Any:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, home))

    try:
        while (value := await there(next_or_end(values))) is not END:
            yield value
    finally:
        await there(aclose(values))


async def _from_thread(values: Iterator[Any]) -> AsyncIterator[Any]:
    while (value := await asyncio.to_thread(next, values, END)) is not END:
        yield value
