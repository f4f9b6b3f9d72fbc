"""Reading multipart forms (RFC 7578), with Starlette's parser.

Imports starlette, so others import it late, when a form has come.
"""

from collections.abc import AsyncIterator
from typing import Final

from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from servekit.core.call import BINARY, FORM, Payload
from servekit.errors import BadRequest
from servekit.spec.file import File

_MAX_FIELDS: Final = 1000
_MAX_FILES: Final = 1000


class _Parser(MultiPartParser):
    """Starlette's, which does not mind a form that breaks off."""

    ended = False

    def on_end(self) -> None:
        self.ended = True

    def close(self) -> None:
        for file in self._files_to_close_on_error:
            file.close()


async def read_form(
    content_type: str, chunks: AsyncIterator[Payload], *, in_memory: int
) -> list[tuple[str, str | File]]:
    """Return a form's names and values in their order; a part with a file name is a `File`.

    Args:
        content_type: With the boundary.
        chunks: Pieces of the body.
        in_memory: Bytes of one file that stay in memory, and of one field that are allowed.

    Raises:
        CallError: It is no form, or breaks off.
    """

    async def pieces() -> AsyncIterator[bytes]:
        async for chunk in chunks:
            yield bytes(chunk.segments[0])

    parser = _Parser(
        Headers({"content-type": content_type}),
        pieces(),  # type: ignore[arg-type]  # any async iterator will do
        max_fields=_MAX_FIELDS,
        max_files=_MAX_FILES,
        max_part_size=in_memory,
    )
    parser.spool_max_size = in_memory
    try:
        form = await parser.parse()
        if not parser.ended:
            raise BadRequest(f"the {FORM} breaks off before its last boundary", started=False)
    except (MultiPartException, KeyError) as error:
        parser.close()
        why = getattr(error, "message", "") or f"its header lacks {error}"
        raise BadRequest(f"invalid {FORM}: {why[:200]}", started=False) from None
    except BaseException:
        parser.close()
        raise
    return [
        (name, _file(value) if isinstance(value, UploadFile) else value)
        for name, value in form.multi_items()
    ]


def _file(upload: UploadFile) -> File:
    name, content_type = upload.filename or "", upload.content_type or BINARY
    return File(upload.file, name=name, content_type=content_type)
