"""Bodies that come in pieces and are no stream to their method: forms, and whole files.

A form's fields become the document that a JSON body would be; its files, and a body that is a file,
become `File`s, which lie on disk from 1 MiB on. Who reads it has refused it already if it is too
large.
"""

import tempfile
from collections.abc import AsyncIterator
from typing import Any, Final

from servekit.core.call import FORM, JSON, Call, Payload
from servekit.errors import BadRequest
from servekit.spec.body import media_type
from servekit.spec.file import File
from servekit.spec.form import document
from servekit.spec.schema import InputSchema

_IN_MEMORY: Final = 1 << 20
"""Bytes of a file that are kept in memory."""
_MAX_FIELDS: Final = 1000
_MAX_FILES: Final = 1000


async def receive(call: Call, schema: InputSchema) -> None:
    """Read the chunks of a call into its payload.

    Raises:
        CallError: The body broke off, or is no form.
    """
    chunks = call.chunks
    assert chunks is not None
    content_type = call.payload.content_type
    if media_type(content_type) == FORM:
        fields = await _read_form(content_type, chunks)
        call.payload = Payload(JSON, document(fields, schema.json_schema))
    else:
        segments: list[Any] = [File(await _spool(chunks), content_type=content_type)]
        call.payload = Payload(content_type, segments)
    call.chunks = None


async def _spool(chunks: AsyncIterator[Payload]) -> Any:
    file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  (File owns it)
    async for chunk in chunks:
        file.write(chunk.segments[0])
    return file


async def _read_form(
    content_type: str, chunks: AsyncIterator[Payload]
) -> list[tuple[str, str | File]]:
    from starlette.datastructures import Headers, UploadFile  # noqa: PLC0415  (only for forms)
    from starlette.formparsers import MultiPartException, MultiPartParser  # noqa: PLC0415

    async def pieces() -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield bytes(chunk.segments[0])

    parser = MultiPartParser(
        Headers({"content-type": content_type}),
        pieces(),  # type: ignore[arg-type]  # any async iterator will do
        max_fields=_MAX_FIELDS,
        max_files=_MAX_FILES,
        max_part_size=_IN_MEMORY,
    )
    parser.spool_max_size = _IN_MEMORY
    try:
        form = await parser.parse()
    except (MultiPartException, KeyError) as error:
        why = getattr(error, "message", "") or f"its header lacks {error}"
        raise BadRequest(f"invalid {FORM}: {why[:200]}", started=False) from None
    return [
        (
            name,
            File(
                value.file,
                name=value.filename or "",
                content_type=value.content_type or "application/octet-stream",
            )
            if isinstance(value, UploadFile)
            else value,
        )
        for name, value in form.multi_items()
    ]
