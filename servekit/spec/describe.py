"""`describe`: a root service, with all that it needs, becomes an `AppSpec`."""

import hashlib
import inspect
from dataclasses import replace
from typing import Any

import msgspec

from servekit.errors import SpecError, suggest
from servekit.spec.app import (
    AppSpec,
    DependencySpec,
    EndpointSpec,
    InboundSpec,
    MountSpec,
    ServiceSpec,
)
from servekit.spec.colocation import processes
from servekit.spec.container import Image
from servekit.spec.definition import EndpointDefinition, ServiceDefinition
from servekit.spec.graph import ServiceRef, definition_of, topology
from servekit.spec.own import OwnModules
from servekit.spec.sources import Sources
from servekit.spec.target import target_of

_SCALARS = {"string", "integer", "number", "boolean", "null"}


def describe(root: type | ServiceRef[Any], own: OwnModules | None = None) -> AppSpec:
    """Return the app of a root service as data; the root has HTTP routes, at `/` by default.

    Args:
        root: The root service.
        own: Finds the author's sources; keeps which files it has read.

    Raises:
        SpecError: Something can't work as written; the message names the place and the fix.
    """
    found = definition_of(root)
    if found.prefix is None:
        found = replace(found, prefix="")
    services = topology(found)
    own = own or OwnModules()
    own.add(service.cls.__module__ for service in services)
    sources = Sources(own.find, own.names)
    specs = {service.name: _service(service, sources) for service in services}
    app = AppSpec(
        root=found.name,
        image=found.image or Image(),
        services=tuple(
            msgspec.structs.replace(specs[name], beside=tuple(specs[s.name] for s in beside))
            for name, beside in processes(services).items()
        ),
    )
    # Where the author wrote 20 for a float, the revision would differ from that of its own JSON.
    return AppSpec.from_json(app.to_json())


def _service(service: ServiceDefinition, sources: Sources) -> ServiceSpec:
    _check_args(service)
    return ServiceSpec(
        name=service.name,
        target=target_of(service.cls),
        prefix=service.prefix,
        replicas=service.replicas,
        resources=service.resources,
        placement=service.placement,
        limits=service.limits,
        env=dict(service.env),
        args=dict(service.args),
        tunable=service.tunable,
        models={name: model.located() for name, model in service.models.items()},
        version=service.version,
        code=_code(service, sources),
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
                colocate=edge.colocate,
            )
            for edge in service.dependencies.values()
        ),
    )


def _endpoint(endpoint: EndpointDefinition) -> EndpointSpec:
    into, out = endpoint.schemas
    if endpoint.media_type and (
        endpoint.kind not in ("unary", "task") or out.json_schema.get("type") != "string"
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
    if endpoint.task is not None and into.inbound is not None:
        raise SpecError(
            f"{endpoint.where}: {into.inbound.name!r} streams, and a job keeps its input whole; take "
            "a list, or make it an @sk.endpoint"
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
        task=endpoint.task,
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


def _code(service: ServiceDefinition, sources: Sources) -> str:
    """Digest what a service runs, and what it needs to know of those that it calls."""
    cls = service.cls
    digest = hashlib.sha256()
    if sources.read(cls.__module__) is None:
        digest.update(_typed_in(cls).encode())
    else:
        digest.update(sources.digest(cls.__module__, cls.__qualname__).encode())
    for edge in service.dependencies.values():
        for endpoint in map(_endpoint, edge.target.endpoints.values()):
            called = (
                endpoint.name,
                endpoint.kind,
                endpoint.is_async,
                endpoint.idempotent,
                endpoint.timeout_s,
                endpoint.input,
                endpoint.output,
            )
            digest.update(msgspec.json.encode((edge.attribute, called), order="sorted"))
    return digest.hexdigest()[:12]


def _typed_in(cls: type) -> str:
    """Return the source of a class from a notebook; a plain prompt keeps none."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return ""
