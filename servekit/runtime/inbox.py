"""Input that streams, as the method that reads it sees it: an iterator of typed chunks."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Self

from servekit.core.aio import END, next_or_end
from servekit.core.call import Call, Payload
from servekit.errors import BadRequest
from servekit.spec.schema import InboundSchema


def inbox(schema: InboundSchema, call: Call, *, is_async: bool, decoded: bool = False) -> Any:
    """Return a call's chunks as an async iterator, or as a plain one for a thread.

    Reading raises `CallError` where a chunk is wrong, or where the input broke off.

    Args:
        schema: The parameter.
        call: Its `chunks` are read.
        is_async: Whether the method reads it on the loop.
        decoded: The chunks are values already.

    Raises:
        BadRequest: The call brings a whole body.
    """
    if call.chunks is None:
        raise BadRequest(f"{schema.name!r} streams; send it in chunks", started=False)
    values: AsyncIterator[Any] = call.chunks
    if not decoded:
        values = _Decoded(schema, call.chunks, internal=call.internal)
    return values if is_async else _in_thread(values)


class _Decoded:
    """Typed chunks. No generator: a reader may give up waiting for one, and ask again."""

    def __init__(
        self, schema: InboundSchema, chunks: AsyncIterator[Payload], *, internal: bool
    ) -> None:
        self._schema = schema
        self._chunks = chunks
        self._internal = internal

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return self._schema.decode(await anext(self._chunks), internal=self._internal)


def _in_thread(chunks: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterate in another thread over what belongs to the running loop."""
    loop = asyncio.get_running_loop()

    def following() -> Any:
        return asyncio.run_coroutine_threadsafe(next_or_end(chunks), loop).result()

    def iterate() -> Iterator[Any]:
        while (chunk := following()) is not END:
            yield chunk

    return iterate()
