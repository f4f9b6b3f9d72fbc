"""Values that may be a whole body by themselves: arrays, bytes, text, files, images, tables.

Each such type has a `Raw`: the media types in which its values come and go, and the way from their
bytes to a value and back. Codecs use it for bodies, forms for their parts.
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, NoReturn, Protocol, TypeAlias, cast

from servekit.core.call import BINARY, NPY, Buffer

Form: TypeAlias = Literal["", "array", "bytes", "text", "file", "image", "table"]

TEXT: Final = "text/plain"
PNG: Final = "image/png"
JPEG: Final = "image/jpeg"
WEBP: Final = "image/webp"
ARROW: Final = "application/vnd.apache.arrow.stream"
CSV: Final = "text/csv"

TAKES: Final[dict[Form, tuple[str, ...]]] = {
    "": (),
    "array": (BINARY, NPY),
    "bytes": (BINARY,),
    "text": (TEXT,),
    "file": (BINARY,),
    "image": (PNG, JPEG, WEBP, "image/gif", "image/bmp", "image/tiff", BINARY),
    "table": (ARROW, CSV),
}
"""Media types that are read, besides JSON and MessagePack."""

MAKES: Final[dict[Form, tuple[str, ...]]] = {
    "": (),
    "array": (BINARY, NPY),
    "bytes": (BINARY,),
    "text": (TEXT,),
    "file": (),
    "image": (PNG, JPEG, WEBP),
    "table": (ARROW, CSV),
}
"""Media types that are written."""

ANY_TYPE: Final = frozenset[Form]({"bytes", "file"})
"""Forms that take bodies of whatever media type, as bytes."""

RAW_FIRST: Final = frozenset[Form]({"bytes", "image"})
"""Forms that are written raw where the caller leaves the choice; all others are JSON then."""


class RawError(ValueError):
    """A value isn't what was declared.

    Args:
        kind: Machine-readable: `"array_shape"`, `"image_type"`, …
        message: Wanted and got.
        path: Where inside nested lists, from the outside in.
    """

    def __init__(self, kind: str, message: str, path: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.path = tuple(path)


class Raw(Protocol):
    """How values of one type are whole bodies."""

    @property
    def form(self) -> Form:
        """Which kind of value it is."""
        ...

    def read_raw(self, media_type: str, data: Buffer) -> Any:
        """Return the value that a body holds.

        Raises:
            RawError: It isn't one.
        """
        ...

    def write_raw(self, media_type: str, value: Any) -> Buffer:
        """Return a value that was checked as a body of one of `MAKES`."""
        ...


class _Text:
    """Text as it is, without the quotes of JSON."""

    form: Form = "text"

    @staticmethod
    def read_raw(media_type: str, data: Buffer) -> str:  # noqa: ARG004
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError as error:
            raise RawError("text_utf8", f"wanted text in UTF-8: {error}") from None

    @staticmethod
    def write_raw(media_type: str, value: str) -> bytes:  # noqa: ARG004
        return value.encode()


_TEXT: Final = _Text()


def raw_of(hint: Any) -> Raw | None:
    """Return how a hint's values are whole bodies, or None if they aren't."""
    if hint is str:
        return _TEXT
    for part in (hint, *getattr(hint, "__metadata__", ())):
        if getattr(part, "form", ""):
            return cast("Raw", part)
    return None


def refuse(error: RawError) -> NoReturn:
    """Raise the error as pydantic's own, so that it gets the path of its field."""
    from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError  # noqa: PLC0415

    # The message is a template to pydantic: its braces would be fields.
    text = error.message.replace("{", "(").replace("}", ")")
    problem = PydanticCustomError(cast("Any", error.kind), cast("Any", text))
    if not error.path:
        raise problem from None
    details: InitErrorDetails = {"type": problem, "loc": error.path, "input": None}
    raise ValidationError.from_exception_data("raw", [details]) from None
