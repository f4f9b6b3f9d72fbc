"""Which services get processes of their own, and which live in those of others.

In goes a walked graph; out comes, for each service with processes of its own, what runs beside it. A
process that can't be (GPUs that don't add up, two values for one variable, replicas of a service
that has none) is refused with the place and the fix.
"""

from collections.abc import Iterator, Sequence

from servekit.errors import SpecError
from servekit.spec.definition import DependencyDefinition, ServiceDefinition
from servekit.spec.policy import Resources

_ONE = 1
"""What `replicas=` is when an author doesn't write it."""


def processes(
    services: Sequence[ServiceDefinition],
) -> dict[str, tuple[ServiceDefinition, ...]]:
    """Return the services that have processes, each with those that live in them.

    A service has processes of its own if it has HTTP routes, as the root always does, or if
    somebody depends on it without `colocate`.

    Args:
        services: As `topology` returns them, dependencies first.

    Raises:
        SpecError: Services can't share a process as written.
    """
    edges = [(s, edge) for s in services for edge in s.dependencies.values()]
    apart = {edge.target.name for _, edge in edges if not edge.colocate}
    found: dict[str, tuple[ServiceDefinition, ...]] = {}
    for service in services:
        if service.prefix is not None or service.name in apart:
            found[service.name] = beside = tuple(_beside(service, set()))
            _check_together(service, beside)
        elif service.replicas != _ONE:
            owner, edge = next((s, e) for s, e in edges if e.target.name == service.name)
            raise SpecError(
                f"{_place(owner, edge)}: {service.name!r} has replicas={service.replicas!r}, but it "
                f"only runs in the processes of those that colocate it, as many as they are; give "
                f"{owner.name!r} the replicas, or drop colocate=True"
            )
    return found


def _beside(service: ServiceDefinition, seen: set[str]) -> Iterator[ServiceDefinition]:
    for edge in service.dependencies.values():
        if edge.colocate and edge.target.name not in seen:
            seen.add(edge.target.name)
            yield from _beside(edge.target, seen)
            yield edge.target


def _check_together(service: ServiceDefinition, beside: tuple[ServiceDefinition, ...]) -> None:
    together = (service, *reversed(beside))
    names = " and ".join(s.name for s in together)
    try:
        Resources.together(s.resources for s in together)
    except SpecError:
        gpus = " + ".join(f"{s.resources.gpu:g}" for s in together if s.resources.gpu)
        raise SpecError(
            f"{service.where}: {names} share a process, whose gpu={gpus} is neither a share of one "
            "device nor a whole number of them; change one, or drop colocate=True"
        ) from None
    values: dict[str, tuple[str, str]] = {}
    for one in together:
        for variable, value in one.env.items():
            other, before = values.setdefault(variable, (one.name, value))
            if before != value:
                raise SpecError(
                    f"{service.where}: {names} share a process, but {other} has "
                    f"env[{variable!r}]={before!r} and {one.name} {value!r}; give both the same, or "
                    "drop colocate=True"
                )


def _place(owner: ServiceDefinition, edge: DependencyDefinition) -> str:
    return f"{owner.where}.{edge.attribute}"
