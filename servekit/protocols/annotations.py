"""From JSON Schemas to Python types, as source: classes for models, annotations for all else.

In go the schemas of an OpenAPI document. A model whose keys can be attributes becomes a dataclass, any
other a TypedDict; what is long, or named and neither, becomes an alias. Arrays are told by the
description that `sk.Array` gives them. What a schema leaves open, or this module doesn't know, is `Any`.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple, cast

from servekit.protocols.models import REF, Schema
from servekit.protocols.source import (
    WIDTH,
    bracketed,
    docstring,
    free_name,
    identifier,
    is_name,
    literal,
    quoted,
)

_BUILTINS: Final = frozenset({"bool", "bytes", "dict", "float", "int", "list", "str"})
_SCALARS: Final = {"integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_FORMATS: Final = {
    "date": "date",
    "date-time": "datetime",
    "duration": "timedelta",
    "time": "time",
    "uuid": "UUID",
}
_ARRAY: Final = re.compile(r"(any dtype|bool|u?int\d+|float\d+) of shape \((.*)\)")
_DIM: Final = re.compile(r"\.\.\.|\d+|[A-Za-z_]\w*")
_LONG: Final = 60
"""Columns of an annotation from which on it gets a name of its own."""


class _Type(NamedTuple):
    """A type as source: parts with something between them, in which it may be broken into lines."""

    parts: tuple[str, ...]
    head: str = ""
    between: str = ", "
    tail: str = ""

    def __str__(self) -> str:
        return f"{self.head}{self.between.join(self.parts)}{self.tail}"

    def alias(self, name: str) -> list[str]:
        """Return the lines that give it a name."""
        head = f"{name}: TypeAlias = "
        if self.head:
            return bracketed(head + self.head, self.parts, self.tail)
        if len(head) + len(str(self)) <= WIDTH or len(self.parts) == 1:
            return [f"{head}{self}"]
        rest = [f"    | {part}" for part in self.parts[1:]]
        return [f"{head}(", f"    {self.parts[0]}", *rest, ")"]


_ANY: Final = _Type(("Any",))


class Annotations:
    """Writes types, and collects the definitions that they need.

    Args:
        models: The document's schemas, by name.
        taken: Names that are used otherwise.
    """

    def __init__(self, models: Mapping[str, Schema], taken: Iterable[str]) -> None:
        self._models = models
        self.taken = set(taken)
        self._names: dict[str, str] = {}
        self._inline: list[tuple[Schema, str]] = []
        self._classes: dict[str, list[str]] = {}
        self._aliases: dict[str, _Type] = {}

    def of(self, schema: Schema, name: str) -> str:
        """Return a schema's type; `name` is for a definition of its own, should it need one."""
        name = name.replace("_", "-")  # its parts, to be joined as a class's name is
        written = self._written(schema, name)
        text = str(written)
        return text if len(text) <= _LONG or text in self.taken else self._alias(written, name)

    def definitions(self) -> Iterator[list[str]]:
        """Yield the definitions, each as its lines, in an order in which they can be run."""
        yield from self._classes.values()
        for name, written in self._aliases.items():
            yield written.alias(name)

    # ---- annotations

    def _written(self, schema: Schema, name: str) -> _Type:
        if "$ref" in schema:
            return _Type((self._model(str(schema["$ref"])),))
        if "title" in schema and (known := self._known(schema)) is not None:
            return _Type((known,))
        if "const" in schema:
            return _literals([schema["const"]])
        if isinstance(values := schema.get("enum"), list):
            return _literals(list(cast("Iterable[Any]", values)))
        if (array := _array(schema.get("description"))) is not None:
            return array
        for key in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(key), list) and parts:
                return self._union(cast("list[Schema]", parts), name)
        kind = schema.get("type")
        if isinstance(kind, list):
            kinds = cast("Iterable[Any]", kind)
            return self._union([{**schema, "type": one} for one in kinds], name)
        if kind == "string":
            return _Type((_text(schema),))
        if kind == "array":
            return self._list(schema, name)
        if kind == "object":
            return self._object(schema, name)
        return _Type((_SCALARS.get(str(kind), "Any"),))

    def _union(self, options: list[Schema], name: str) -> _Type:
        parts = list(dict.fromkeys(self.of(option, name) for option in options))
        if "Any" in parts:
            return _ANY
        parts.sort(key="None".__eq__)
        return _Type(tuple(parts), between=" | ")

    def _list(self, schema: Schema, name: str) -> _Type:
        prefix, items = schema.get("prefixItems"), schema.get("items")
        if isinstance(prefix, list) and items is None:
            parts = [self.of(part, name) for part in cast("list[Schema]", prefix)]
            return _Type(tuple(parts), "tuple[", tail="]")
        item = self.of(cast("Schema", items), name) if isinstance(items, dict) else "Any"
        is_set = schema.get("uniqueItems") is True and item in ("str", "int", "float", "bool")
        return _Type((item,), "set[" if is_set else "list[", tail="]")

    def _object(self, schema: Schema, name: str) -> _Type:
        if schema.get("properties"):
            return _Type((self._inline_model(schema, name),))
        values = schema.get("additionalProperties")
        value = self.of(cast("Schema", values), name) if isinstance(values, dict) else "Any"
        return _Type(("str", value), "dict[", tail="]")

    # ---- definitions

    def _free(self, name: str) -> str:
        free = free_name(identifier(name, capital=True), self.taken)
        self.taken.add(free)
        return free

    def _alias(self, written: _Type, name: str) -> str:
        for known, its_type in self._aliases.items():
            if its_type == written:
                return known
        free = self._free(name)
        self._aliases[free] = written
        return free

    def _model(self, ref: str) -> str:
        """Return the name of a model, which is defined when it is first asked for."""
        key = ref.removeprefix(REF)
        if key in self._names:
            return self._names[key]
        schema = self._models.get(key, {})
        if schema.get("type") == "object" and schema.get("properties"):
            self._names[key] = name = self._free(key)
            self._define(name, schema)
            return name
        self._names[key] = "Any"  # for itself: an alias can't hold its own name
        written = self._written({k: v for k, v in schema.items() if k != "title"}, key)
        text = str(written)
        self._names[key] = (
            text if text in self.taken or written == _ANY else self._alias(written, key)
        )
        return self._names[key]

    def _known(self, schema: Schema) -> str | None:
        """Return the name of a model that stands where it is used, but has been seen elsewhere."""
        for key, model in self._models.items():
            if model == schema:
                return self._model(REF + key)
        return next((name for known, name in self._inline if known == schema), None)

    def _inline_model(self, schema: Schema, name: str) -> str:
        title = schema.get("title")
        free = self._free(title if isinstance(title, str) and title else name)
        self._inline.append((schema, free))
        self._define(free, schema)
        return free

    def _define(self, name: str, schema: Schema) -> None:
        self._classes[name] = []  # its place is before those that it needs
        properties = cast("dict[str, Schema]", schema["properties"])
        required = cast("list[str]", schema.get("required", []))
        kinds = {key: self.of(part, f"{name}-{key}") for key, part in properties.items()}
        defaults = {
            key: _field_default(kinds[key], part)
            for key, part in properties.items()
            if key not in required
        }
        doc = docstring(str(schema.get("description", "")), "    ")
        sparse = kinds | {key: f"NotRequired[{kinds[key]}]" for key in defaults}
        if all(defaults.values()):
            head = ["@dataclass(kw_only=True)", f"class {name}:"]
            tails = {key: f" = {value}" for key, value in defaults.items()}
            lines = [f"    {key}: {kind}{tails.get(key, '')}" for key, kind in kinds.items()]
        else:
            head = [f"class {name}(TypedDict):"]
            lines = [f"    {key}: {kind}" for key, kind in sparse.items()]
        used = set(
            re.findall(r"\w+", " ".join([*sparse.values(), *filter(None, defaults.values())]))
        )
        if all(is_name(key) and key not in used for key in properties):
            self._classes[name] = [*head, *doc, *[""] * bool(doc), *lines]
            return
        items = [f"{quoted(key)}: {quoted(kind)}" for key, kind in sparse.items()]
        table = bracketed("{", items, "},", "    ")
        self._classes[name] = [f"{name} = TypedDict(", f"    {quoted(name)},", *table, ")"]


def default(schema: Schema) -> str | None:
    """Return a default as source: a literal, or `[]`; None if there is none, or it isn't so simple."""
    if "default" not in schema:
        return None
    value = schema["default"]
    if isinstance(value, str):
        options = [schema, *cast("list[Schema]", schema.get("anyOf", []))]
        is_text = all(_text(option) == "str" for option in options)
        return literal(value) if is_text else None
    if isinstance(value, list):
        is_empty = not value and schema.get("type") == "array" and not schema.get("uniqueItems")
        return "[]" if is_empty else None
    return literal(value) if value is None or isinstance(value, int | float) else None


def _field_default(kind: str, schema: Schema) -> str | None:
    value = default(schema)
    if value != "[]":
        return value
    # Run when the class is made, so it can name nothing that is defined below.
    is_known = set(re.findall(r"\w+", kind)) <= _BUILTINS
    return f"field(default_factory={kind})" if is_known else None


def _literals(values: list[Any]) -> _Type:
    if values == [None]:
        return _Type(("None",))
    if not values or any(not isinstance(value, str | int | None) for value in values):
        return _ANY  # floats and lists can't be literals
    return _Type(tuple(map(literal, values)), "Literal[", tail="]")


def _text(schema: Schema) -> str:
    if schema.get("contentEncoding") == "base64":
        return "bytes"
    return _FORMATS.get(str(schema.get("format")), "str")


def _array(description: object) -> _Type | None:
    match = _ARRAY.fullmatch(description) if isinstance(description, str) else None
    if match is None:
        return None
    dims = [dim.strip() for dim in match[2].split(",") if dim.strip()]
    if not all(map(_DIM.fullmatch, dims)):
        return None
    dtype = "any" if match[1] == "any dtype" else match[1]
    scalar = {"any": "Any", "bool": "np.bool_"}.get(dtype, f"np.{dtype}")
    spec = f'sk.Array["{dtype}", "{" ".join(dims)}"]'
    return _Type((f"NDArray[{scalar}]", spec), "Annotated[", tail="]")
