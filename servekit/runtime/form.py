"""Bodies that come in pieces and are no stream to their method: forms, and whole files.

A form's fields become the document that a JSON body would be; its files, and a body that is a file,
become `File`s, which lie on disk from 1 MiB on. Who reads it has refused it already if it is too
large.
"""

import tempfile
from collections.abc import AsyncIterator
from typing import Any, Final

from servekit.core.call import FORM, JSON, Call, Payload
from servekit.spec.body import media_type
from servekit.spec.file import File
from servekit.spec.form import document
from servekit.spec.schema import InputSchema

IN_MEMORY: Final = 1 << 20
"""Bytes of a file that are kept in memory."""


async def receive(call: Call, schema: InputSchema) -> None:
    """Read the chunks of a call into its payload.

    Raises:
        CallError: The body broke off, or is no form.
    """
    chunks = call.chunks
    assert chunks is not None
    content_type = call.payload.content_type
    if media_type(content_type) == FORM:
        from servekit.runtime.multipart import read_form  # noqa: PLC0415  (starlette comes with it)

        fields = await read_form(content_type, chunks, in_memory=IN_MEMORY)
        call.payload = Payload(JSON, document(fields, schema.json_schema))
    else:
        segments: list[Any] = [File(await _spool(chunks), content_type=content_type)]
        call.payload = Payload(content_type, segments)
    call.chunks = None


async def _spool(chunks: AsyncIterator[Payload]) -> Any:
    file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115  (a File owns it)
    try:
        async for chunk in chunks:
            file.write(chunk.segments[0])
    except BaseException:
        file.close()
        raise
    return file


def drop(call: Call) -> None:
    """Close the files of a call whose arguments were refused: nobody else will."""
    for segment in call.payload.segments:
        if isinstance(segment, File):
            segment.close()
