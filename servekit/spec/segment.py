"""The stand-ins, in a JSON document, for arrays and bytes that travel beside it.

An array in a payload of several segments is written as::

    {"$servekit:segment": 1, "dtype": "float32", "shape": [2, 3]}

and bytes as the same without dtype and shape. The number is an index into `Payload.segments`. In
pydantic's validation `context` travel the segments, in its serialization `context` the list that
new ones are appended to; None means a plain JSON document, whose stand-ins are never believed.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from servekit.core.call import Buffer
from servekit.spec.tensor import AnyArray, ArrayError, dtype_name, from_buffer, to_buffer

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

KEY = "$servekit:segment"


def put_array(array: AnyArray, segments: list[Buffer]) -> dict[str, Any]:
    """Append an array's bytes to the segments, and return its stand-in."""
    segments.append(to_buffer(array))
    return {KEY: len(segments) - 1, "dtype": dtype_name(array.dtype), "shape": array.shape}


def put_bytes(data: Buffer, segments: list[Buffer]) -> dict[str, Any]:
    """Append bytes to the segments, and return their stand-in."""
    segments.append(data)
    return {KEY: len(segments) - 1}


def get_array(holder: Any, segments: Sequence[Buffer] | None) -> AnyArray:
    """View the array that a stand-in stands for.

    Raises:
        ArrayError: It is none, or doesn't match its segment.
    """
    data = find(holder, segments)
    if data is None:
        raise ArrayError("array_type", "wanted an array, got an object")
    dtype, shape = holder.get("dtype"), holder.get("shape")
    if not isinstance(dtype, str) or not isinstance(shape, list):
        raise ArrayError("array_type", "wanted an array, got bytes")
    sizes = cast("list[object]", shape)
    if not all(type(size) is int for size in sizes):
        raise ArrayError("array_shape", "a shape is a list of ints")
    return from_buffer(data, dtype, cast("list[int]", sizes))


def get_bytes(holder: Any, segments: Sequence[Buffer] | None) -> bytes:
    """Return the bytes that a stand-in stands for.

    Raises:
        ArrayError: It is none, or stands for an array.
    """
    data = find(holder, segments)
    if data is None or "dtype" in holder:
        raise ArrayError("bytes_type", "wanted bytes as a base64 string")
    return bytes(data)


def find(value: Any, segments: Sequence[Buffer] | None) -> Buffer | None:
    """Return the segment that a JSON value stands for; None if it isn't a stand-in.

    A caller's own object may happen to have our key, so anything odd just isn't one.
    """
    if not segments or not isinstance(value, dict):
        return None
    index = cast("dict[str, Any]", value).get(KEY)
    if type(index) is not int or not 0 < index < len(segments):
        return None
    return segments[index]


class BytesSpec:
    """Metadata of a `bytes` hint: a segment between services, base64 in plain JSON."""

    __slots__ = ()

    @staticmethod
    def _from_json(value: Any, info: Any) -> bytes:
        from pydantic_core import PydanticCustomError  # noqa: PLC0415

        if isinstance(value, str):
            try:
                return base64.b64decode(value.translate(_STANDARD), validate=True)
            except (binascii.Error, ValueError):
                raise PydanticCustomError("bytes_base64", "wanted bytes as base64") from None
        try:
            return get_bytes(value, info.context)
        except ArrayError:
            raise PydanticCustomError("bytes_type", "wanted bytes as a base64 string") from None

    @staticmethod
    def _serialize(value: Any, info: Any) -> Any:
        if not isinstance(value, bytes):
            from pydantic_core import PydanticSerializationUnexpectedValue  # noqa: PLC0415

            raise PydanticSerializationUnexpectedValue(f"wanted bytes, got {type(value).__name__}")
        if info.context is None:
            return base64.b64encode(value).decode()
        return put_bytes(value, info.context)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> "CoreSchema":
        from pydantic_core import core_schema  # noqa: PLC0415

        return core_schema.json_or_python_schema(
            core_schema.with_info_plain_validator_function(self._from_json),
            core_schema.bytes_schema(strict=True),
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._serialize, info_arg=True, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"type": "string", "contentEncoding": "base64"}


_STANDARD = str.maketrans("-_", "+/")
