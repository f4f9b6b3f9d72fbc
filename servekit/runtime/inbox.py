"""Input that streams, as the method that reads it sees it: an iterator of typed chunks."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final, Self

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
    decoded = _Decoded(schema, call.chunks, internal=call.internal)
    return decoded if is_async else _in_thread(decoded)


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

    async def following() -> Any:
        return await anext(chunks, _END)

    def iterate() -> Iterator[Any]:
        while (chunk := asyncio.run_coroutine_threadsafe(following(), loop).result()) is not _END:
            yield chunk

    return iterate()
