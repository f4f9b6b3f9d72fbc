"""Frames that both halves of a connection send: chunks of a stream, and errors."""

from collections.abc import Sequence
from typing import Final

import msgspec

from servekit.core.call import Buffer, Load, Payload
from servekit.errors import CallError, call_error
from servekit.wire.frames import Encode, ErrorHeader, encode

_pack = msgspec.msgpack.Encoder().encode
_unpack_error = msgspec.msgpack.Decoder(ErrorHeader).decode
_NO_LOAD: Final = Load()


def encode_chunks(
    encode: Encode, one: int, many: int, id_: int, chunks: Sequence[Payload]
) -> list[Buffer]:
    """Return the frame of chunks that leave together, of the kind `one` if it is only one.

    Args:
        encode: Makes the frame.
        one: Kind of a frame with one chunk of any number of segments.
        many: Kind of a frame with as many chunks as segments.
        id_: Of the call.
        chunks: Not empty.

    Raises:
        WireError: They are too large for a frame.
    """
    content_type = chunks[0].content_type.encode()
    if len(chunks) == 1:
        return encode(one, id_, content_type, chunks[0].segments)
    return encode(many, id_, content_type, [chunk.segments[0] for chunk in chunks])


def encode_error(kind: int, id_: int, error: CallError, load: Load = _NO_LOAD) -> list[Buffer]:
    """Return the frame of a failure; what is too long for one, or no text, is cut."""
    head = ErrorHeader(
        error.code,
        error.message,
        error.reason,
        error.retry_after_s,
        [dict(field) for field in error.fields],
        error.started,
        load,
    )
    try:
        return encode(kind, id_, _pack(head))
    except Exception:  # noqa: BLE001  (the other side must not wait for ever)
        message = str(error.message)[:1000].encode("utf-8", "replace").decode()
        short = msgspec.structs.replace(head, message=message, reason=error.code, fields=[])
        return encode(kind, id_, _pack(short))


def read_error(header: Buffer) -> tuple[CallError, Load]:
    """Return the error of a frame, and the load that rode on it."""
    head = _unpack_error(header)
    error = call_error(
        head.code,
        head.message,
        reason=head.reason,
        retry_after_s=head.retry_after_s,
        fields=head.fields,
        started=head.started,
    )
    return error, head.load
