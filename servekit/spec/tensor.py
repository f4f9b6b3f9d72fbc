"""Arrays as bytes and as nested lists. All of servekit's numpy code that a spec needs is here.

numpy (and torch) are imported by the calls, never by this module. Every reader treats its input
as hostile: dtypes come from a fixed table, sizes are compared before anything is allocated, and
what doesn't fit raises `ArrayError`, which says what was wanted and what came.
"""

import sys
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from servekit.core.call import Buffer
from servekit.spec.raw import RawError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

AnyArray: TypeAlias = "NDArray[Any]"
Library: TypeAlias = Literal["numpy", "torch"]

ITEM_BYTES = {
    "bool": 1,
    **{f"{sign}int{bits}": bits // 8 for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": bits // 8 for bits in (16, 32, 64)},
}
"""Bytes per element of each dtype that can travel; the data is always little-endian, C order."""

MAX_RANK = 32
_NPY_HEADER_BYTES = 10_000


class ArrayError(RawError):
    """A value isn't the array that was declared.

    Its kind is `"array_shape"`, `"array_dtype"`, `"array_bytes"` or `"array_type"`.
    """


def int_range(dtype: str) -> tuple[int, int]:
    """Return the smallest and the largest number of an int dtype."""
    bits = 8 * ITEM_BYTES[dtype]
    return (0, 2**bits - 1) if dtype[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def layout(value: object, library: Library) -> tuple[str, tuple[int, ...]] | None:
    """Return dtype and shape of the library's array; None if the value isn't one.

    Never imports the library to find out, and moves nothing off a device.
    """
    module: Any = sys.modules.get(library)
    if module is None:
        return None
    array = cast("Any", value)
    if library == "torch":
        if not isinstance(value, module.Tensor):
            return None
        return str(array.dtype).removeprefix("torch."), tuple(array.shape)
    if not isinstance(value, (module.ndarray, module.generic)):
        return None
    return dtype_name(array.dtype), array.shape


@lru_cache(maxsize=64)
def dtype_name(dtype: "np.dtype[Any]") -> str:
    """Return numpy's name of a dtype; numpy itself takes 2 µs to make it up."""
    return dtype.name


@lru_cache(maxsize=64)
def _little_endian(dtype: "str | np.dtype[Any]") -> "np.dtype[Any]":
    import numpy as np  # noqa: PLC0415

    return np.dtype(dtype).newbyteorder("<")


def as_tensor(array: "AnyArray") -> Any:
    """Return a torch tensor of its own memory; one that is read-only is copied for it."""
    torch = sys.modules["torch"]  # A hint names torch.Tensor, so it is there.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def as_numpy(value: Any) -> "AnyArray":
    """Return an array as numpy's own; a torch tensor comes from whatever device it is on."""
    array: AnyArray = value.detach().cpu().numpy() if hasattr(value, "detach") else value
    return array


def from_buffer(data: Buffer, dtype: str, shape: Sequence[int]) -> "AnyArray":
    """View bytes as an array, without a copy; read-only if `data` is.

    Raises:
        ArrayError: The dtype is unknown, or the shape doesn't hold that many bytes.
    """
    import numpy as np  # noqa: PLC0415

    if dtype not in ITEM_BYTES:
        raise ArrayError("array_dtype", f"unknown dtype {dtype[:20]!r}")
    if len(shape) > MAX_RANK or any(size < 0 for size in shape):
        raise ArrayError("array_shape", f"no array has the shape {_short(tuple(shape))}")
    wanted = prod(shape) * ITEM_BYTES[dtype]
    got = memoryview(data).nbytes
    if wanted != got:
        raise ArrayError(
            "array_bytes", f"{dtype} of shape {_short(tuple(shape))} is {wanted} bytes, got {got}"
        )
    try:
        return np.frombuffer(data, _little_endian(dtype)).reshape(shape)
    except ValueError as error:  # (0, 2**62): as many bytes as promised, but no numpy array
        raise ArrayError("array_shape", f"shape {_short(tuple(shape))}: {error}") from None


def to_buffer(array: "AnyArray") -> memoryview:
    """View an array as its bytes; copies only what isn't contiguous and little-endian."""
    import numpy as np  # noqa: PLC0415

    little = np.ascontiguousarray(array, _little_endian(array.dtype))
    return little.reshape(-1).view(np.uint8).data


def from_lists(value: Any, dtype: str) -> "AnyArray":
    """Build an array from nested JSON lists (or one bare number: shape `()`).

    Ints may become floats, nothing else is converted: no float for an int dtype, no bool for a
    number, no int outside of the dtype's range, no float that overflows it. With dtype `""` the
    array is bool, int64 or float64.

    Raises:
        ArrayError: Ragged, too deep, or a float overflows; with the path.
        pydantic_core.ValidationError: An element has the wrong type, with the path.
    """
    import numpy as np  # noqa: PLC0415

    rank = 0
    leaf: Any = value
    while isinstance(leaf, list):
        rank += 1
        leaf = cast("Sequence[Any]", leaf)[0] if leaf else None
    if rank > MAX_RANK:
        raise ArrayError("array_shape", f"nested deeper than {MAX_RANK} lists")
    checked: Any = _elements(dtype or ("bool" if leaf is True or leaf is False else ""), rank)
    checked = checked.validate_python(value)
    try:
        with np.errstate(over="ignore"):
            # Without a dtype the original is read, where ints are still ints.
            array: AnyArray = np.array(checked if dtype else value, dtype or None)
    except ValueError:
        raise _ragged(value) from None
    if not dtype and array.size == 0:
        array = array.astype(np.float64)
    if array.dtype.name not in ("bool", "int64", "float64", dtype):
        raise ArrayError("array_dtype", "an int doesn't fit into int64")
    if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
        where = [int(i) for i in np.argwhere(~finite)[0]]
        raise ArrayError("array_dtype", f"the number doesn't fit into {array.dtype.name}", where)
    return array


@lru_cache(maxsize=256)
def _elements(dtype: str, rank: int) -> Any:
    """Return the validator of nested lists of that depth: kinds and ranges, not lengths."""
    from pydantic_core import SchemaValidator, core_schema  # noqa: PLC0415

    schema: core_schema.CoreSchema
    if dtype == "bool":
        schema = core_schema.bool_schema(strict=True)
    elif "int" in dtype:
        low, high = int_range(dtype)
        schema = core_schema.int_schema(strict=True, ge=low, le=high)
    else:
        schema = core_schema.float_schema(strict=True, allow_inf_nan=False)
    for _ in range(rank):
        schema = core_schema.list_schema(schema, fail_fast=True)
    return SchemaValidator(schema)


def _ragged(value: list[Any]) -> ArrayError:
    """Find the first list whose length differs from its elder siblings'."""
    level: list[tuple[tuple[int, ...], list[Any]]] = [((), value)]
    while level:
        wanted = len(level[0][1])
        for path, row in level:
            if len(row) != wanted:
                return ArrayError("array_shape", f"wanted {wanted} items, got {len(row)}", path)
        level = [
            ((*path, i), item)
            for path, row in level
            for i, item in enumerate(row)
            if isinstance(item, list)
        ]
    return ArrayError("array_dtype", "a number doesn't fit into the array")


def read_npy(data: Buffer) -> "AnyArray":
    """View a `.npy` file as an array; copies only big-endian data. Never unpickles.

    Raises:
        ArrayError: It is no such file, or its sizes don't agree.
    """
    import io  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415

    view = memoryview(data).cast("B")
    file = io.BytesIO(view[: _NPY_HEADER_BYTES + 12])
    dtype: np.dtype[Any]
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = read(file, max_header_size=_NPY_HEADER_BYTES)
    except Exception as error:  # noqa: BLE001  (numpy evaluates the header: anything may come)
        raise ArrayError("array_bytes", f"not a .npy file: {_short(error)}") from None
    if any(type(size) is not int for size in shape):  # numpy takes (True, 2)
        raise ArrayError("array_shape", f"a shape is a tuple of ints, got {_short(shape)}")
    if dtype.name not in ITEM_BYTES:
        raise ArrayError("array_dtype", f"a .npy file of dtype {dtype.name[:20]!r} can't be read")
    body = view[file.tell() :]
    if dtype.byteorder == ">" and len(body) % dtype.itemsize == 0:
        body = to_buffer(np.frombuffer(body, dtype))
    array = from_buffer(body, dtype.name, shape[::-1] if fortran else shape)
    return array.T if fortran else array


def write_npy(array: "AnyArray") -> bytes:
    """Return the array as a `.npy` file, version 1.0."""
    import io  # noqa: PLC0415

    import numpy as np  # noqa: PLC0415

    file = io.BytesIO()
    np.lib.format.write_array(file, array, version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
