"""Bodies as the outside world sends them: media types, MessagePack, NaN, the Accept header.

All of it is brought to one form, a JSON document with segments beside it, before any type is looked
at; so every media type has the same meaning.

Arrays in MessagePack are extension type 1: a little-endian uint16 `n`, then `n` bytes of MessagePack
`[dtype, shape]`, then the elements, little-endian in C order.
"""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec

from servekit.core.call import JSON, MSGPACK, Buffer
from servekit.errors import BadRequest, UnsupportedMedia
from servekit.spec import segment
from servekit.spec.tensor import AnyArray, ArrayError, from_buffer

ARRAY_EXT = 1
_OVERFLOW = re.compile(rb"[eE]\+?0*[1-9][0-9]{2}|[0-9]{309}")
_NAMES = {"application/x-msgpack": MSGPACK, "application/vnd.msgpack": MSGPACK, "": JSON}


@lru_cache(maxsize=256)
def media_type(content_type: str) -> str:
    """Return a content type's bare name: lower case, no parameters, "" read as JSON."""
    name = content_type.partition(";")[0].strip().lower()
    return _NAMES.get(name, name)


@lru_cache(maxsize=256)
def negotiate(accept: str, offers: tuple[str, ...]) -> str:
    """Choose what to answer with (RFC 9110, 12.5.1); of equals the first offer.

    Raises:
        UnsupportedMedia: The caller takes none of the offers.
    """
    ranges: dict[str, float] = {}
    for part in accept.split(","):
        name, *parameters = part.split(";")
        if name := name.strip().lower():
            ranges[_NAMES.get(name, name)] = _quality(parameters)
    if not ranges:
        return offers[0]

    def quality(offer: str) -> float:
        for name in (offer, offer.partition("/")[0] + "/*", "*/*"):
            if name in ranges:
                return ranges[name]
        return 0.0

    best = max(offers, key=quality)
    if quality(best) <= 0:
        raise UnsupportedMedia(
            f"can't answer with {accept[:100]!r}; can with {', '.join(offers)}",
            reason="not_acceptable",
            started=False,
        )
    return best


def _quality(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


# ---- MessagePack


def from_msgpack(data: Buffer) -> list[Buffer]:
    """Turn a MessagePack body into a JSON document and the segments of its arrays.

    Raises:
        BadRequest: It is no MessagePack, or an array in it is broken.
    """
    from pydantic_core import to_json  # noqa: PLC0415

    segments: list[Buffer] = [b""]

    def stand_in(code: int, content: memoryview) -> dict[str, Any]:
        if code != ARRAY_EXT:
            raise ArrayError("msgpack", f"unknown extension type {code}")
        return segment.put_array(_from_ext(content), segments)

    try:
        tree = msgspec.msgpack.decode(data, ext_hook=stand_in)
        # bytes become base64 text, which is what they are in JSON.
        segments[0] = to_json(tree, inf_nan_mode="constants", bytes_mode="base64")
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"invalid MessagePack: {str(error)[:100]}", started=False) from None
    return segments


def _from_ext(content: memoryview) -> AnyArray:
    start = 2 + int.from_bytes(content[:2], "little")
    try:
        dtype, shape = msgspec.msgpack.decode(content[2:start], type=tuple[str, list[int]])
    except msgspec.DecodeError as error:
        raise ArrayError("array_bytes", f"array header: {error}") from None
    return from_buffer(content[start:], dtype, shape)


def to_msgpack(tree: Any, segments: Sequence[Buffer]) -> bytes:
    """Encode a JSON-like tree, its stand-ins replaced by what they stand for."""
    return msgspec.msgpack.encode(_filled(tree, segments) if len(segments) > 1 else tree)


def _filled(tree: Any, segments: Sequence[Buffer]) -> Any:
    if isinstance(tree, dict):
        table = cast("dict[str, Any]", tree)
        data = segment.find(table, segments)
        if data is None:
            return {key: _filled(value, segments) for key, value in table.items()}
        if "dtype" not in table:
            return data
        header = msgspec.msgpack.encode([table["dtype"], list(table["shape"])])
        return msgspec.msgpack.Ext(
            ARRAY_EXT, b"".join((len(header).to_bytes(2, "little"), header, data))
        )
    if isinstance(tree, list | tuple):
        return [_filled(value, segments) for value in cast("list[Any]", tree)]
    return tree


def pack(value: Any) -> bytes:
    """Encode a value as MessagePack; arrays in it become extension type 1.

    Raises:
        TypeError: Something in it has no MessagePack form.
    """
    return msgspec.msgpack.encode(value, enc_hook=_ext)


def _ext(value: Any) -> Any:
    if not hasattr(value, "__array_interface__"):
        raise TypeError(f"a {type(value).__name__} has no MessagePack form")
    segments: list[Buffer] = [b""]
    return _filled(segment.put_array(value, segments), segments)


def unpack(data: Buffer) -> Any:
    """Decode MessagePack; extension type 1 becomes an array.

    Raises:
        BadRequest: It is no MessagePack, or an array in it is broken.
    """

    def array(code: int, content: memoryview) -> AnyArray:
        if code != ARRAY_EXT:
            raise ArrayError("msgpack", f"unknown extension type {code}")
        return _from_ext(content)

    try:
        return msgspec.msgpack.decode(data, ext_hook=array)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise BadRequest(f"invalid MessagePack: {str(error)[:100]}") from None


# ---- numbers that JSON doesn't have


def may_overflow(document: bytes | bytearray) -> bool:
    """Return whether a number too large for a float (`1e400`) may be in a document."""
    return _OVERFLOW.search(document) is not None


def nonfinite(tree: Any) -> str | None:
    """Return the path of the first NaN or infinity in a JSON-like tree, or None."""
    return next(_nonfinite(tree, ()), None)


def _nonfinite(tree: Any, path: tuple[str | int, ...]) -> Iterator[str]:
    if isinstance(tree, float):
        if tree - tree != 0:
            yield path_text(path)
    elif isinstance(tree, dict):
        for key, value in cast("dict[str, Any]", tree).items():
            yield from _nonfinite(value, (*path, key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(cast("list[Any]", tree)):
            yield from _nonfinite(value, (*path, index))


def path_text(path: Sequence[str | int]) -> str:
    """Return a path as people write it: `values[2].score`; "" is the body itself."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")[:200]
