"""`describe`: a root service, with all that it needs, becomes an `AppSpec`."""

import hashlib
import inspect
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

from servekit.errors import SpecError, suggest
from servekit.spec.app import (
    AppSpec,
    DependencySpec,
    EndpointSpec,
    InboundSpec,
    MountSpec,
    ServiceSpec,
)
from servekit.spec.definition import EndpointDefinition, ServiceDefinition, definition
from servekit.spec.graph import ServiceRef, topology
from servekit.spec.target import target_of

_SCALARS = {"string", "integer", "number", "boolean", "null"}
_INSTALLED = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def describe(root: type | ServiceRef[Any]) -> AppSpec:
    """Return the app of a root service as data; the root has HTTP routes, at `/` by default.

    Raises:
        SpecError: Something can't work as written; the message names the place and the fix.
    """
    found = root.definition if isinstance(root, ServiceRef) else definition(root)
    if found.prefix is None:
        found = replace(found, prefix="")
    services = tuple(_service(service) for service in topology(found))
    app = AppSpec(root=found.name, services=services)
    # Where the author wrote 20 for a float, the revision would differ from that of its own JSON.
    return AppSpec.from_json(app.to_json())


def own_sources() -> tuple[Path, ...]:
    """Return the files of all imported modules that are neither installed nor servekit's own."""
    own = Path(__file__).resolve().parent.parent
    files = {
        Path(file).resolve()
        for module in list(sys.modules.values())
        if (file := getattr(module, "__file__", None)) is not None
    }
    return tuple(
        sorted(
            file
            for file in files
            if file.suffix == ".py" and not any(map(file.is_relative_to, (own, *_INSTALLED)))
        )
    )


def _service(service: ServiceDefinition) -> ServiceSpec:
    _check_args(service)
    return ServiceSpec(
        name=service.name,
        target=target_of(service.cls),
        prefix=service.prefix,
        replicas=service.replicas,
        resources=service.resources,
        limits=service.limits,
        env=dict(service.env),
        args=dict(service.args),
        version=service.version,
        code=_code(service.cls),
        doc=inspect.cleandoc(service.cls.__doc__ or ""),
        endpoints=tuple(_endpoint(endpoint) for endpoint in service.endpoints.values()),
        mounts=tuple(
            MountSpec(name=mount.name, path=mount.path) for mount in service.mounts.values()
        ),
        dependencies=tuple(
            DependencySpec(
                attribute=edge.attribute,
                service=edge.target.name,
                timeout_s=edge.timeout_s,
                retries=edge.retries,
            )
            for edge in service.dependencies.values()
        ),
    )


def _endpoint(endpoint: EndpointDefinition) -> EndpointSpec:
    into, out = endpoint.schemas
    if endpoint.media_type and (
        endpoint.kind != "unary" or out.json_schema.get("type") != "string"
    ):
        raise SpecError(
            f"{endpoint.where}: media_type={endpoint.media_type!r} is for one answer of type str or "
            "bytes; remove it"
        )
    if endpoint.method == "GET" or into.inbound is not None:
        _check_query(endpoint, into.json_schema)
    if endpoint.method == "GET" and into.inbound is not None:
        raise SpecError(
            f"{endpoint.where}: {into.inbound.name!r} streams, and a GET request has no body; use "
            "method='POST'"
        )
    return EndpointSpec(
        name=endpoint.name,
        kind=endpoint.kind,
        path=endpoint.path,
        method=endpoint.method,
        input=into.json_schema,
        inbound=None
        if into.inbound is None
        else InboundSpec(
            name=into.inbound.name, chunk=into.inbound.json_schema, raw=into.inbound.form
        ),
        output=out.json_schema,
        raw_input=into.form,
        raw_output=out.form,
        media_type=endpoint.media_type,
        doc=inspect.cleandoc(endpoint.fn.__doc__ or ""),
        is_async=endpoint.is_async,
        idempotent=endpoint.idempotent,
        internal=endpoint.internal,
        timeout_s=endpoint.timeout_s,
        max_concurrency=endpoint.max_concurrency,
        batch=endpoint.batch,
        tags=endpoint.tags,
    )


def _check_args(service: ServiceDefinition) -> None:
    signature = inspect.signature(service.cls)
    try:
        signature.bind(**service.args)
    except TypeError as error:
        unknown = [name for name in service.args if name not in signature.parameters]
        hint = suggest(unknown[0], list(signature.parameters)) if unknown else ""
        raise SpecError(
            f"{service.where}: servekit can't construct {service.name!r} with "
            f"args={dict(service.args)}: {error}.{hint} Give its parameters defaults, or their "
            "values with sk.ref(…, args={…})"
        ) from None


def _check_query(endpoint: EndpointDefinition, schema: dict[str, Any]) -> None:
    definitions = schema.get("$defs", {})
    what, fix = "a GET endpoint", "use method='POST'"
    if endpoint.schemas[0].inbound is not None:
        what, fix = "an endpoint whose input streams", "send it in a chunk"
    if schema.get("type") != "object":
        raise SpecError(
            f"{endpoint.where}: a GET endpoint takes named parameters from the query, "
            "not a body; use method='POST'"
        )
    for name, parameter in schema.get("properties", {}).items():
        if not _is_scalar(parameter, definitions):
            raise SpecError(
                f"{endpoint.where}: parameter {name!r} of {what} must be a scalar, "
                f"as it comes from the query; {fix}"
            )


def _is_scalar(schema: dict[str, Any], definitions: dict[str, Any]) -> bool:
    if "$ref" in schema:
        return _is_scalar(definitions.get(schema["$ref"].rpartition("/")[2], {}), definitions)
    if "anyOf" in schema:
        return all(_is_scalar(option, definitions) for option in schema["anyOf"])
    return schema.get("type") in _SCALARS or "const" in schema or "enum" in schema


def _code(cls: type) -> str:
    """Digest the author's sources of a class: its module, and those of its bases."""
    digest = hashlib.sha256()
    for name in dict.fromkeys(base.__module__ for base in cls.__mro__):
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None:
            path = Path(file).resolve()
            if name == cls.__module__ or not any(map(path.is_relative_to, _INSTALLED)):
                digest.update(hashlib.sha256(path.read_bytes()).digest())
        elif name == cls.__module__:
            digest.update(_typed_in(cls).encode())
    return digest.hexdigest()[:12]


def _typed_in(cls: type) -> str:
    """Return the source of a class from a notebook; a plain prompt keeps none."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
