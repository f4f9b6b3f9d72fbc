"""Input that streams, as the method that reads it sees it: an iterator of typed chunks."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from servekit.core.call import Call, Payload
from servekit.errors import BadRequest
from servekit.spec.schema import InboundSchema

_END: Final = object()


def inbox(schema: InboundSchema, call: Call, *, is_async: bool) -> Any:
    """Return a call's chunks as an async iterator, or as a plain one for a thread.

    Reading raises `CallError` where a chunk is wrong, or where the input broke off.

    Raises:
        BadRequest: The call brings a whole body.
    """
    if call.chunks is None:
        raise BadRequest(f"{schema.name!r} streams; send it in chunks", started=False)
    if is_async:
        return _decoded(schema, call.chunks, internal=call.internal)
    return _in_thread(_decoded(schema, call.chunks, internal=call.internal))


async def _decoded(
    schema: InboundSchema, chunks: AsyncIterator[Payload], *, internal: bool
) -> AsyncIterator[Any]:
    async for chunk in chunks:
        yield schema.decode(chunk, internal=internal)


def _in_thread(chunks: AsyncIterator[Any]) -> Iterator[Any]:
    """Iterate in another thread over what belongs to the running loop."""
    loop = asyncio.get_running_loop()

    async def following() -> Any:
        return await anext(chunks, _END)

    def iterate() -> Iterator[Any]:
        while (chunk := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not _END:
            yield chunk

    return iterate()
