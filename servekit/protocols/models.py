"""The models of an OpenAPI document: all endpoints' schemas share one set, each under one name."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast

from servekit.spec.app import EndpointSpec

Schema = dict[str, Any]
Direction = Literal["Input", "Chunk", "Output"]

REF: Final = "#/components/schemas/"
_LOCAL: Final = "#/$defs/"
_NAMED: Final = {"properties", "patternProperties", "dependentSchemas", "$defs"}
"""Keywords whose values are schemas by name, so that a property may be called `default`."""
_UNFIT: Final = re.compile(r"[^A-Za-z0-9._-]")
"""What the name of a component can't have in it."""
_DATA: Final = {"default", "const", "enum", "examples", "example"}
"""Keywords whose values are data, in which nothing is a reference."""

_Target: TypeAlias = Callable[[str], str]
"""From a reference to the one that takes its place."""


class _Variant(NamedTuple):
    """One of the models with some name: who uses it first, and what it is called in the end."""

    service: str
    direction: Direction


class Models:
    """Moves the `$defs` of all endpoints' schemas to one place.

    Args:
        endpoints: With the names of their services.
        reserved: Names that are taken.

    Attributes:
        schemas: The models, by the names that they have now.

    Two models of one name are the same if they and all that they refer to are equal. Else their
    services' names tell them apart, and within one service the direction, as pydantic has models
    that read and write differently: `Hit`, `Search.Hit`, `Hit.Output`.
    """

    def __init__(
        self, endpoints: Iterable[tuple[str, EndpointSpec]], reserved: Iterable[str]
    ) -> None:
        found: dict[str, dict[str, _Variant]] = {
            name: {"": _Variant("", "Output")} for name in reserved
        }
        models: list[tuple[str, str, Schema, Mapping[str, Schema]]] = []
        for service, endpoint in endpoints:
            for direction, schema in _schemas(endpoint):
                definitions: dict[str, Schema] = schema.get("$defs", {})
                for name in _reachable(_without_definitions(schema), definitions):
                    key = _identity(name, definitions)
                    variants = found.setdefault(name, {})
                    if key not in variants:
                        variants[key] = _Variant(service, direction)
                        models.append((name, key, definitions[name], definitions))
        self._names = dict(_named(found))
        self.schemas: dict[str, Schema] = {
            self._names[name, key]: self._moved(schema, definitions)
            for name, key, schema, definitions in models
        }

    def of(self, endpoint: EndpointSpec, direction: Direction) -> Schema:
        """Return an endpoint's schema, with references to the moved models."""
        schema = dict(_schemas(endpoint))[direction]
        return self._moved(_without_definitions(schema), schema.get("$defs", {}))

    def _moved(self, schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
        def target(ref: str) -> str:
            name = _target(ref, definitions)
            return ref if name is None else REF + self._names[name, _identity(name, definitions)]

        return _rewritten(schema, target)


def _schemas(endpoint: EndpointSpec) -> tuple[tuple[Direction, Schema], ...]:
    chunk = {} if endpoint.inbound is None else endpoint.inbound.chunk
    return ("Input", endpoint.input), ("Chunk", chunk), ("Output", endpoint.output)


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
