"""One type's way into payloads and back: the only place where values meet pydantic.

A payload comes in as a JSON document with segments (other media types are brought to that form
first), goes through one pydantic-core validator, and comes out as typed values; the way back is
its mirror. Types declared with builtins are strict: `"3"` is no int. A user's pydantic models
keep the configuration they were written with.

This module imports pydantic, so others import it late, when an endpoint is really declared.
"""

import reprlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NoReturn, cast, get_args

from pydantic import ConfigDict, FailFast, TypeAdapter
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import SchemaValidator, ValidationError, from_json, to_json
from typing_extensions import TypeAliasType

from servekit.core.call import BINARY, EVENT_STREAM, JSON, MSGPACK, NPY, Buffer, Payload
from servekit.errors import (
    BadRequest,
    CallError,
    InvalidInput,
    SpecError,
    UnsupportedMedia,
    suggest,
)
from servekit.spec import body, tensor
from servekit.spec.array import ArraySpec
from servekit.spec.segment import BytesSpec

Binary = Literal["", "array", "bytes"]

_MAX_FIELDS = 20
_STRICT: ConfigDict = {
    "strict": True,
    "extra": "forbid",
    "ser_json_inf_nan": "constants",
    "ser_json_bytes": "base64",
    "val_json_bytes": "base64",
}


class Codec:
    """Reads and writes one type.

    Args:
        hint: The type, with arrays and bytes marked.
        where: `Service.method`, for messages.
        invalid: Raised for a value of the wrong type.
        unparsable: Raised for a body that can't be parsed.
        binary: The whole value may also travel as raw bytes.
        keys: Names of the object's keys, for suggestions.
        empty: What an empty body stands for.
        stream: A caller that accepts server-sent events gets JSON chunks.

    Raises:
        SpecError: pydantic can't build the type.
    """

    def __init__(
        self,
        hint: Any,
        *,
        where: str,
        invalid: type[CallError],
        unparsable: type[CallError] = BadRequest,
        binary: bool = False,
        keys: Sequence[str] = (),
        empty: bytes = b"",
        stream: bool = False,
    ) -> None:
        self._hint = hint
        self._where = where
        self._invalid = invalid
        self._unparsable = unparsable
        self._keys = keys
        self._empty = empty
        self._array = hint if isinstance(hint, ArraySpec) and binary else None
        self.binary: Binary = ""
        if self._array is not None and self._array.dtype:
            self.binary = "array"
        elif binary and any(isinstance(m, BytesSpec) for m in get_args(hint)):
            self.binary = "bytes"
        self._takes = (JSON, MSGPACK, *_RAW[self.binary])
        self._offers = (BINARY, JSON, MSGPACK) if self.binary == "bytes" else self._takes
        if stream:
            self._offers = (*self._offers, EVENT_STREAM)

        self._adapter = adapter = build(hint, where=where)
        self._validator = cast("SchemaValidator", adapter.validator)
        self._serializer = adapter.serializer
        self._finite: SchemaValidator | None = None
        kinds = set(_kinds(adapter.core_schema))
        self._models = bool(kinds & {"model", "dataclass"})
        self._unchecked = bool(kinds & {"model", "any", "dataclass"})
        self._nan_is_null = "ser_json_inf_nan" in kinds

    def of(self, hint: Any, *, binary: bool = False) -> "Codec":
        """Return the codec of another type, with the same errors."""
        return Codec(
            hint,
            where=self._where,
            invalid=self._invalid,
            unparsable=self._unparsable,
            binary=binary,
        )

    def many(self) -> "Codec":
        """Return the codec of a list of such values."""
        # A list of a million wrong items must not become a million error objects.
        hint: Any = list.__class_getitem__(self._hint)
        return self.of(Annotated[hint, FailFast()])

    def json_schema(self, mode: Literal["validation", "serialization"]) -> dict[str, Any]:
        """Return the type's JSON Schema 2020-12, nested types under `$defs`.

        Raises:
            SpecError: A type in it has no JSON form.
        """
        try:
            return self._adapter.json_schema(mode=mode)
        except PydanticInvalidForJsonSchema as error:
            raise SpecError(
                f"{self._where}: {error.message}; give it a type with a JSON form"
            ) from None

    def default(self, value: Any, name: str) -> Any:
        """Return a key's default in its JSON form; raises whatever pydantic does."""
        document = self._serializer.to_python({name: value}, mode="json", warnings="error")
        return document[name]

    # ---- in

    def read(self, payload: Payload, *, internal: bool = False) -> Any:
        """Return the value that a payload holds.

        Args:
            payload: Of any media type that the type can travel as.
            internal: It comes from a service of the same app: NaN and infinities are welcome.

        Raises:
            CallError: `unparsable`, `invalid` or `UnsupportedMedia`.
        """
        segments = payload.segments
        if payload.content_type != JSON:
            kind = body.media_type(payload.content_type)
            if kind in (BINARY, NPY):
                return self._read_raw(kind, segments[0])
            segments = self._document(kind, segments)
        document = segments[0]
        if type(document) is not bytes:
            document = bytes(document)
        if internal:
            validator = self._validator
        else:
            if b"NaN" in document or b"Infinity" in document:
                body.refuse_nonfinite(document)
            validator = self._finite or self._build_finite()
        try:
            if len(segments) > 1:
                value = validator.validate_json(document, context=segments)
            else:
                value = validator.validate_json(document or self._empty)
        except ValueError as error:
            self._refuse(error)
        if self._unchecked and not internal and (path := body.overflow(document)) is not None:
            self._fail("Input should be a finite number", path, "finite_number")
        return value

    def _document(self, kind: str, segments: Sequence[Buffer]) -> Sequence[Buffer]:
        if kind == JSON:
            return segments
        if kind == MSGPACK:
            return body.from_msgpack(segments[0])
        raise UnsupportedMedia(
            f"{self._where} takes {', '.join(self._takes)}, not {kind[:100]!r}", started=False
        )

    def _read_raw(self, kind: str, data: Buffer) -> Any:
        if kind not in self._takes:
            self._document(kind, ())
        if self._array is None:
            return data if type(data) is bytes else bytes(data)
        try:
            if kind == NPY:
                return self._array.own(tensor.read_npy(data))
            return self._array.from_raw(data)
        except tensor.ArrayError as error:
            self._fail(error.message, "", error.kind)

    def _build_finite(self) -> SchemaValidator:
        adapter = build(self._hint, where=self._where, finite=True)
        self._finite = validator = cast("SchemaValidator", adapter.validator)
        return validator

    # ---- out

    def write(self, value: Any, *, accept: str = JSON, internal: bool = False) -> Payload:
        """Return a payload that holds the value.

        Args:
            value: Must be what the hint says; a mutated model is caught here, too.
            accept: The caller's Accept header, or one media type.
            internal: For a service of the same app: JSON, with arrays and bytes as segments.

        Raises:
            CallError: `invalid`, or `UnsupportedMedia` if none of `accept` can be made.
        """
        kind = JSON if internal or accept == JSON else body.negotiate(accept, self._offers)
        try:
            value = self._validator.validate_python(value)
        except ValueError as error:
            self._refuse(error)
        if kind in (BINARY, NPY):
            return Payload(kind, (self._write_raw(kind, value),))
        segments: list[Buffer] = [b""]
        if internal or kind == MSGPACK:
            document = self._dump(value, segments, internal=internal, tree=kind == MSGPACK)
            if kind == MSGPACK:
                return Payload(MSGPACK, (body.to_msgpack(document, segments),))
            segments[0] = document
            return Payload(JSON, segments)
        document = self._dump(value, None)
        if b"NaN" in document or b"Infinity" in document:
            self._refuse_nonfinite(document)
        return Payload(JSON, (document,))

    def _dump(
        self,
        value: Any,
        segments: list[Buffer] | None,
        *,
        internal: bool = False,
        tree: bool = False,
    ) -> Any:
        try:
            if not self._models and not tree:
                return self._serializer.to_json(value, context=segments, by_alias=True)
            if self._nan_is_null and not internal and not tree:
                return self._serializer.to_json(value, warnings="error", by_alias=True)
            # A model's own config may write NaN as null; in Python's terms it stays NaN.
            document = self._serializer.to_python(
                value,
                mode="json",
                context=segments,
                warnings="error",
                by_alias=True,
                round_trip=internal,
            )
            return document if tree else to_json(document, inf_nan_mode="constants")
        except (ValueError, TypeError, RecursionError) as error:
            self._fail(_first_line(error), "", "serialization")

    def _write_raw(self, kind: str, value: Any) -> Buffer:
        if self._array is None:
            return cast("bytes", value)
        array = self._array.check(value)
        return tensor.write_npy(array) if kind == NPY else tensor.to_buffer(array)

    # ---- errors

    def _refuse_nonfinite(self, document: bytes) -> None:
        if (path := body.nonfinite(from_json(document))) is not None:
            self._fail("NaN and infinities have no JSON form", path, "finite_number")

    def _refuse(self, error: ValueError) -> NoReturn:
        if not isinstance(error, ValidationError):
            raise error
        details = error.errors(include_url=False, include_context=False)
        if details[0]["type"] == "json_invalid":
            message = f"{self._where}: {_lower(details[0]['msg'])}"
            raise self._unparsable(message, started=False) from None
        fields = [self._field(detail) for detail in details[:_MAX_FIELDS]]
        first = fields[0]
        more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
        raise self._invalid(
            f"{self._where}: {first['path'] or 'the body'}: {first['message']}{more}",
            fields=fields,
            started=self._invalid is not InvalidInput,
        ) from None

    def _field(self, detail: Any) -> dict[str, Any]:
        path, kind = detail["loc"], detail["type"]
        message = detail["msg"][:200]
        if kind == "extra_forbidden":
            known = self._keys if len(path) == 1 else ()
            message = f"unknown field.{suggest(str(path[-1])[:100], known)}"
        elif kind != "missing" and not kind.startswith("array_"):
            message += f", got {shorten(detail['input'])}"
        return {"path": body.path_text(path), "message": message, "type": kind}

    def _fail(self, message: str, path: str, kind: str) -> NoReturn:
        raise self._invalid(
            f"{self._where}: {path or 'the body'}: {message}",
            fields=[{"path": path, "message": message, "type": kind}],
            started=self._invalid is not InvalidInput,
        ) from None


_RAW: dict[Binary, tuple[str, ...]] = {"": (), "array": (BINARY, NPY), "bytes": (BINARY,)}


def build(hint: Any, *, where: str, finite: bool = False) -> TypeAdapter[Any]:
    """Let pydantic build a type.

    Args:
        hint: The type, with arrays and bytes marked.
        where: `Service.method(param)`, for messages.
        finite: Refuse NaN and infinities.

    Raises:
        SpecError: It can't; says why and, where known, how to fix it.
    """
    config: ConfigDict = {**_STRICT, "allow_inf_nan": not finite}
    try:
        # Behind an alias, because pydantic takes no config beside a dataclass or TypedDict.
        adapter: TypeAdapter[Any] = TypeAdapter(_alias("Body", hint), config=config)
        _ = adapter.core_schema
    except NameError as error:
        raise SpecError(f"{where}: the hint {error.name!r} can't be resolved") from None
    except (PydanticUserError, TypeError) as error:
        text = str(error)
        if "typing_extensions.TypedDict" in text:
            text = "before Python 3.12 import TypedDict from typing_extensions, not from typing"
        elif "arbitrary_types_allowed" in text:
            text = f"{text.partition('. ')[0]}; use builtins, dataclasses, pydantic models or Array"
        raise SpecError(f"{where}: {text.splitlines()[0]}") from None
    return adapter


_alias: Any = TypeAliasType


def _kinds(schema: Any) -> Iterator[str]:
    """Yield every type of schema inside of one, and a mark for each model that opts into null."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            table = cast("dict[str, Any]", node)
            if isinstance(kind := table.get("type"), str):
                yield kind
                if kind == "model" and "ser_json_inf_nan" in table.get("config", {}):
                    yield "ser_json_inf_nan"
            stack.extend(table.values())
        elif isinstance(node, list | tuple):
            stack.extend(cast("list[Any]", node))


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 2, 3, 3


def shorten(value: object) -> str:
    """Return a value's repr in at most 100 characters, without making a longer one first."""
    text = _SHORT.repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
