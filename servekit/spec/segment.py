"""The stand-ins, in a JSON document, for arrays and bytes that travel beside it.

An array in a payload of several segments is written as::

    {"$servekit:segment": 1, "dtype": "float32", "shape": [2, 3]}

and bytes as the same without dtype and shape. Other types say more about themselves in it. The number is an index into `Payload.segments`. In
pydantic's validation `context` travel the segments, in its serialization `context` the list that
new ones are appended to; None means a plain JSON document, whose stand-ins are never believed.
"""

from collections.abc import Sequence
from typing import Any, cast

from servekit.core.call import Buffer
from servekit.spec.tensor import AnyArray, ArrayError, dtype_name, from_buffer, to_buffer

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
