"""One type's way into payloads and back: the only place where values meet pydantic.

A payload comes in as a JSON document with segments (other media types are brought to that form
first), goes through one pydantic-core validator, and comes out as typed values; the way back is
its mirror. Exceptions that a user's own validators raise, other than ValueError and
AssertionError, pass through.

Imports pydantic, so others import it late, when an endpoint is really declared.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NoReturn, cast

from pydantic.errors import PydanticInvalidForJsonSchema
from pydantic_core import SchemaValidator, ValidationError, from_json, to_json

from servekit.core.call import EVENT_STREAM, JSON, MSGPACK, Buffer, Payload
from servekit.errors import BadRequest, CallError, InvalidInput, SpecError, UnsupportedMedia
from servekit.spec import body, fields, nulls
from servekit.spec.adapter import FailFast, build, schema_kinds
from servekit.spec.raw import ANY_TYPE, MAKES, RAW_FIRST, TAKES, Form, RawError, raw_of


class Codec:
    """Reads and writes one type.

    Args:
        hint: The type, with arrays and bytes marked.
        where: `Service.method`, for messages.
        invalid: Raised for a value of the wrong type.
        unparsable: Raised for a body that can't be parsed.
        raw: The whole value may also travel raw, if its type has such a form.
        keys: Names of the object's keys, for suggestions.
        empty: What an empty body stands for.
        stream: A caller that accepts server-sent events gets JSON chunks.

    Attributes:
        form: In which form the value is a whole body; `""` is none but JSON and MessagePack.

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
        raw: bool = False,
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
        self._raw = raw_of(hint) if raw else None
        self.form: Form = "" if self._raw is None else self._raw.form
        self._takes = (JSON, MSGPACK, *TAKES[self.form])
        raw_types = MAKES[self.form]
        self._offers = (JSON, MSGPACK, *raw_types)
        if self.form in RAW_FIRST:
            self._offers = (*raw_types, JSON, MSGPACK)
        if stream:
            self._offers = (*self._offers, EVENT_STREAM)

        self._adapter = build(hint, where=where)
        self._validator = cast("SchemaValidator", self._adapter.validator)
        self._serializer = self._adapter.serializer
        self._finite: SchemaValidator | None = None
        self._schema: dict[str, Any] | None = None
        kinds = schema_kinds(self._adapter)
        # Instances of classes may have been changed since they were checked.
        self._mutable = bool(kinds & {"model", "dataclass"})
        # These have a configuration of their own, or none: infinities pass through them.
        self._lenient = bool(kinds & {"model", "dataclass", "any"})
        self._writes_null = "ser_json_inf_nan" in kinds

    def of(self, hint: Any, *, raw: bool = False) -> "Codec":
        """Return the codec of another type, with the same errors."""
        return Codec(
            hint, where=self._where, invalid=self._invalid, unparsable=self._unparsable, raw=raw
        )

    def many(self) -> "Codec":
        """Return the codec of a list of such values."""
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
            message = f"{error.message}; give it a type with a JSON form"
            raise SpecError(f"{self._where}: {message}") from None

    def default(self, name: str, value: Any) -> Any:
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
            if kind in TAKES[self.form] or (
                # an image, a PDF: bytes all the same
                self.form in ANY_TYPE and (kind not in self._takes or not payload.content_type)
            ):
                return self._read_raw(kind, segments[0])
            segments = self.segments(payload)
        document = segments[0]
        if isinstance(document, memoryview):
            document = bytes(document)
        if internal:
            validator = self._validator
        else:
            # `in` would try the text as an int first, which costs more than the search.
            if document.find(b"NaN") >= 0 or document.find(b"Infinity") >= 0:
                self._refuse_literals(document, payload.content_type)
            validator = self._finite or self._build_finite()
        try:
            if len(segments) > 1:
                value = validator.validate_json(document, context=segments)
            else:
                value = validator.validate_json(document or self._empty)
        except ValidationError as error:
            self._refuse(error)
        if self._lenient and not internal and body.may_overflow(document):
            self._refuse_overflow(document, value)
        return value

    def segments(self, payload: Payload) -> Sequence[Buffer]:
        """Return a payload as a JSON document with the segments behind it.

        Raises:
            CallError: `unparsable`, or `UnsupportedMedia`.
        """
        kind = body.media_type(payload.content_type)
        if kind == JSON:
            return payload.segments
        if kind == MSGPACK:
            try:
                return body.from_msgpack(payload.segments[0])
            except BadRequest as error:
                raise self._unparsable(f"{self._where}: {error.message}", started=False) from None
        raise UnsupportedMedia(
            f"{self._where} takes {', '.join(self._takes)}, not {kind[:100]!r}", started=False
        )

    def _read_raw(self, kind: str, data: Buffer) -> Any:
        assert self._raw is not None
        try:
            return self._raw.read_raw(kind, data)
        except RawError as error:
            self._fail(error.message, "", error.kind)

    def _build_finite(self) -> SchemaValidator:
        adapter = build(self._hint, where=self._where, finite=True)
        self._finite = validator = cast("SchemaValidator", adapter.validator)
        return validator

    # ---- out

    def write(self, value: Any, *, accept: str = JSON, internal: bool = False) -> Payload:
        """Return a payload that holds the value.

        Args:
            value: Must be what the hint says; a model that was changed is checked again.
            accept: The caller's Accept header, or one media type.
            internal: For a service of the same app: JSON, with arrays and bytes as segments.

        Raises:
            CallError: `invalid`, or `UnsupportedMedia` if none of `accept` can be made.
        """
        kind = JSON if internal or accept == JSON else body.negotiate(accept, self._offers)
        try:
            value = self._validator.validate_python(value)
            if internal:
                segments: list[Buffer] = [b""]
                segments[0] = self._document(value, segments)
                return Payload(JSON, segments)
            if self._raw is not None and kind in MAKES[self.form]:
                return Payload(kind, (self._raw.write_raw(kind, value),))
            if kind == MSGPACK:
                segments = [b""]
                tree = self._tree(value, segments)
                packed = body.to_msgpack(tree, segments)
                if self._mutable and packed.find(b"\xc0") >= 0:
                    self._refuse_stray_null(tree)
                return Payload(MSGPACK, (packed,))
            document = self._document(value, None)
        except ValidationError as error:
            self._refuse(error)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            field = fields.of_serialization(error)
            self._fail(field["message"], field["path"], field["type"])
        if document.find(b"NaN") >= 0 or document.find(b"Infinity") >= 0:
            self._refuse_nonfinite(document)
        return Payload(JSON, (document,))

    def _document(self, value: Any, segments: list[Buffer] | None) -> bytes:
        if not self._mutable:
            return self._serializer.to_json(value, context=segments, by_alias=True)
        if self._writes_null and segments is None:
            document = self._serializer.to_json(value, warnings="error", by_alias=True)
            if document.find(b"null") >= 0:
                self._refuse_stray_null(self._tree(value, segments))
            return document
        # By default a model writes NaN as null; as a tree it stays NaN.
        tree = self._tree(value, segments, round_trip=segments is not None)
        document = to_json(tree, inf_nan_mode="constants")
        if document.find(b"null") >= 0:
            self._refuse_stray_null(tree)
        return document

    def _refuse_stray_null(self, tree: Any) -> None:
        if self._schema is None:
            try:
                self._schema = self.json_schema("serialization")
            except SpecError:
                self._schema = {}
        if (path := nulls.stray(tree, self._schema)) is not None:
            self._fail("Input should not be None", body.path_text(path), "none_not_allowed")

    def _tree(self, value: Any, segments: list[Buffer] | None, *, round_trip: bool = False) -> Any:
        return self._serializer.to_python(
            value,
            mode="json",
            context=segments,
            warnings="error",
            by_alias=True,
            round_trip=round_trip,
        )

    # ---- errors

    def _refuse_literals(self, document: bytes | bytearray, content_type: str) -> None:
        if content_type != JSON:  # it was MessagePack, which has them
            self._refuse_infinite(body.nonfinite(from_json(document)))
            return
        try:
            from_json(document, allow_inf_nan=False)
        except ValueError as error:
            message = f"{self._where}: invalid JSON, which has no NaN or Infinity: {error}"
            raise self._unparsable(message, started=False) from None

    def _refuse_overflow(self, document: bytes | bytearray, value: Any) -> None:
        """Refuse `1e400`, and an int of 400 digits where it has become a float."""
        self._refuse_infinite(body.nonfinite(from_json(document)))
        tree = self._serializer.to_python(value, by_alias=True, warnings="none")
        self._refuse_infinite(body.nonfinite(tree))

    def _refuse_infinite(self, path: str | None) -> None:
        if path is not None:
            self._fail("Input should be a finite number", path, "finite_number")

    def _refuse_nonfinite(self, document: bytes) -> None:
        if (path := body.nonfinite(from_json(document))) is not None:
            self._fail("NaN and infinities have no JSON form", path, "finite_number")

    def _refuse(self, error: ValidationError) -> NoReturn:
        if problem := fields.unparsable(error):
            raise self._unparsable(f"{self._where}: {problem}", started=False) from None
        wrong = fields.of_validation(error, self._keys)
        self._raise(wrong, error.error_count())

    def _fail(self, message: str, path: str, kind: str) -> NoReturn:
        self._raise([{"path": path, "message": message, "type": kind}], 1)

    def _raise(self, wrong: list[fields.Field], count: int) -> NoReturn:
        first = wrong[0]
        more = f" (and {count - 1} more)" if count > 1 else ""
        raise self._invalid(
            f"{self._where}: {first['path'] or 'the body'}: {first['message']}{more}",
            fields=wrong,
            started=self._invalid is not InvalidInput,
        ) from None
