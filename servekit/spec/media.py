"""Types whose values are bytes of some media type: what bytes, files, images and tables share.

A value is a segment between services, base64 in plain JSON, and a body or a part of a form by
itself. A subclass says how its values are made and written; this one is pydantic's side of it.
"""

import base64
import binascii
from typing import TYPE_CHECKING, Any, ClassVar, cast

from servekit.core.call import BINARY, Buffer
from servekit.spec import segment
from servekit.spec.raw import Form, RawError, refuse

if TYPE_CHECKING:
    from pydantic_core import CoreSchema

_STANDARD = str.maketrans("-_", "+/")


class Media:
    """Metadata of a hint, in `Annotated`.

    Attributes:
        form: Which kind of value it is.
        wanted: What a value is in plain JSON, for messages.
        json_schema: Of that.
    """

    __slots__ = ()

    form: ClassVar[Form]
    wanted: ClassVar[str]
    json_schema: ClassVar[dict[str, Any]]

    # ---- what a subclass says

    def read_raw(self, media_type: str, data: Buffer) -> Any:
        """Return the value that bytes hold; see `Raw`."""
        raise NotImplementedError

    def write_raw(self, media_type: str, value: Any) -> Buffer:
        """Return a value as bytes; `application/octet-stream` is what `read_raw` reads best."""
        raise NotImplementedError

    def check(self, value: object) -> None:
        """Check that a value is one of this type.

        Raises:
            RawError: It isn't.
        """
        raise NotImplementedError

    def put(self, value: Any, segments: list[Buffer]) -> dict[str, Any]:
        """Append a value to the segments, and return its stand-in."""
        return segment.put_bytes(self.write_raw(BINARY, value), segments)

    def get(self, holder: dict[str, Any], data: Any) -> Any:
        """Return the value of a stand-in and its segment; a part of a form is a `File`."""
        if "dtype" in holder:
            raise RawError(f"{self.form}_type", f"wanted {self.form}, got an array")
        if hasattr(data, "content_type"):
            return self.read_raw(data.content_type, data.read())
        return self.read_raw(BINARY, data)

    def from_tree(self, value: Any) -> Any:
        """Return the value that plain JSON other than text stands for."""
        del value
        raise RawError(f"{self.form}_type", f"wanted {self.wanted}")

    def to_tree(self, value: Any) -> Any:
        """Return a value in plain JSON."""
        return base64.b64encode(self.write_raw(BINARY, value)).decode()

    # ---- pydantic's side

    def _from_json(self, value: Any, info: Any) -> Any:
        try:
            if isinstance(value, str):
                return self.read_raw(BINARY, _decoded(value, self.form))
            data = segment.find(value, info.context)
            if data is None:
                return self.from_tree(value)
            return self.get(cast("dict[str, Any]", value), data)
        except RawError as error:
            refuse(error)

    def _from_python(self, value: Any, info: Any) -> Any:  # noqa: ARG002
        try:
            self.check(value)
        except RawError as error:
            refuse(error)
        return value

    def _serialize(self, value: Any, info: Any) -> Any:
        try:
            self.check(value)
        except RawError as error:
            from pydantic_core import PydanticSerializationUnexpectedValue  # noqa: PLC0415

            raise PydanticSerializationUnexpectedValue(error.message) from None
        if info.context is None:
            return self.to_tree(value)
        return self.put(value, info.context)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> "CoreSchema":
        from pydantic_core import core_schema  # noqa: PLC0415

        return core_schema.json_or_python_schema(
            core_schema.with_info_plain_validator_function(self._from_json),
            core_schema.with_info_plain_validator_function(self._from_python),
            serialization=core_schema.plain_serializer_function_ser_schema(
                self._serialize, info_arg=True, when_used="json"
            ),
        )

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return dict(self.json_schema)


def _decoded(text: str, form: str) -> bytes:
    try:
        return base64.b64decode(text.translate(_STANDARD), validate=True)
    except (binascii.Error, ValueError):
        raise RawError(f"{form}_base64", f"wanted {form} as base64") from None


class BytesMedia(Media):
    """Of a `bytes` hint."""

    __slots__ = ()

    form = "bytes"
    wanted = "bytes as a base64 string"
    json_schema: ClassVar[dict[str, Any]] = {"type": "string", "contentEncoding": "base64"}

    def read_raw(self, media_type: str, data: Buffer) -> bytes:  # noqa: ARG002
        """Return the bytes themselves, of whatever media type."""
        return data if type(data) is bytes else bytes(data)

    def write_raw(self, media_type: str, value: bytes) -> bytes:  # noqa: ARG002
        """Return the bytes themselves."""
        return value

    def check(self, value: object) -> None:
        """Check that a value is bytes, and nothing that is only like them."""
        if not isinstance(value, bytes):
            raise RawError("bytes_type", f"wanted bytes, got {type(value).__name__}")
