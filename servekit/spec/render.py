"""Pictures of an app, made from its `AppSpec` alone: a text tree and a Mermaid chart."""

from collections.abc import Iterator, Mapping

from servekit.spec.app import AppSpec, EndpointSpec, ServiceSpec
from servekit.spec.policy import Autoscale


def tree(app: AppSpec) -> str:
    """Return the graph as text; a service that several need is drawn once and then named.

    ::

        Search  /search
        ├── query  POST /search/query
        └── embedder → Embedder  1 to 4 replicas  gpu 0.5
            ├── embed  batched ≤64, waits ≤4 ms
            └── words → Tokenizer  in the same process
                └── split  internal
    """
    services = app.everything()
    return "\n".join(_draw(services, services[app.root], set()))


def mermaid(app: AppSpec) -> str:
    """Return the graph as a Mermaid flow chart, for a README or a docs page.

    A thick arrow leads to a service that lives in the process of the one it comes from.
    """
    services = list(app.everything().values())
    ids = {service.name: f"s{index}" for index, service in enumerate(services)}
    lines = ["flowchart LR"]
    for service in reversed(services):
        text = "<br/>".join([f"<b>{service.name}</b>", *_facts(service)])
        lines.append(f'    {ids[service.name]}["{text}"]')
    for service in reversed(services):
        lines.extend(
            f"    {ids[service.name]} {'==>' if edge.colocate else '-->'}"
            f"|{edge.attribute}| {ids[edge.service]}"
            for edge in service.dependencies
        )
    return "\n".join(lines)


def _draw(
    services: Mapping[str, ServiceSpec], service: ServiceSpec, drawn: set[str], note: str = ""
) -> Iterator[str]:
    yield "  ".join([service.name, *_facts(service), *filter(None, [note])])
    drawn.add(service.name)
    width = max((len(endpoint.name) for endpoint in service.endpoints), default=0)
    children = [
        [f"{endpoint.name:<{width}}  {_summary(service, endpoint)}"]
        for endpoint in service.endpoints
    ]
    for edge in service.dependencies:
        target = services[edge.service]
        note = "in the same process" if edge.colocate else ""
        if target.name in drawn:
            block = ["  ".join([target.name, *filter(None, [note]), "(above)"])]
        else:
            block = list(_draw(services, target, drawn, note))
        children.append([f"{edge.attribute} → {block[0]}", *block[1:]])
    for index, (head, *rest) in enumerate(children):
        is_last = index == len(children) - 1
        yield ("└── " if is_last else "├── ") + head
        yield from (("    " if is_last else "│   ") + line for line in rest)


def _facts(service: ServiceSpec) -> list[str]:
    facts: list[str] = []
    if service.prefix:
        facts.append(service.prefix)
    if isinstance(service.replicas, Autoscale):
        facts.append(f"{service.replicas.min} to {service.replicas.max} replicas")
    elif service.replicas > 1:
        facts.append(f"{service.replicas} replicas")
    if service.resources.gpu:
        facts.append(f"gpu {service.resources.gpu:g}")
    return facts


def _summary(service: ServiceSpec, endpoint: EndpointSpec) -> str:
    parts: list[str] = []
    if service.prefix is not None and not endpoint.internal:
        parts.append(f"{endpoint.method} {service.prefix}{endpoint.path}")
    if endpoint.batch is not None:
        batch = f"batched ≤{endpoint.batch.max_size}"
        if endpoint.batch.max_wait_ms:
            batch += f", waits ≤{endpoint.batch.max_wait_ms:g} ms"
        if endpoint.batch.target_ms is not None:
            batch += f", target {endpoint.batch.target_ms:g} ms"
        parts.append(batch)
    elif endpoint.kind == "stream":
        parts.append("streams")
    elif endpoint.task is not None:
        parts.append(f"task, ≤{endpoint.task.max_concurrency} at once")
    return "  ".join(parts) or "internal"
