"""ASGI messages as chunks: plain data, of which bodies are most."""

from typing import Any

import msgspec

from servekit.core.call import MSGPACK, Payload

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


def pack_message(message: Any) -> Payload:
    """Return the chunk that carries a message."""
    return Payload(MSGPACK, (_pack(dict(message)),))


def unpack_message(chunk: Payload) -> dict[str, Any]:
    """Return the message that a chunk carries; its headers are pairs of bytes."""
    message: dict[str, Any] = _unpack(chunk.segments[0])
    return message
