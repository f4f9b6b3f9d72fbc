"""Finding a None where a type has none.

pydantic doesn't look into instances that are returned as they were made, and its serializer takes
None for anything. So an answer that has a null in it is compared with the schema that was promised.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "number": (int, float),
    "integer": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_Schema = Mapping[str, Any]
_Path = tuple[str | int, ...]


def stray(tree: Any, schema: _Schema) -> _Path | None:
    """Return the path of the first null in a JSON-like tree that its JSON Schema has no place for.

    What a schema leaves open is allowed. Returns None if there is no such null.
    """
    return _stray(tree, schema, schema.get("$defs", {}), ())


def _stray(value: Any, schema: Any, definitions: _Schema, path: _Path) -> _Path | None:
    schema = _resolved(schema, definitions)
    if (branches := schema.get("anyOf") or schema.get("oneOf")) is not None:
        fitting = [branch for branch in branches if _fits(value, _resolved(branch, definitions))]
        if not fitting:
            return path if value is None else None
        all_found = [_stray(value, branch, definitions, path) for branch in fitting]
        return None if None in all_found else all_found[0]
    if value is None:
        return None if _fits(value, schema) else path
    for step, child, below in _children(value, schema):
        if (found := _stray(child, below, definitions, (*path, step))) is not None:
            return found
    return None


def _resolved(schema: Any, definitions: _Schema) -> _Schema:
    while isinstance(schema, dict) and "$ref" in schema:
        reference = cast("str", schema["$ref"])
        schema = definitions.get(reference.removeprefix("#/$defs/"), {})
    return cast("_Schema", schema) if isinstance(schema, dict) else {}


def _fits(value: Any, schema: _Schema) -> bool:
    if "const" in schema:
        return bool(value == schema["const"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds = schema.get("type")
    if kinds is None:
        return True
    names = cast("list[str]", [kinds] if isinstance(kinds, str) else kinds)
    return any(isinstance(value, _KINDS.get(name, (object,))) for name in names)


def _children(value: Any, schema: _Schema) -> Iterator[tuple[str | int, Any, Any]]:
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        others = schema.get("additionalProperties", {})
        for key, child in cast("dict[str, Any]", value).items():
            yield key, child, properties.get(key, others)
    elif isinstance(value, list | tuple):
        first = schema.get("prefixItems", ())
        for index, child in enumerate(cast("list[Any]", value)):
            below = first[index] if index < len(first) else schema.get("items", {})
            yield index, child, below
