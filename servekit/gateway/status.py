"""The first line of an answer, with the headers that all answers have."""

from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState


class _Lines:
    source: list[tuple[bytes, bytes]] | None = None
    text = b""


def status_line(status: int, state: ServerState) -> bytes:
    """Return it as it is sent; uvicorn's default headers (the date) change once per second."""
    headers = state.default_headers
    if headers is not _Lines.source:
        _Lines.source = headers
        _Lines.text = b"".join([b"%b: %b\r\n" % header for header in headers])
    return STATUS_LINE[status] + _Lines.text
