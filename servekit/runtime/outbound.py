"""An iterator that a caller gives as input, as the chunks of a call."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from servekit.core.call import Payload
from servekit.errors import InvalidInput
from servekit.spec.schema import InboundSchema

_END: Final = object()


def outbound(stream: Any, schema: InboundSchema, accept: str) -> AsyncIterator[Payload]:
    """Return the chunks that carry an iterator's values; nothing is read yet.

    A plain iterator is read in a thread, as its values may be slow to come.

    Raises:
        InvalidInput: It is no iterator.
    """
    if hasattr(stream, "__aiter__"):
        return _encoded(aiter(stream), schema, accept)
    if hasattr(stream, "__iter__") and not isinstance(stream, str | bytes):
        return _encoded(_from_thread(iter(stream)), schema, accept)
    raise InvalidInput(
        f"{schema.name!r} streams; give an iterator, not {type(stream).__name__}",
        reason="arguments",
        started=False,
    )


async def _encoded(
    values: AsyncIterator[Any], schema: InboundSchema, accept: str
) -> AsyncIterator[Payload]:
    try:
        async for value in values:
            yield schema.encode(value, accept=accept)
    finally:
        if (aclose := getattr(values, "aclose", None)) is not None:
            await aclose()


async def _from_thread(values: Iterator[Any]) -> AsyncIterator[Any]:
    while (value := await asyncio.to_thread(next, values, _END)) is not _END:
        yield value
