"""From the text of queries and forms to the JSON document that a plain body would be.

Text becomes a number, boolean, null, list or object where the schema says so; what doesn't fit stays
text, for the validator to refuse with the field's path. A repeated name makes a list. Files of a
form become segments.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from servekit.spec.file import File
from servekit.spec.segment import KEY

_WRITTEN_AS_JSON = {"integer", "number", "boolean", "null", "array", "object"}


def document(fields: Iterable[tuple[str, str | File]], schema: dict[str, Any]) -> list[Any]:
    """Return a JSON document, and behind it the files that it refers to.

    Args:
        fields: Names and values, as they came.
        schema: Of the object whose keys the names are.
    """
    properties: dict[str, Any] = schema.get("properties", {})
    definitions: dict[str, Any] = schema.get("$defs", {})
    segments: list[Any] = [b""]
    found: dict[str, Any] = {}
    for name, given in fields:
        declared = properties.get(name, {})
        items = declared.get("items", {}) if declared.get("type") == "array" else None
        if isinstance(given, File):
            segments.append(given)
            value: Any = {KEY: len(segments) - 1}
            # A list of files; a numeric array or a table is one file.
            many = items is not None and "string" in _kinds(items, definitions)
        elif items is not None and not given.startswith("["):
            value, many = _scalar(given, _kinds(items, definitions)), True
        else:
            value, many = _scalar(given, _kinds(declared, definitions)), False
        if many:
            found.setdefault(name, []).append(value)
        else:
            found[name] = value
    segments[0] = msgspec.json.encode(found)
    return segments


def _kinds(schema: dict[str, Any], definitions: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; enums are behind a reference."""
    if "$ref" in schema:
        schema = definitions.get(schema["$ref"].rpartition("/")[2], {})
    declared: str | list[str] = schema.get("type", "")
    kinds = {declared} if isinstance(declared, str) else set(declared)
    parts = (*schema.get("anyOf", ()), *schema.get("oneOf", ()))
    return kinds.union(*(_kinds(part, definitions) for part in parts))


def _scalar(text: str, kinds: set[str]) -> Any:
    """Return text as the JSON value that it is written as, if one is welcome."""
    if ("string" in kinds and text != "null") or not kinds & _WRITTEN_AS_JSON:
        return text
    try:
        value = msgspec.json.decode(text.encode())
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text
    nested = isinstance(value, list | dict)
    welcome = kinds & {"array", "object"} if nested else not isinstance(value, str)
    return value if welcome else text
