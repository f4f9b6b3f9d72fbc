"""`Array["float32", "N 3 224 224"]`: an annotation that says which arrays are welcome.

In flow arrays as segments, nested JSON lists, or numpy arrays; out the same array, or an error that
says what was wanted and what came. Nothing is ever reshaped or cast to fit.
"""

import sys
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, Union, cast

from servekit.core.call import NPY, Buffer
from servekit.errors import SpecError, suggest
from servekit.spec import segment, tensor
from servekit.spec.raw import Form, refuse
from servekit.spec.tensor import ITEM_BYTES, ArrayError, Library

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

    from servekit.spec.tensor import AnyArray


class Array:
    """Annotation of an array parameter, result or field.

    `Array[dtype]` or `Array[dtype, dims]`. The dtype is numpy's name of it, or `"any"`. The dims
    are separated by blanks: a number is fixed, a name stands for any size (the same name twice for
    the same size), a leading `...` for any dims before the others, and `""` is a scalar.

    Type checkers read strings in an annotation as types, so where they look, write
    `Annotated[NDArray[np.float32], Array["float32", "N 3"]]`: they see the array, we see both.
    """

    def __class_getitem__(cls, item: str | tuple[str, str]) -> "ArraySpec":
        """Parse the annotation.

        Raises:
            SpecError: The dtype or the dims can't be read; says how to write them.
        """
        parts = cast("tuple[Any, ...]", item if isinstance(item, tuple) else (item, "..."))
        if len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise SpecError(
                f"Array[{', '.join(map(repr, parts))}]: give a dtype and dims as text, like "
                'Array["float32", "N 3 224 224"]'
            )
        return ArraySpec.parse(*parts)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Which arrays are welcome. Made by `Array[...]`; pydantic understands it as an annotation.

    Attributes:
        dtype: numpy's name of it, or "" for any.
        dims: Sizes, or names of free sizes.
        leading: Any dims may come before `dims`.
        library: What the method gets: numpy arrays or torch tensors.
    """

    dtype: str
    dims: tuple[int | str, ...]
    leading: bool = False
    library: Library = "numpy"

    @classmethod
    def parse(cls, dtype: str, dims: str) -> "ArraySpec":
        """Read an annotation's texts.

        Raises:
            SpecError: One of them is no dtype, or no dims.
        """
        where = f'Array["{dtype}", "{dims}"]'
        if dtype != "any" and dtype not in ITEM_BYTES:
            raise SpecError(
                f"{where}: unknown dtype {dtype!r}.{suggest(dtype, [*ITEM_BYTES])} "
                f"Known: any, {', '.join(ITEM_BYTES)}"
            )
        tokens = dims.split()
        leading = tokens[:1] == ["..."]
        sizes: list[int | str] = []
        for token in tokens[leading:]:
            if token.isascii() and token.isdecimal():
                sizes.append(int(token))
            elif token.isidentifier():
                sizes.append(token)
            else:
                raise SpecError(
                    f"{where}: {token!r} is no dim; write a number, a name for a free size, or "
                    "'...' as the first token, separated by blanks"
                )
        if len(sizes) > tensor.MAX_RANK:
            raise SpecError(f"{where}: over {tensor.MAX_RANK} dims")
        return cls("" if dtype == "any" else dtype, tuple(sizes), leading)

    def __str__(self) -> str:
        dims = ("...",) * self.leading + self.dims
        text = ", ".join(map(str, dims)) + "," * (len(dims) == 1 and not self.leading)
        return f"{self.dtype or 'any dtype'} of shape ({text})"

    def __or__(self, other: Any) -> Any:
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def stacked(self) -> "ArraySpec":
        """Return the spec of many such arrays stacked along a new first axis."""
        return self if self.leading else replace(self, dims=("batch", *self.dims))

    def narrowed(self, base: Any) -> "ArraySpec":
        """Return the spec for `Annotated[base, self]`: with the base's dtype and library.

        Raises:
            SpecError: The base is no array, or of another dtype.
        """
        declared = spec_of(base)
        if declared is None:
            if base is Any:
                return self
            raise SpecError(f"Array[...] describes arrays, but the type beside it is {base!r}")
        if declared.dtype and self.dtype and declared.dtype != self.dtype:
            raise SpecError(f"the type says {declared.dtype}, but Array[...] says {self.dtype}")
        return replace(self, dtype=self.dtype or declared.dtype, library=declared.library)

    # ---- checks

    def check(self, value: object) -> None:
        """Check that a value is a welcome array of the declared library.

        Raises:
            ArrayError: It isn't; says wanted and got.
        """
        layout = tensor.layout(value, self.library)
        if layout is None:
            wanted = {"numpy": "a numpy array", "torch": "a torch.Tensor"}[self.library]
            kind = type(value)
            got = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
            raise ArrayError("array_type", f"wanted {wanted} ({self}), got {got}")
        self._check_layout(*layout)

    def _check_layout(self, dtype: str, shape: tuple[int, ...]) -> None:
        if dtype != self.dtype and (self.dtype or dtype not in ITEM_BYTES):
            wanted = self.dtype or f"one of {', '.join(ITEM_BYTES)}"
            raise ArrayError("array_dtype", f"wanted dtype {wanted}, got {dtype}")
        if not self._fits(shape):
            raise ArrayError("array_shape", f"wanted {self}, got shape {shape}")

    def _fits(self, shape: tuple[int, ...]) -> bool:
        dims = self.dims
        extra = len(shape) - len(dims)
        if extra and (extra < 0 or not self.leading):
            return False
        free: dict[str, int] = {}
        for dim, size in zip(dims, shape[extra:], strict=True):
            if (dim if isinstance(dim, int) else free.setdefault(dim, size)) != size:
                return False
        return True

    # ---- in

    @property
    def form(self) -> Form:
        """How it is a whole body: without a dtype it isn't."""
        return "array" if self.dtype else ""

    def read_raw(self, media_type: str, data: Buffer) -> Any:
        """Return the array of a `.npy` file, or of its bare elements.

        Raises:
            ArrayError: It isn't welcome.
        """
        return self.own(tensor.read_npy(data)) if media_type == NPY else self.from_raw(data)

    def write_raw(self, media_type: str, value: Any) -> Buffer:
        """Return a `.npy` file, or the bare elements."""
        array = tensor.as_numpy(value)
        return tensor.write_npy(array) if media_type == NPY else tensor.to_buffer(array)

    def from_raw(self, data: Buffer) -> Any:
        """View headerless bytes as the array; one free dim is found from their number.

        Raises:
            ArrayError: The bytes don't divide, or more than one size is open.
        """
        if not self.dtype:
            raise ArrayError("array_dtype", "raw bytes need a declared dtype; send a .npy file")
        fixed = [dim for dim in self.dims if isinstance(dim, int)]
        if self.leading or len(self.dims) - len(fixed) > 1:
            raise ArrayError(
                "array_shape", f"raw bytes don't say which shape they have ({self}); send .npy"
            )
        step = prod(fixed) * ITEM_BYTES[self.dtype]
        got = memoryview(data).nbytes
        open_ended = len(fixed) < len(self.dims)
        count, rest = divmod(got, step) if open_ended and step else (1, got - step)
        if rest:
            multiple = "a multiple of " * open_ended
            raise ArrayError("array_bytes", f"{self} takes {multiple}{step} bytes, got {got}")
        shape = [dim if isinstance(dim, int) else count for dim in self.dims]
        return self.own(tensor.from_buffer(data, self.dtype, shape))

    def own(self, array: "AnyArray") -> Any:
        """Check an array that came from outside, and return it in the declared library's form.

        Raises:
            ArrayError: It isn't welcome.
        """
        self._check_layout(tensor.dtype_name(array.dtype), array.shape)
        return tensor.as_tensor(array) if self.library == "torch" else array

    def _from_json(self, value: Any, segments: Any) -> Any:
        if isinstance(value, dict):
            part: Any = segment.find(value, segments)
            if hasattr(part, "content_type"):  # a part of a form
                return self.read_raw(part.content_type, part.read())
            return self.own(segment.get_array(value, segments))
        array = tensor.from_lists(value, self.dtype)
        if 0 in array.shape and array.ndim < len(self.dims) and not self.leading:
            # Lists can't tell (0, 4) from (0,): what lies below an empty list is open.
            rest = self.dims[array.ndim :]
            array = array.reshape(
                (*array.shape, *(dim if isinstance(dim, int) else 0 for dim in rest))
            )
        return self.own(array)

    def _validate(self, value: Any, info: Any) -> Any:
        try:
            if info.mode == "json":
                return self._from_json(value, info.context)
            self.check(value)
        except ArrayError as error:
            refuse(error)
        return value

    # ---- out

    def _serialize(self, value: Any, info: Any) -> Any:
        try:
            self.check(value)
        except ArrayError as error:
            from pydantic_core import PydanticSerializationUnexpectedValue  # noqa: PLC0415

            raise PydanticSerializationUnexpectedValue(error.message) from None
        array = tensor.as_numpy(value)
        if info.context is None:
            return array.tolist()
        return segment.put_array(array, info.context)

    # ---- pydantic's side

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> "CoreSchema":
        return self.narrowed(source).core_schema()

    def core_schema(self) -> "CoreSchema":
        """Return what pydantic-core validates and serializes with."""
        from pydantic_core import core_schema  # noqa: PLC0415

        return core_schema.with_info_plain_validator_function(
            self._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._serialize, info_arg=True, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        leaf = "boolean" if self.dtype == "bool" else "integer" if "int" in self.dtype else "number"
        if self.leading:
            return {"type": ["array", leaf], "description": str(self)}
        nested: dict[str, Any] = {"type": leaf}
        if leaf == "integer":
            low, high = tensor.int_range(self.dtype)
            nested |= {"minimum": low, "maximum": high}
        for dim in reversed(self.dims):
            nested = {"type": "array", "items": nested}
            if isinstance(dim, int):
                nested |= {"minItems": dim, "maxItems": dim}
        return nested | {"description": str(self)}


def spec_of(hint: Any) -> ArraySpec | None:
    """Return the spec of a hint that is an array type, or None.

    Understands `Array[...]`, `np.ndarray`, `NDArray[np.float32]` and `torch.Tensor`.

    Raises:
        SpecError: The hint's dtype can't travel (complex, object, an abstract one).
    """
    if isinstance(hint, ArraySpec):
        return hint
    from typing import get_args, get_origin  # noqa: PLC0415

    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if torch is not None and hint is torch.Tensor:
        return ArraySpec("", (), leading=True, library="torch")
    if np is None or np.ndarray not in (hint, get_origin(hint)):
        return None
    dtype = ""
    if args := get_args(hint):
        scalar = (get_args(args[-1]) or (Any,))[0]
        if scalar is not Any:
            try:
                dtype = np.dtype(scalar).name if scalar not in _abstract(np) else ""
            except TypeError:
                dtype = str(scalar)
            if dtype and dtype not in ITEM_BYTES:
                raise SpecError(
                    f"arrays of {dtype} can't travel; use one of {', '.join(ITEM_BYTES)}"
                )
    return ArraySpec(dtype, (), leading=True)


def _abstract(np: Any) -> tuple[Any, ...]:
    return (np.generic, np.number, np.integer, np.floating, np.signedinteger, np.unsignedinteger)
