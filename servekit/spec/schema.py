"""An endpoint's input and output: payloads in, typed arguments out; results in, payloads out.

The replica decodes with an `InputSchema` and encodes with an `OutputSchema`; a caller in another
service, and the typed client, do the reverse with the same two objects.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, NotRequired, cast

from servekit.core.call import BINARY, JSON, NPY, Payload
from servekit.errors import InvalidInput, InvalidOutput, SpecError
from servekit.spec import body
from servekit.spec.array import ArraySpec
from servekit.spec.segment import KEY
from servekit.spec.signature import BatchShape, Param, Signature, read_signature

if TYPE_CHECKING:
    from servekit.spec.raw import Form

__all__ = ["BatchShape", "InboundSchema", "InputSchema", "OutputSchema", "endpoint_schemas"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_STAND_IN = f'{{"{KEY}":'.encode()


class InputSchema:
    """The arguments of one endpoint.

    Attributes:
        json_schema: JSON Schema of the request body, or of what goes beside it if it streams.
        inbound: The parameter that streams, if there is one.
        form: In which form the body may also be raw; see `spec/raw.py`.
    """

    def __init__(self, signature: Signature) -> None:
        from servekit.spec.codec import Codec  # noqa: PLC0415  (pydantic comes with it)

        self._where = where = signature.where
        self._params = params = signature.params
        self._body = signature.body
        self._names = tuple(p.name for p in params)
        self._positional = signature.positional
        self.inbound: InboundSchema | None = None
        if signature.inbound is not None:
            self.inbound = InboundSchema(signature.inbound, where)
        hint = params[0].hint if self._body else _keyword_hint(params)
        self._hint = hint
        try:
            self._codec = Codec(
                hint,
                where=where,
                invalid=InvalidInput,
                raw=self._body,
                keys=self._names,
                empty=b"" if self._body else b"{}",
            )
        except SpecError:
            _find_culprit(params, where)
            raise
        self._many: Codec | None = None
        self._stacked: Codec | None = None
        self.form: Form = self._codec.form
        self.json_schema = self._codec.json_schema("validation")
        if not self._body:
            self._describe_parameters()

    def _describe_parameters(self) -> None:
        self.json_schema.pop("title", None)
        self.json_schema["additionalProperties"] = False  # pydantic before 2.12 leaves it out
        for param in self._params:
            if not param.required:
                try:
                    default = self._codec.default(param.name, param.default)
                except Exception:  # noqa: BLE001, S112  (a default without a JSON form is legal)
                    continue
                self.json_schema["properties"][param.name]["default"] = default

    def decode(self, payload: Payload, *, internal: bool = False) -> Arguments:
        """Return the arguments to call the method with.

        Args:
            payload: The request's body. An empty one has no arguments.
            internal: It comes from a service of the same app: NaN and infinities are welcome.

        Raises:
            BadRequest: It can't be parsed.
            InvalidInput: An argument is missing, unknown or of the wrong type.
            UnsupportedMedia: Of a media type that the endpoint doesn't take.
        """
        value = self._codec.read(payload, internal=internal)
        return ((value,), {}) if self._body else ((), value)

    def decode_batch(
        self, payload: Payload, *, internal: bool = False
    ) -> Sequence[Arguments | InvalidInput]:
        """Return the arguments of each item of a client's own batch, or what is wrong with it.

        The body is an array of what `decode` takes. If that is one numeric array, then the body
        may also be one array that stacks them along a new first axis, as `.npy` or raw bytes, too.

        Raises:
            CallError: The body as a whole is no array, or can't be parsed.
        """
        try:
            return self._decode_all(payload, internal=internal)
        except InvalidInput:
            items = self._items(payload)
            if items is None:
                raise
        return [self._decode_one(item, internal=internal) for item in items]

    def _items(self, payload: Payload) -> list[Payload] | None:
        """Return the items of a JSON array as bodies of their own, or None if it is none."""
        if body.media_type(payload.content_type) in (BINARY, NPY):
            return None
        segments = self._codec.segments(payload)
        if len(segments) > 1:
            return None
        from pydantic_core import from_json, to_json  # noqa: PLC0415

        items = cast("object", from_json(bytes(segments[0])))
        if not isinstance(items, list):
            return None
        return [Payload(JSON, (to_json(item),)) for item in cast("list[object]", items)]

    def _decode_one(self, item: Payload, *, internal: bool) -> Arguments | InvalidInput:
        try:
            return self.decode(item, internal=internal)
        except InvalidInput as error:
            return error

    def _decode_all(self, payload: Payload, *, internal: bool) -> list[Arguments]:
        kind = body.media_type(payload.content_type)
        if isinstance(self._hint, ArraySpec):
            if kind in (BINARY, NPY):
                return self._decode_stacked(self._hint, payload, internal=internal)
            segments = self._codec.segments(payload)
            payload = Payload(JSON, segments)
            if len(segments) > 1 and bytes(segments[0][: len(_STAND_IN)]) == _STAND_IN:
                return self._decode_stacked(self._hint, payload, internal=internal)
        if self._many is None:
            self._many = self._codec.many()
        values = self._many.read(payload, internal=internal)
        return [((value,), {}) for value in values] if self._body else [((), v) for v in values]

    def _decode_stacked(
        self, spec: ArraySpec, payload: Payload, *, internal: bool
    ) -> list[Arguments]:
        if self._stacked is None:
            self._stacked = self._codec.of(spec.stacked(), raw=True)
        stacked = self._stacked.read(payload, internal=internal)
        if not stacked.ndim:
            raise InvalidInput(f"{self._where}: wanted a batch of arrays, got one scalar")
        return [((row,), {}) for row in stacked]

    def encode(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, accept: str = ""
    ) -> Payload:
        """Return the body that calls the endpoint with these arguments.

        Args:
            args: As for a plain call, without `self`.
            kwargs: The same. Defaults are left to the callee.
            accept: "" is for a service of the same app: JSON with arrays and bytes as segments.
                A media type makes a body for the outside.

        Raises:
            InvalidInput: The arguments don't fit the signature, or have the wrong type.
        """
        if self._body:
            if len(args) != 1 or kwargs:
                given = f"{len(args)} and {len(kwargs)} by name" if kwargs else str(len(args))
                self._misfit(f"takes 1 positional argument ({self._names[0]}), got {given}")
            value = args[0]
        else:
            value = self._bind(args, kwargs) if args else kwargs
        return self._codec.write(value, accept=accept or JSON, internal=not accept)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        if len(args) > len(self._positional):
            self._misfit(f"takes {len(self._positional)} positional arguments, got {len(args)}")
        bound = dict(zip(self._positional, args, strict=False))
        for name in kwargs:
            if name in bound:
                self._misfit(f"got two values for {name!r}")
        return {**bound, **kwargs}

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return what the parameter that streams was given, and all others by name.

        Raises:
            InvalidInput: The arguments don't fit the signature.
        """
        assert self.inbound is not None
        bound = self._bind(args, kwargs)
        if self.inbound.name not in bound:
            self._misfit(f"needs {self.inbound.name!r}")
        return bound.pop(self.inbound.name), bound

    def _misfit(self, problem: str) -> NoReturn:
        raise InvalidInput(f"{self._where}() {problem}", reason="arguments", started=False)


class InboundSchema:
    """The parameter of an endpoint whose value comes in chunks.

    Attributes:
        name: Of the parameter.
        json_schema: JSON Schema of one chunk.
        form: In which form a chunk may also be raw.
    """

    def __init__(self, param: Param, where: str) -> None:
        from servekit.spec.codec import Codec  # noqa: PLC0415  (pydantic comes with it)

        self.name = param.name
        self._codec = Codec(
            param.hint, where=f"{where}({param.name})", invalid=InvalidInput, raw=True
        )
        self.form: Form = self._codec.form
        self.json_schema = self._codec.json_schema("validation")

    def decode(self, chunk: Payload, *, internal: bool = False) -> Any:
        """Return one chunk's value.

        Raises:
            CallError: It can't be parsed, or has the wrong type.
        """
        return self._codec.read(chunk, internal=internal)

    def encode(self, value: Any, *, accept: str = "") -> Payload:
        """Return the chunk that carries a value; `accept` as in `InputSchema.encode`.

        Raises:
            InvalidInput: It has the wrong type.
        """
        return self._codec.write(value, accept=accept or JSON, internal=not accept)


class OutputSchema:
    """The answer of one endpoint, or one chunk of it if it streams.

    Attributes:
        json_schema: JSON Schema of the answer.
        form: In which form the answer may also be raw.
    """

    def __init__(self, signature: Signature) -> None:
        from servekit.spec.codec import Codec  # noqa: PLC0415  (pydantic comes with it)

        self._codec = Codec(
            signature.result,
            where=signature.where,
            invalid=InvalidOutput,
            unparsable=InvalidOutput,
            raw=True,
            stream=signature.stream,
        )
        self.form: Form = self._codec.form
        self.json_schema = self._codec.json_schema("serialization")

    def encode(self, value: Any, *, accept: str = JSON, internal: bool = False) -> Payload:
        """Return the payload that carries a result.

        Args:
            value: What the method returned or yielded.
            accept: The caller's Accept header. Where it leaves a choice (`""`, `"*/*"`) the answer
                is JSON, and `application/octet-stream` for `bytes`.
            internal: For a service of the same app: JSON, arrays and bytes as segments, NaN kept.

        Raises:
            InvalidOutput: It isn't what the method declares, or isn't finite and JSON can't say so.
            UnsupportedMedia: The caller accepts nothing that can be made.
        """
        return self._codec.write(value, accept=accept, internal=internal)

    def decode(self, payload: Payload) -> Any:
        """Return the typed result, on the caller's side.

        Raises:
            InvalidOutput: The answer isn't what this side's declaration says.
        """
        return self._codec.read(payload, internal=True)


def endpoint_schemas(
    fn: Callable[..., Any], *, where: str, batched: BatchShape | None = None
) -> tuple[InputSchema, OutputSchema]:
    """Read a method's annotations into the schemas of its input and output.

    Args:
        fn: A method as found in its class; the first parameter is dropped.
        where: `Service.method`, for messages.
        batched: The method takes batches; the schemas are those of one item.

    Raises:
        SpecError: The signature can't be served; names the parameter and the fix.
    """
    signature = read_signature(fn, where=where, batched=batched)
    return InputSchema(signature), OutputSchema(signature)


def _keyword_hint(params: Sequence[Param]) -> Any:
    """Return the type of the JSON object whose keys are the parameters."""
    from typing_extensions import TypedDict  # noqa: PLC0415

    make: Any = TypedDict
    return make("Body", {p.name: p.hint if p.required else NotRequired[p.hint] for p in params})


def _find_culprit(params: Sequence[Param], where: str) -> None:
    """Raise the SpecError of the first parameter that pydantic can't build, naming it."""
    from servekit.spec.adapter import build  # noqa: PLC0415

    for param in params:
        build(param.hint, where=f"{where}({param.name})")
