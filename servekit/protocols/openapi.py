"""The OpenAPI 3.1 document of an app, made from its `AppSpec` alone.

In goes an `AppSpec`, out comes a document as plain JSON values: one path per public route, the
models of all endpoints under `components/schemas`, and one description of what every answer has in
common (errors, headers). Equal apps give equal documents, to the order of their keys. Nothing is
refused: an app that could be described can be documented.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from servekit.core.call import BINARY, EVENT_STREAM, JSON, MSGPACK, NPY
from servekit.errors import (
    BadRequest,
    CallError,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    UnsupportedMedia,
)
from servekit.spec.app import AppSpec, EndpointSpec, ServiceSpec

Schema = dict[str, Any]
Direction = Literal["Input", "Output"]

OPENAPI_VERSION: Final = "3.1.0"

_REF: Final = "#/components/schemas/"
_LOCAL: Final = "#/$defs/"
_BATCH: Final = "/batch"
_NAMED: Final = {"properties", "patternProperties", "dependentSchemas", "$defs"}
"""Keywords whose values are schemas by name, so that a property may be called `default`."""
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")
"""What the name of a component can't have in it."""
_DATA: Final = {"default", "const", "enum", "examples", "example"}
"""Keywords whose values are data, in which nothing is a reference."""

_CONVENTIONS: Final = (
    "Bodies are JSON or MessagePack of the same form; in MessagePack, bytes are `bin` values and "
    "arrays may be extension type 1. `Accept` chooses the form of the answer. Streams are "
    "server-sent events: one `data:` event for each chunk, as JSON, then `event: end`; a failure "
    "in between is an `event: error`. Every error has the form of the schema `Error`."
)
_ERRORS: Final[tuple[CallError, ...]] = (
    BadRequest("Search.query: invalid JSON: expected value at line 1 column 1"),
    PayloadTooLarge("the body is larger than /query takes (67108864 bytes)"),
    UnsupportedMedia("Search.query takes application/json, not 'text/plain'"),
    InvalidInput(
        "Search.query: k: Input should be greater than or equal to 1, got 0",
        fields=[
            {
                "path": "k",
                "message": "Input should be greater than or equal to 1, got 0",
                "type": "greater_than_equal",
            }
        ],
    ),
    Overloaded("Search.query: refused, queue full", reason="queue_full", retry_after_s=0.25),
    ExecutionError("Search.query raised ValueError; the server's log has it under the request id"),
    Unavailable("no replica of Search is ready", retry_after_s=1.0),
    DeadlineExceeded("the deadline passed in the queue"),
)
"""One example of each error that any endpoint may answer with."""

_DESCRIPTIONS: Final = {
    BadRequest: "The body or a header can't be parsed.",
    PayloadTooLarge: "The body is over the endpoint's limit.",
    UnsupportedMedia: "The endpoint takes or makes no such media type.",
    InvalidInput: "The body was parsed, but a field breaks its declared type; `fields` says which.",
    Overloaded: "Shed before it started: a queue is full, or the deadline can't be met.",
    ExecutionError: "The service failed; its log has the cause under the request id.",
    Unavailable: "No replica is ready, or the one that had the call was lost.",
    DeadlineExceeded: "The deadline passed, queued or running.",
}


def document(app: AppSpec) -> dict[str, Any]:
    """Return the document; its values are JSON's."""
    root = app.service(app.root)
    operations = list(_operations(app))
    names = _Names(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        item = paths.setdefault(operation.path, {})
        item[operation.endpoint.method.lower()] = _operation(operation, names)
    summary, description = _doc(root.doc)
    info = {
        "title": app.root,
        **({"summary": summary} if summary else {}),
        "description": f"{description}\n\n{_CONVENTIONS}".lstrip(),
        "version": root.version,
        "x-servekit-revision": app.revision,
    }
    return {
        "openapi": OPENAPI_VERSION,
        "info": info,
        "tags": _tags(operations),
        "paths": paths,
        "components": {
            "schemas": {**names.schemas, **_error_schemas()},
            "parameters": _parameters(),
            "headers": _headers(),
            "responses": _error_responses(),
        },
    }


# ---- routes


class _Operation(NamedTuple):
    """One method of one path; `many` is the one that takes a client's own batch."""

    service: ServiceSpec
    endpoint: EndpointSpec
    path: str
    many: bool

    @property
    def id(self) -> str:
        suffix = _BATCH.replace("/", ".") if self.many else ""
        return f"{self.service.name}.{self.endpoint.name}{suffix}"


def _operations(app: AppSpec) -> Iterator[_Operation]:
    """Yield the app's public routes as the gateway has them, the root service's first."""
    for service in reversed(app.services):
        if service.prefix is None:
            continue
        prefix = service.prefix.rstrip("/")
        for endpoint in service.endpoints:
            if endpoint.internal:
                continue
            path = prefix + endpoint.path.rstrip("/")
            yield _Operation(service, endpoint, path or "/", many=False)
            if endpoint.kind == "batched":
                yield _Operation(service, endpoint, path + _BATCH, many=True)


def _operation(operation: _Operation, names: "_Names") -> dict[str, Any]:
    service, endpoint, _, many = operation
    summary, description = _doc(endpoint.doc)
    if many:
        description = f"{description}\n\nTakes an array of items and answers one result or error "
        description += "for each, in their order; they are merged with other callers' items."
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": list(dict.fromkeys([service.name, *endpoint.tags])),
        "summary": summary or _readable(endpoint.name) + " (batch)" * many,
        "description": description.strip(),
        "parameters": [*_query(operation, names), *_shared_parameters(endpoint)],
        "requestBody": _request_body(operation, names),
        "responses": {
            "200": _success(operation, names),
            **{
                str(error.status): {"$ref": f"#/components/responses/{type(error).__name__}"}
                for error in _ERRORS
                if endpoint.method != "GET" or not isinstance(error, PayloadTooLarge)
            },
        },
        "x-servekit": _facts(service, endpoint),
    }
    return {key: value for key, value in described.items() if value not in ("", None)}


def _facts(service: ServiceSpec, endpoint: EndpointSpec) -> dict[str, Any]:
    timeout_s = service.limits.timeout_s if endpoint.timeout_s is None else endpoint.timeout_s
    return {
        "service": service.name,
        "endpoint": endpoint.name,
        "kind": endpoint.kind,
        "idempotent": endpoint.idempotent,
        "timeout_s": timeout_s,
        "max_body_bytes": service.limits.max_body_bytes,
        **({"max_batch": endpoint.batch.max_size} if endpoint.batch is not None else {}),
    }


def _tags(operations: list[_Operation]) -> list[dict[str, Any]]:
    tags: dict[str, dict[str, Any]] = {}
    for service, _, _, _ in operations:
        tag = tags.setdefault(service.name, {"name": service.name})
        if service.doc:
            tag["description"] = service.doc
    for _, endpoint, _, _ in operations:
        for name in endpoint.tags:
            tags.setdefault(name, {"name": name})
    return list(tags.values())


def _doc(text: str) -> tuple[str, str]:
    """Return a docstring's first line, and what follows it."""
    first, _, rest = text.strip().partition("\n")
    return first.strip(), rest.strip()


def _readable(name: str) -> str:
    return name.replace("_", " ").strip().capitalize()


# ---- requests


def _query(operation: _Operation, names: "_Names") -> Iterator[dict[str, Any]]:
    endpoint = operation.endpoint
    if endpoint.method != "GET":
        return
    schema = names.of(operation, "Input")
    required = schema.get("required", [])
    properties: dict[str, Schema] = schema.get("properties", {})
    for name in dict.fromkeys([*required, *properties]):
        declared = properties[name]
        parameter = {"name": name, "in": "query", "required": name in required, "schema": declared}
        if "description" in declared:
            parameter["description"] = declared["description"]
        yield parameter


def _shared_parameters(endpoint: EndpointSpec) -> list[dict[str, str]]:
    return [
        {"$ref": f"#/components/parameters/{name}"}
        for name in _parameters()
        if name != "IdempotencyKey" or not endpoint.idempotent
    ]


def _request_body(operation: _Operation, names: "_Names") -> dict[str, Any] | None:
    endpoint = operation.endpoint
    if endpoint.method == "GET":
        return None
    schema = names.of(operation, "Input")
    # The object whose keys are the parameters is the only one that has no title of its own.
    by_name = schema.get("additionalProperties") is False and "title" not in schema
    if by_name and not schema.get("properties"):
        return None
    required = bool(not by_name or schema.get("required") or operation.many)
    binary = endpoint.binary_input
    if operation.many:
        binary = "array" if binary == "array" else ""
        schema = {"type": "array", "items": schema}
    return {"required": required, "content": _content(schema, binary, stacked=operation.many)}


def _content(
    schema: Schema, binary: Literal["", "array", "bytes"], *, stacked: bool = False
) -> dict[str, Any]:
    """Return the media types of a value, the default one first."""
    content: dict[str, Any] = {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}
    if binary == "bytes":
        return {BINARY: {"schema": _raw(BINARY, "The bytes themselves.")}, **content}
    if binary == "array":
        array = "The items, stacked along a new first axis" if stacked else schema["description"]
        plain = f"{array}: little-endian elements in C order, without a header."
        content[BINARY] = {"schema": _raw(BINARY, plain)}
        content[NPY] = {"schema": _raw(NPY, f"{array}: a NumPy .npy file.")}
    return content


def _raw(media_type: str, description: str) -> Schema:
    return {"type": "string", "contentMediaType": media_type, "description": description}


# ---- answers


def _success(operation: _Operation, names: "_Names") -> dict[str, Any]:
    endpoint = operation.endpoint
    schema = names.of(operation, "Output")
    if operation.many:
        item = {
            "oneOf": [
                {
                    "title": "Result",
                    "type": "object",
                    "required": ["result"],
                    "properties": {"result": schema},
                },
                {"$ref": f"{_REF}Error"},
            ]
        }
        description = "One result or error for each item, in their order."
        content: dict[str, Any] = {JSON: {"schema": {"type": "array", "items": item}}}
    elif endpoint.kind == "stream":
        description = "A stream of chunks."
        content = {EVENT_STREAM: _events(schema)}
        if endpoint.binary_output:
            content[BINARY] = {"schema": _raw(BINARY, "The chunks' bytes, one behind the other.")}
    else:
        description = "The answer."
        content = _content(schema, endpoint.binary_output)
        if endpoint.media_type:
            text = _raw(endpoint.media_type, "The answer as it is.")
            content.pop(BINARY, None)
            content = {endpoint.media_type: {"schema": text}, **content}
    headers = {
        name: {"$ref": f"#/components/headers/{name}"}
        for name in ("x-request-id", "x-servekit-version", "x-servekit-replica")
    }
    return {"description": description, "headers": headers, "content": content}


def _events(chunk: Schema) -> dict[str, Any]:
    """Return the media type of a stream.

    OpenAPI 3.1 can't say what an event holds; `x-itemSchema` is the `itemSchema` of 3.2 (4.14.3.4).
    """
    data = {"type": "string", "contentMediaType": JSON, "contentSchema": chunk}
    return {
        "schema": {
            "type": "string",
            "contentMediaType": EVENT_STREAM,
            "description": "Server-sent events: one chunk as JSON in each `data:`, then "
            "`event: end`; or `event: error` with an Error.",
        },
        "x-itemSchema": {
            "type": "object",
            "required": ["data"],
            "properties": {"data": data, "event": {"enum": ["end", "error"]}},
        },
    }


def _error_responses() -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for error in _ERRORS:
        headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
        if error.retry_after_s is not None:
            headers["retry-after"] = {"$ref": "#/components/headers/retry-after"}
        example = {"error": error.details() | {"request_id": "35ddc6d32d000001"}}
        responses[type(error).__name__] = {
            "description": f"{HTTPStatus(error.status).phrase}. {_DESCRIPTIONS[type(error)]}",
            "headers": headers,
            "content": {JSON: {"schema": {"$ref": f"{_REF}Error"}, "example": example}},
        }
    return responses


# ---- what all have in common


def _error_schemas() -> dict[str, Schema]:
    text: Schema = {"type": "string"}
    return {
        "Error": {
            "type": "object",
            "description": "What every failed call answers.",
            "required": ["error"],
            "properties": {"error": {"$ref": f"{_REF}ErrorDetails"}},
        },
        "ErrorDetails": {
            "type": "object",
            "required": ["code", "reason", "message"],
            "properties": {
                "code": text
                | {
                    "description": "The kind of error; goes with the status.",
                    "examples": [error.code for error in _ERRORS],
                },
                "reason": text | {"description": "The cause, finer than the code."},
                "message": text | {"description": "What went wrong, for people."},
                "fields": {
                    "type": "array",
                    "description": "Each wrong field of the body, where that is the cause.",
                    "items": {"$ref": f"{_REF}ErrorField"},
                },
                "retry_after_s": {
                    "type": "number",
                    "minimum": 0,
                    "description": "Seconds after which a new attempt may succeed.",
                },
                "request_id": text
                | {"description": "Names the call in the server's log. Absent in a batch's items."},
            },
        },
        "ErrorField": {
            "type": "object",
            "required": ["path", "message", "type"],
            "properties": {
                "path": text
                | {
                    "description": 'Where it is in the body; "" is the body itself.',
                    "examples": ["values[2].score"],
                },
                "message": text | {"description": "What is wrong with it, for people."},
                "type": text | {"description": "The rule that it breaks.", "examples": ["missing"]},
            },
        },
    }


def _parameters() -> dict[str, Any]:
    def header(name: str, description: str, **schema: Any) -> dict[str, Any]:
        schema = {"type": "string", **schema}
        return {"name": name, "in": "header", "description": description, "schema": schema}

    return {
        "RequestId": header(
            "x-request-id",
            "Names the call in logs and in the answer; made up where absent.",
            maxLength=128,
        ),
        "Timeout": header(
            "x-servekit-timeout",
            "Longest time that the call may take, queue and run; it travels with the call. It can "
            "shorten the endpoint's own limit.",
            examples=["5s", "250ms"],
        ),
        "Affinity": header(
            "x-servekit-affinity", "Calls with the same key prefer the same replica."
        ),
        "IdempotencyKey": header(
            "idempotency-key",
            "Says that running the call twice does no harm, so it is sent again when a replica is "
            "lost.",
        ),
        "TraceParent": header(
            "traceparent",
            "W3C trace context of the caller.",
            pattern="^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$",
        ),
    }


def _headers() -> dict[str, Any]:
    def header(description: str, kind: str = "string") -> dict[str, Any]:
        return {"description": description, "schema": {"type": kind}}

    return {
        "x-request-id": header("Names the call in the server's log."),
        "x-servekit-version": header("Version of the service that answered."),
        "x-servekit-replica": header("The replica that answered."),
        "retry-after": header("Seconds after which a new attempt may succeed.", "integer"),
    }


# ---- models


_Target: TypeAlias = Callable[[str], str]
"""From a reference to the one that takes its place."""


class _Variant(NamedTuple):
    """One of the models with some name: who uses it first, and what it is called in the end."""

    service: str
    direction: Direction


class _Names:
    """Moves the `$defs` of all endpoints' schemas to one place.

    Two models of one name are the same if they and all that they refer to are equal. Else their
    services' names tell them apart, and within one service the direction, as pydantic has models
    that read and write differently: `Hit`, `Search.Hit`, `Hit.Output`.
    """

    def __init__(self, operations: list[_Operation]) -> None:
        found: dict[str, dict[str, _Variant]] = {
            name: {"": _Variant("", "Output")} for name in _error_schemas()
        }
        models: list[tuple[str, str, Schema, Mapping[str, Schema]]] = []
        for operation in operations:
            for direction, schema in _schemas(operation.endpoint):
                definitions: dict[str, Schema] = schema.get("$defs", {})
                for name in _reachable(_without_definitions(schema), definitions):
                    key = _identity(name, definitions)
                    variants = found.setdefault(name, {})
                    if key not in variants:
                        variants[key] = _Variant(operation.service.name, direction)
                        models.append((name, key, definitions[name], definitions))
        self._names = dict(_named(found))
        self.schemas: dict[str, Schema] = {
            self._names[name, key]: self._moved(schema, definitions)
            for name, key, schema, definitions in models
        }

    def of(self, operation: _Operation, direction: Direction) -> Schema:
        """Return an endpoint's schema, with references to the moved models."""
        schema = dict(_schemas(operation.endpoint))[direction]
        return self._moved(_without_definitions(schema), schema.get("$defs", {}))

    def _moved(self, schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
        def target(ref: str) -> str:
            name = _target(ref, definitions)
            return ref if name is None else _REF + self._names[name, _identity(name, definitions)]

        return _rewritten(schema, target)


def _schemas(endpoint: EndpointSpec) -> tuple[tuple[Direction, Schema], tuple[Direction, Schema]]:
    return ("Input", endpoint.input), ("Output", endpoint.output)


def _without_definitions(schema: Schema) -> Schema:
    return {key: value for key, value in schema.items() if key != "$defs"}


def _named(found: Mapping[str, Mapping[str, _Variant]]) -> Iterator[tuple[tuple[str, str], str]]:
    """Choose a name for every variant of every model."""
    taken: set[str] = set()
    for name, variants in found.items():
        plain = _UNFIT.sub("_", name)
        services = Counter(variant.service for variant in variants.values())
        for key, (service, direction) in variants.items():
            chosen = plain
            if service and len(services) > 1:
                chosen = f"{_UNFIT.sub('_', service)}.{plain}"
            if services[service] > 1:
                chosen = f"{chosen}.{direction}"
            free, count = chosen, 1
            while free in taken:
                count += 1
                free = f"{chosen}.{count}"
            taken.add(free)
            yield (name, key), free


def _target(ref: str, definitions: Mapping[str, Schema]) -> str | None:
    """Return the model that a reference leads to, past those that only refer to others."""
    seen: set[str] = set()
    while ref.startswith(_LOCAL) and ref not in seen:
        seen.add(ref)
        name = ref.removeprefix(_LOCAL).replace("~1", "/").replace("~0", "~")
        if name not in definitions:
            return None
        if definitions[name].keys() != {"$ref"}:
            return name
        ref = definitions[name]["$ref"]
    return None


def _reachable(schema: Schema, definitions: Mapping[str, Schema]) -> list[str]:
    """Return the models that a schema refers to, in order, also those behind others."""
    found: dict[str, None] = {}
    waiting = [schema]

    def note(ref: str) -> str:
        name = _target(ref, definitions)
        if name is not None and name not in found:
            found[name] = None
            waiting.append(definitions[name])
        return ref

    while waiting:
        _rewritten(waiting.pop(0), note)
    return list(found)


def _identity(name: str, definitions: Mapping[str, Schema]) -> str:
    """Return a text that is equal for equal models only: the model and all that it refers to."""
    names = [name, *_reachable(definitions[name], definitions)]
    return json.dumps([[other, definitions[other]] for other in names], sort_keys=True)


def _rewritten(schema: Schema, target: _Target) -> Schema:
    """Return a copy of a schema whose references to models went through `target`."""
    copy: Schema = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str):
            copy[key] = target(value)
        elif key == "discriminator" and isinstance(value, dict):
            choice = cast("dict[str, Any]", value)
            mapping: dict[str, str] = choice.get("mapping", {})
            copy[key] = {**choice, "mapping": {tag: target(ref) for tag, ref in mapping.items()}}
        elif key in _NAMED and isinstance(value, dict):
            named = cast("dict[str, Any]", value)
            copy[key] = {name: _part(part, target) for name, part in named.items()}
        else:
            copy[key] = value if key in _DATA else _part(value, target)
    return copy


def _part(value: Any, target: _Target) -> Any:
    if isinstance(value, dict):
        return _rewritten(cast("Schema", value), target)
    if isinstance(value, list | tuple):
        return [_part(part, target) for part in cast("list[Any]", value)]
    return value
