"""The media types of an OpenAPI document: in which forms a request and an answer travel."""

from collections.abc import Mapping, Sequence
from typing import Any

from servekit.core.call import BINARY, EVENT_STREAM, FORM, JSON, MSGPACK, NDJSON, NPY
from servekit.protocols.models import REF, Models, Schema
from servekit.spec.app import EndpointSpec, InboundSpec
from servekit.spec.raw import ANY_TYPE, CSV, MAKES, RAW_FIRST, TAKES, Form


def request_body(endpoint: EndpointSpec, models: Models, *, many: bool) -> dict[str, Any] | None:
    """Return what an endpoint takes, as an OpenAPI request body; None if it takes nothing.

    Args:
        endpoint: The endpoint.
        models: Knows where the models of its schemas are.
        many: It is the endpoint's own batch.
    """
    if endpoint.method == "GET":
        return None
    if endpoint.inbound is not None:
        return {
            "required": True,
            "content": _chunks(endpoint.inbound, models.of(endpoint, "Chunk")),
        }
    schema: Schema = models.of(endpoint, "Input")
    # The object whose keys are the parameters is the only one that has no title of its own.
    by_name = schema.get("additionalProperties") is False and "title" not in schema
    if by_name and not schema.get("properties"):
        return None
    required = bool(not by_name or schema.get("required") or many)
    form = endpoint.raw_input
    if many:
        items: Schema = {"type": "array", "items": schema}
        content = _content(items, "array" if form == "array" else "", TAKES, stacked=True)
        return {"required": required, "content": content}
    content = _content(schema, form, TAKES)
    if by_name and any(map(_is_file, schema["properties"].values())):
        content[FORM] = {"schema": _form(schema)}
    return {"required": required, "content": content}


def _chunks(inbound: InboundSpec, chunk: Schema) -> dict[str, Any]:
    """Return the media types of a body that streams; a WebSocket carries the same chunks."""
    what = f"{inbound.name!r}, one chunk for each line, as it comes. Or open a WebSocket."
    content: dict[str, Any] = {
        NDJSON[0]: {"schema": _raw(NDJSON[0], what), "x-itemSchema": chunk},
    }
    if inbound.raw == "bytes":
        content[BINARY] = {"schema": _raw(BINARY, f"{inbound.name!r}, in pieces as they come.")}
    return content


def _is_file(schema: Schema) -> bool:
    """Return whether a field is sent best as a part of a form."""
    parts = [schema, schema.get("items", {}), *schema.get("anyOf", ())]
    return any(part.get("contentEncoding") == "base64" for part in parts)


def _form(schema: Schema) -> Schema:
    """Return the schema of a form: its files are bytes, not base64."""
    properties: dict[str, Schema] = {
        name: _raw(BINARY, field.get("description", "A file.")) if _is_file(field) else field
        for name, field in schema["properties"].items()
    }
    return schema | {"properties": properties}


def _content(
    schema: Schema,
    form: Form,
    media_types: Mapping[Form, Sequence[str]],
    *,
    stacked: bool = False,
) -> dict[str, Any]:
    """Return the media types of a value, the default one first."""
    content: dict[str, Any] = {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}
    raw: dict[str, Any] = {}
    for media_type in media_types[form]:
        description = _RAW.get((form, media_type)) or _RAW.get((form, ""), "")
        if form == "array":
            array = (
                "The items, stacked along a new first axis" if stacked else schema["description"]
            )
            description = f"{array}: {description}"
        raw[media_type] = {"schema": _raw(media_type, description)}
    return raw | content if form in ANY_TYPE | RAW_FIRST else content | raw


_RAW: dict[tuple[Form, str], str] = {
    ("array", BINARY): "little-endian elements in C order, without a header.",
    ("array", NPY): "a NumPy .npy file.",
    ("bytes", ""): "The bytes themselves.",
    ("file", ""): "The file's content, of whatever media type.",
    ("image", ""): "The image.",
    ("table", CSV): "The table with a line of column names.",
    ("table", ""): "The table as an Arrow IPC stream.",
    ("text", ""): "The text without quotes.",
}
"""What a raw body is."""


def _raw(media_type: str, description: str) -> Schema:
    return {"type": "string", "contentMediaType": media_type, "description": description}


def answer(endpoint: EndpointSpec, models: Models, *, many: bool) -> dict[str, Any]:
    """Return what an endpoint answers: a description, and its content by media type."""
    schema = models.of(endpoint, "Output")
    if many:
        item = {
            "oneOf": [
                {
                    "title": "Result",
                    "type": "object",
                    "required": ["result"],
                    "properties": {"result": schema},
                },
                {"$ref": f"{REF}Error"},
            ]
        }
        results = {"type": "array", "items": item}
        return {
            "description": "One result or error for each item, in their order.",
            "content": {JSON: {"schema": results}},
        }
    if endpoint.kind == "stream":
        return {"description": "A stream of chunks.", "content": _stream(endpoint, schema)}
    content = _content(schema, endpoint.raw_output, MAKES)
    if endpoint.media_type:
        text = _raw(endpoint.media_type, "The answer as it is.")
        content.pop(BINARY, None)
        content = {endpoint.media_type: {"schema": text}, **content}
    return {"description": "The answer.", "content": content}


def _stream(endpoint: EndpointSpec, chunk: Schema) -> dict[str, Any]:
    what = "A chunk for each line; a failure is a last line with an Error."
    content: dict[str, Any] = {
        EVENT_STREAM: _events(chunk),
        NDJSON[0]: {"schema": _raw(NDJSON[0], what), "x-itemSchema": chunk},
    }
    if endpoint.raw_output in ("bytes", "array"):
        content[BINARY] = {"schema": _raw(BINARY, "The chunks' bytes, one behind the other.")}
    return content


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
