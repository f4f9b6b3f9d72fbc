"""Services compose: `depends` declares an edge, `ref` a variant, `topology` walks the graph."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar, overload

import msgspec

from servekit.core.units import parse_bytes
from servekit.errors import SpecError
from servekit.spec.definition import DependencyDefinition, ServiceDefinition, definition
from servekit.spec.place import at, place
from servekit.spec.policy import Autoscale, Limits

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ServiceRef(Generic[T_co]):
    """A service under another name and with other settings than its class says."""

    def __init__(self, definition: ServiceDefinition) -> None:
        self.definition = definition

    def configure(
        self,
        *,
        name: str | None = None,
        prefix: str | None = None,
        replicas: int | Autoscale | None = None,
        gpu: float | None = None,
        cpu: float | None = None,
        memory: str | int | None = None,
        limits: Limits | None = None,
        env: Mapping[str, str] | None = None,
        version: str | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> "ServiceRef[T_co]":
        """Return a variant of it; whatever is None stays as it is.

        Args:
            name: Name in the app; two variants in one app need two.
            prefix: Route prefix; without one it has no HTTP routes.
            replicas: A number, or a policy.
            gpu: Devices for one replica; below 1 shares one.
            cpu: Cores that one replica keeps busy; more than there are is a warning.
            memory: Memory of one replica: bytes, or text like `"4GiB"`.
            limits: Bounds of its queues.
            env: Environment variables, in place of all those of the class.
            version: Label of this version.
            args: Keyword arguments of the constructor: JSON values.

        Raises:
            SpecError: A value can't be used.
        """
        where = f"sk.ref({self.definition.where}, name={name or self.definition.name!r})"
        with at(where):
            amounts = {
                "gpu": None if gpu is None else float(gpu),
                "cpu": None if cpu is None else float(cpu),
                "memory": None if memory is None else parse_bytes(memory, where="memory"),
            }
            changes: dict[str, Any] = {
                "name": name,
                "prefix": prefix,
                "replicas": replicas,
                "resources": msgspec.structs.replace(self.definition.resources, **_given(amounts)),
                "limits": limits,
                "env": None if env is None else dict(env),
                "version": version,
                "args": None if args is None else _json_values(args),
            }
            return ServiceRef(replace(self.definition, **_given(changes)))

    def __repr__(self) -> str:
        return f"<service {self.definition.name}: {self.definition.where}>"


class Dependency(Generic[T_co]):
    """What `depends` leaves in the class: on an instance that servekit runs, a handle.

    In the class it is the key of `sk.local(..., overrides={Search.embedder: fake})`. It has no
    `__set__`, so a unit test may assign anything to the attribute of a plain instance.
    """

    def __init__(
        self,
        target: ServiceDefinition,
        timeout_s: float | None,
        retries: int,
        colocate: bool,
    ) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self.retries = retries
        self.colocate = colocate
        self.owner: type | None = None
        self.attribute = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.owner = owner
        self.attribute = name

    @overload
    def __get__(self, obj: None, owner: type[Any] | None = ..., /) -> Self: ...
    @overload
    def __get__(self, obj: object, owner: type[Any] | None = ..., /) -> T_co: ...
    def __get__(self, obj: object, owner: type[Any] | None = None, /) -> Any:
        if obj is None:
            return self
        service = place(type(obj))
        raise AttributeError(
            f"{self.where} is not bound to a running {self.target.name}: run the service with "
            f"sk.local({service}), or, in a unit test of a plain instance, assign a fake to "
            f"its attribute {self.attribute!r} first",
            name=self.attribute,
            obj=obj,
        )

    @property
    def where(self) -> str:
        """`Class.attribute`, as the author wrote it."""
        return f"{place(self.owner)}.{self.attribute}" if self.owner else "an sk.depends"

    def named(self, attribute: str) -> DependencyDefinition:
        """Return the edge as data."""
        return DependencyDefinition(
            attribute=attribute,
            target=self.target,
            timeout_s=self.timeout_s,
            retries=self.retries,
            colocate=self.colocate,
        )

    def __repr__(self) -> str:
        return f"<dependency {self.where} on {self.target.name}>"


def ref(
    target: type[T],
    /,
    *,
    name: str,
    prefix: str | None = None,
    replicas: int | Autoscale | None = None,
    gpu: float | None = None,
    cpu: float | None = None,
    memory: str | int | None = None,
    limits: Limits | None = None,
    env: Mapping[str, str] | None = None,
    version: str | None = None,
    args: Mapping[str, Any] | None = None,
) -> ServiceRef[T]:
    """Take a service under another name, with other settings; see `ServiceRef.configure`.

    Raises:
        SpecError: `target` is no service, or a value can't be used.
    """
    with at("sk.ref"):
        base = replace(definition(target), prefix=None)
    return ServiceRef[T](base).configure(
        name=name,
        prefix=prefix,
        replicas=replicas,
        gpu=gpu,
        cpu=cpu,
        memory=memory,
        limits=limits,
        env=env,
        version=version,
        args=args,
    )


def depends(
    target: type[T] | ServiceRef[T],
    /,
    *,
    timeout_s: float | None = None,
    retries: int = 1,
    colocate: bool = False,
) -> Dependency[T]:
    """Declare that a service calls another one: the attribute becomes a handle to it.

    All that depend on one class (or on equal refs) share its replicas, except with `colocate`.

    Args:
        target: A service class, or a `ref` to one.
        timeout_s: Deadline of calls through this handle; None takes the endpoint's.
        retries: Attempts after the first, for calls that are safe to repeat.
        colocate: Run it in this service's own processes. Its limits, threads and batches stay,
            but arguments and results are handed over as they are: no copy, no check of types.

    Raises:
        SpecError: `target` is no service, or a value can't be used.
    """
    with at("sk.depends"):
        found = definition_of(target)
        if timeout_s is not None and timeout_s <= 0:
            raise SpecError(f"timeout_s={timeout_s}; must be above 0, or None")
        if retries < 0:
            raise SpecError(f"retries={retries}; must be 0 or more")
    return Dependency(found, timeout_s, retries, colocate)


def definition_of(service: type | ServiceRef[Any]) -> ServiceDefinition:
    """Return the definition of a class, or of a ref to one.

    Raises:
        SpecError: It is no service.
    """
    return service.definition if isinstance(service, ServiceRef) else definition(service)


def topology(root: ServiceDefinition) -> tuple[ServiceDefinition, ...]:
    """Return the root and all services that it needs, each once, dependencies first.

    Raises:
        SpecError: The graph has a cycle, two different services share a name, or two routes clash.
    """
    found: dict[str, ServiceDefinition] = {}
    places: dict[str, str] = {}

    def visit(service: ServiceDefinition, where: str, path: tuple[ServiceDefinition, ...]) -> None:
        if any(service is above for above in path):
            names = " → ".join(s.name for s in (*path, service))
            raise SpecError(f"{where}: the services depend on each other in a circle: {names}")
        known = found.get(service.name) or next((s for s in path if s.name == service.name), None)
        if known is not None and known != service:
            raise SpecError(
                f"{where} and {places[service.name]}: two different services are named "
                f"{service.name!r} ({_difference(known, service)}); give one another name: "
                "sk.ref(…, name=…)"
            )
        if known is not None:
            return
        places[service.name] = where
        for edge in service.dependencies.values():
            visit(edge.target, f"{service.where}.{edge.attribute}", (*path, service))
        found[service.name] = service

    visit(root, root.where, ())
    services = tuple(found.values())
    _check_routes(services)
    return services


def _check_routes(services: tuple[ServiceDefinition, ...]) -> None:
    taken: dict[str, ServiceDefinition] = {}
    mounted: dict[str, ServiceDefinition] = {}
    for service in services:
        if service.prefix is None:
            continue
        for route, endpoint in service.routes.items():
            other = taken.setdefault(route, service)
            if other is not service:
                raise SpecError(
                    f"{service.name}.{endpoint.name} and {other.name}.{other.routes[route].name} "
                    f"have the same route {route!r}; give one service another prefix="
                )
        for mount in service.mounts.values():
            path = (service.prefix or "") + mount.path
            other = mounted.setdefault(path, service)
            if other is not service:
                raise SpecError(
                    f"{service.name}.{mount.name} and {other.name} mount apps at the same path "
                    f"{path!r}; give one service another prefix="
                )


def _difference(one: ServiceDefinition, other: ServiceDefinition) -> str:
    names = [f.name for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)]
    if "cls" in names:
        return f"{one.where} and {other.where}"
    return "they differ in " + ", ".join(names)


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _json_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as a fresh process will read them back from the `AppSpec`."""
    try:
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dict(args)))
    except (TypeError, ValueError) as error:
        raise SpecError(
            f"args={dict(args)!r}: {error}; replicas are other processes, so arguments are "
            "JSON values. Build anything else in __init__"
        ) from None
    return plain
