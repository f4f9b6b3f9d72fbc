"""The OpenAPI 3.1 document of an app, made from its `AppSpec` alone.

In goes an `AppSpec`, out comes a document as plain JSON values: one path per public route, the
models of all endpoints under `components/schemas`, and one description of what every answer has in
common (errors, headers). Equal apps give equal documents, to the order of their keys. Nothing is
refused: an app that could be described can be documented.
"""

from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from servekit.core.call import JSON
from servekit.errors import (
    BadRequest,
    CallError,
    DeadlineExceeded,
    ExecutionError,
    InvalidInput,
    Overloaded,
    PayloadTooLarge,
    Unauthorized,
    Unavailable,
    UnsupportedMedia,
)
from servekit.protocols.bodies import answer, request_body
from servekit.protocols.jobs import JOB_ERRORS, accepted, job_paths, job_schemas
from servekit.protocols.models import REF, Models, Schema
from servekit.spec.app import AppSpec, EndpointSpec, ServiceSpec

OPENAPI_VERSION: Final = "3.1.0"

_BATCH: Final = "/batch"

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
_UNAUTHORIZED: Final = Unauthorized(
    "a credential is needed: send the header `authorization: Bearer …`",
    reason="missing_credentials",
    started=False,
)

_DESCRIPTIONS: Final[dict[type[CallError], str]] = {
    BadRequest: "The body or a header can't be parsed.",
    Unauthorized: "No credential came with the request, or none that is good here.",
    PayloadTooLarge: "The body is over the endpoint's limit.",
    UnsupportedMedia: "The endpoint takes or makes no such media type.",
    InvalidInput: "The body was parsed, but a field breaks its declared type; `fields` says which.",
    Overloaded: "Shed before it started: a queue is full, or the deadline can't be met.",
    ExecutionError: "The service failed; its log has the cause under the request id.",
    Unavailable: "No replica is ready, or the one that had the call was lost.",
    DeadlineExceeded: "The deadline passed, queued or running.",
}


def document(app: AppSpec, *, keys: bool = False, tokens: bool = False) -> dict[str, Any]:
    """Return the document; its values are JSON's.

    Args:
        app: What is described.
        keys: Its gateway asks for an API key.
        tokens: Its gateway asks for a JSON Web Token; with `keys` for one of the two.
    """
    schemes = _security_schemes(keys=keys, tokens=tokens)
    errors = sorted((*_ERRORS, *[_UNAUTHORIZED] * bool(schemes)), key=lambda e: e.status)
    described: dict[CallError, str] = {error: _DESCRIPTIONS[type(error)] for error in errors}
    root = app.service(app.root)
    operations = list(_operations(app))
    shared = _error_schemas()
    if any(operation.endpoint.task is not None for operation in operations):
        shared |= job_schemas()
        described |= JOB_ERRORS
    models = Models([(o.service.name, o.endpoint) for o in operations], shared)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        item = paths.setdefault(operation.path, {})
        item[operation.endpoint.method.lower()] = _operation(operation, models, errors)
        if operation.endpoint.task is not None:
            result = _success(operation, models)
            paths |= job_paths(
                operation.path,
                operation.service.name,
                operation.endpoint.name,
                result,
                secured=bool(schemes),
            )
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
            "schemas": {**models.schemas, **shared},
            "parameters": _parameters(),
            "headers": _headers(),
            "responses": _error_responses(described),
            **({"securitySchemes": schemes} if schemes else {}),
        },
        **({"security": [{name: []} for name in schemes]} if schemes else {}),
    }


def _security_schemes(*, keys: bool, tokens: bool) -> dict[str, Any]:
    schemes: dict[str, Any] = {}
    if keys:
        schemes["apiKey"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    if keys or tokens:
        what = " or ".join(["an API key"] * keys + ["a JSON Web Token"] * tokens)
        schemes["bearer"] = {"type": "http", "scheme": "bearer", "description": f"Takes {what}."}
    return schemes


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


def _operation(
    operation: _Operation, models: Models, errors: Sequence[CallError]
) -> dict[str, Any]:
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
        "parameters": [*_query(operation, models), *_shared_parameters(endpoint)],
        "requestBody": request_body(operation.endpoint, models, many=operation.many),
        "responses": {
            **(
                {"202": accepted()}
                if endpoint.task is not None
                else {"200": _success(operation, models)}
            ),
            **{
                str(error.status): {"$ref": f"#/components/responses/{type(error).__name__}"}
                for error in errors
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
        "version": service.version,
        "endpoint": endpoint.name,
        "kind": endpoint.kind,
        "idempotent": endpoint.idempotent,
        "timeout_s": timeout_s,
        "max_body_bytes": service.limits.max_body_bytes,
        **({"input": endpoint.inbound.name} if endpoint.inbound is not None else {}),
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


def _query(operation: _Operation, models: Models) -> Iterator[dict[str, Any]]:
    endpoint = operation.endpoint
    if endpoint.method != "GET" and endpoint.inbound is None:
        return
    schema = models.of(operation.endpoint, "Input")
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


# ---- answers


def _success(operation: _Operation, models: Models) -> dict[str, Any]:
    headers = {
        name: {"$ref": f"#/components/headers/{name}"}
        for name in ("x-request-id", "x-servekit-version", "x-servekit-replica")
    }
    answered = answer(operation.endpoint, models, many=operation.many)
    return {"description": "", "headers": headers} | answered


def _error_responses(errors: Mapping[CallError, str]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for error, description in errors.items():
        headers = {"x-request-id": {"$ref": "#/components/headers/x-request-id"}}
        if error.retry_after_s is not None:
            headers["retry-after"] = {"$ref": "#/components/headers/retry-after"}
        example = {"error": error.details() | {"request_id": "35ddc6d32d000001"}}
        responses[type(error).__name__] = {
            "description": f"{HTTPStatus(error.status).phrase}. {description}",
            "headers": headers,
            "content": {JSON: {"schema": {"$ref": f"{REF}Error"}, "example": example}},
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
            "properties": {"error": {"$ref": f"{REF}ErrorDetails"}},
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
                    "items": {"$ref": f"{REF}ErrorField"},
                },
                "retry_after_s": {
                    "type": "number",
                    "minimum": 0,
                    "description": "Seconds after which a new attempt may succeed.",
                },
                "started": {
                    "type": "boolean",
                    "description": "Whether the call may have run; there with 429 and 503.",
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
        "location": header("Path of the job."),
    }
