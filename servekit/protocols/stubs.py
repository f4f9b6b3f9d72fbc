"""Declarations of an app's public services, as a Python module for those who don't have its code.

In goes the OpenAPI document of an app, out comes a module: each service as a class whose methods do
nothing, with the models that they need. `sk.connect` calls the app through such a class as it does
through the author's own. Equal documents give equal modules, in the form that ruff and black write.

The document may come from a server that nobody knows, so what it says becomes names, literals and
docstrings only (`servekit.protocols.source`). One that is not of a servekit app is refused.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple, cast

from servekit.core.call import EVENT_STREAM, JSON
from servekit.errors import ConfigError
from servekit.protocols.annotations import Annotations, default
from servekit.protocols.models import Schema
from servekit.protocols.source import (
    bracketed,
    docstring,
    free_name,
    identifier,
    is_parameter,
    is_taken,
    quoted,
)

_IMPORTS: Final = (
    (
        ("collections.abc", ("Iterator",)),
        ("dataclasses", ("dataclass", "field")),
        ("datetime", ("date", "datetime", "time", "timedelta")),
        ("typing", ("Annotated", "Any", "Literal", "NotRequired", "TypeAlias")),
        ("uuid", ("UUID",)),
    ),
    (
        ("numpy", ("np",)),
        ("servekit", ("sk",)),
        ("numpy.typing", ("NDArray",)),
        ("typing_extensions", ("TypedDict",)),
    ),
)
"""What a module may import: the standard library's part, and that of others, sorted as isort does."""

_OWN: Final = {"DEFAULT", "REVISION"}
_DEFAULT: Final = (
    "DEFAULT: Any = object()",
    '"""Leaves an argument out, so that the server takes its own default."""',
)


def write(document: dict[str, Any]) -> str:
    """Return the module.

    Raises:
        ConfigError: The document is not that of a servekit app.
    """
    try:
        services = _services(document)
        return _module(document, services)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:200]
        raise ConfigError(
            f"that is no OpenAPI document of a servekit app ({why}); it is at /openapi.json"
        ) from None


def _module(document: dict[str, Any], services: "list[_Service]") -> str:
    imported = {name for group in _IMPORTS for _, names in group for name in names}
    classes = {service.cls for service in services}
    types = Annotations(document["components"]["schemas"], imported | classes | _OWN)
    declared = [_declaration(service, types) for service in services]
    blocks = [*types.definitions(), *declared]
    if any("= DEFAULT" in line for block in declared for line in block):
        blocks.insert(0, list(_DEFAULT))
    revision = quoted(str(document["info"].get("x-servekit-revision", "")))
    blocks.insert(0, [f"REVISION = {revision}", '"""Of the app that this was written from."""'])
    body = _spaced(blocks)
    imports = _imports(_names(ast.parse("\n".join(body))))
    head = [*_doc(document, services), "", "from __future__ import annotations", "", *imports, ""]
    return "\n".join([*head, *body, ""])


def _doc(document: dict[str, Any], services: "list[_Service]") -> list[str]:
    title = str(document["info"]["title"])
    example = services[0].cls
    return docstring(
        f"""The services of {title}, written by `servekit client`: write it anew, don't edit it.

Call them through `servekit.connect`::

    with sk.connect({example}, "http://127.0.0.1:3000") as service:
        service.method(name=value)               # in plain code
        await service.method.remote(name=value)  # in async code""",
        "",
    )


def _spaced(blocks: Iterable[list[str]]) -> list[str]:
    """Return the blocks' lines: one empty line around an assignment, two around a class."""
    lines: list[str] = []
    before_is_class = False
    for block in blocks:
        is_class = block[0].startswith(("class ", "@"))
        lines += [""] * (1 + (is_class or before_is_class)) if lines else []
        lines += block
        before_is_class = is_class
    return lines


def _names(tree: ast.AST) -> set[str]:
    """Return the names that code uses, also those in the texts of a `TypedDict(...)`."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for value in node.values:
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    names |= _names(ast.parse(value.value, mode="eval"))
    return names


def _imports(used: set[str]) -> list[str]:
    lines: list[str] = []
    for group in _IMPORTS:
        found = [(module, [name for name in names if name in used]) for module, names in group]
        lines += [""] if lines and lines[-1] and any(names for _, names in found) else []
        for module, names in found:
            if names in (["np"], ["sk"]):
                lines.append(f"import {module} as {names[0]}")
            elif names:
                lines.append(f"from {module} import {', '.join(names)}")
    return lines


# ---- services


class _Service(NamedTuple):
    """One service: its name, its class's, and its operations with method and path."""

    name: str
    cls: str
    doc: str
    version: str
    operations: list[tuple[str, str, dict[str, Any]]]


def _services(document: dict[str, Any]) -> list[_Service]:
    docs = {tag["name"]: str(tag.get("description", "")) for tag in document["tags"]}
    found: dict[str, _Service] = {}
    for path, item in document["paths"].items():
        for method, operation in item.items():
            facts = operation["x-servekit"]
            name = str(facts["service"])
            if operation["operationId"] == f"{name}.{facts['endpoint']}.batch":
                continue  # a list of what the endpoint itself takes
            if JSON not in operation.get("requestBody", {}).get("content", {JSON: None}):
                continue  # its input streams, which `connect` does not do
            if name not in found:
                cls = free_name(
                    identifier(name, capital=True), {other.cls for other in found.values()}
                )
                version = str(facts.get("version", "1"))
                found[name] = _Service(name, cls, docs.get(name, ""), version, [])
            found[name].operations.append((method.upper(), path, operation))
    if not found:
        raise ConfigError("the app has no public endpoints")
    return list(found.values())


def _declaration(service: _Service, types: Annotations) -> list[str]:
    settings = [f"name={quoted(service.name)}"] * (service.name != service.cls)
    settings += [f"version={quoted(service.version)}"] * (service.version != "1")
    decorator = bracketed("@sk.service(", settings, ")") if settings else ["@sk.service"]
    lines = [*decorator, f"class {service.cls}:", *docstring(service.doc, "    ")]
    taken: set[str] = set()
    for method, path, operation in service.operations:
        if len(lines) > len(decorator) + 1:
            lines.append("")
        endpoint = str(operation["x-servekit"]["endpoint"])
        name = identifier(endpoint)
        if is_taken(name) or name in types.taken:
            name += "_"  # in the class's own scope it would hide a type
        name = free_name(name, taken)
        taken.add(name)
        lines += _method(name, method, path, operation, types)
    return lines


def _method(
    name: str, method: str, path: str, operation: dict[str, Any], types: Annotations
) -> Iterator[str]:
    settings: list[str] = []
    if path != f"/{name}":
        settings.append(f"path={quoted(path)}")
    if method == "GET":
        settings.append('method="GET"')
    elif operation["x-servekit"]["idempotent"] is True:
        settings.append("idempotent=True")
    yield from (
        bracketed("@sk.endpoint(", settings, ")", "    ") if settings else ["    @sk.endpoint"]
    )
    parameters = ["self", *_parameters(name, method, operation, types)]
    yield from bracketed(
        f"def {name}(", parameters, f") -> {_result(name, operation, types)}:", "    "
    )
    summary, description = str(operation.get("summary", "")), operation.get("description", "")
    if description or summary.lower() != name.strip("_").replace("_", " ").lower():
        yield from docstring(f"{summary}\n\n{description}", "        ")
    yield "        raise NotImplementedError"


def _parameters(
    name: str, method: str, operation: dict[str, Any], types: Annotations
) -> Iterator[str]:
    if method == "GET":
        query = [p for p in operation["parameters"] if p.get("in") == "query"]
        properties = {str(parameter["name"]): parameter["schema"] for parameter in query}
        required = [parameter["name"] for parameter in query if parameter["required"]]
    elif "requestBody" not in operation:
        return
    else:
        schema: Schema = operation["requestBody"]["content"][JSON]["schema"]
        properties = cast("dict[str, Schema]", schema.get("properties", {}))
        required = cast("list[str]", schema.get("required", []))
        by_name = schema.get("additionalProperties") is False and "title" not in schema
        if not by_name or not all(map(is_parameter, properties)):
            yield f"body: {types.of(schema, f'{name}-body')}"
            yield "/"
            return
    if properties:
        yield "*"
    for key, part in properties.items():
        if not is_parameter(key):
            raise ValueError(f"{key!r} is no name of a parameter")
        kind = types.of(part, f"{name}-{key}")
        value = default(part)
        if value in (None, "[]"):  # a list in a signature is one that all calls share
            value = "DEFAULT"
        yield f"{key}: {kind}" if key in required else f"{key}: {kind} = {value}"


def _result(name: str, operation: dict[str, Any], types: Annotations) -> str:
    content = operation["responses"]["200"]["content"]
    if operation["x-servekit"]["kind"] == "stream":
        data = content[EVENT_STREAM]["x-itemSchema"]["properties"]["data"]
        return f"Iterator[{types.of(data['contentSchema'], f'{name}-chunk')}]"
    return types.of(content[JSON]["schema"], f"{name}-result")
