"""From a path to an endpoint: the table that the hot path looks into, made from an `AppSpec`."""

from typing import Final, TypeAlias

from servekit.core.call import FORM, JSON, MSGPACK
from servekit.observe.families import Families
from servekit.observe.metrics import Counter
from servekit.spec.app import AppSpec, EndpointSpec, ServiceSpec
from servekit.spec.body import media_type

BATCH: Final = "/batch"
"""Suffix of the path and the endpoint name of a client's own batch."""


class Route:
    """One path and method, with what the hot path needs, looked up once.

    Attributes:
        service: Name of the service.
        endpoint: Name of the endpoint in the replica.
        spec: The endpoint.
        method: HTTP method.
        path: Full path.
        max_body: Largest body in bytes.
        timeout_s: Longest time that a call may take; None is for ever, as for input that streams,
            where only the endpoint's own limit counts.
        stream: Answers many times.
    """

    __slots__ = (
        "_codes",
        "_families",
        "_inbound",
        "_takes_files",
        "endpoint",
        "max_body",
        "method",
        "path",
        "seconds",
        "service",
        "spec",
        "stream",
        "timeout_s",
        "version",
    )

    def __init__(
        self, service: ServiceSpec, spec: EndpointSpec, families: Families, *, suffix: str = ""
    ) -> None:
        prefix = (service.prefix or "").rstrip("/")
        self.service = service.name
        self.version = service.version
        self.endpoint = spec.name + suffix
        self.spec = spec
        self.method = spec.method
        self.path = (prefix + spec.path.rstrip("/") + suffix) or "/"
        self.max_body = service.limits.max_body_bytes
        self.timeout_s = spec.timeout_s
        if spec.timeout_s is None and spec.inbound is None:
            self.timeout_s = service.limits.timeout_s
        self.stream = spec.kind == "stream"
        self._inbound = spec.inbound is not None
        self._takes_files = spec.raw_input == "file"
        labels = {"service": self.service, "endpoint": self.endpoint}
        self.seconds = families.request_seconds.labels(**labels)
        self._families = families
        self._codes: dict[tuple[str, int], Counter] = {}

    def streams(self, content_type: str) -> bool:
        """Return whether a body goes on to the replica as it comes, not once it is whole."""
        if content_type == JSON or self.method == "GET":
            return self._inbound
        kind = media_type(content_type)
        return self._inbound or kind == FORM or (self._takes_files and kind not in (JSON, MSGPACK))

    def answered(self, code: int, version: str, seconds: float) -> None:
        """Count an answer."""
        counter = self._codes.get((version, code))
        if counter is None:
            counter = self._codes[version, code] = self._families.requests.labels(
                service=self.service,
                endpoint=self.endpoint,
                version=version or self.version,
                code=code,
            )
        counter.inc()
        self.seconds.observe(seconds)

    def shed(self, reason: str) -> None:
        """Count a call that was refused before it ran."""
        self._families.shed.labels(
            service=self.service, endpoint=self.endpoint, reason=reason
        ).inc()


Methods: TypeAlias = dict[bytes, Route]
"""The routes of one path, by method."""


def routes_of(app: AppSpec, families: Families) -> dict[bytes, Methods]:
    """Return all public routes, by path."""
    table: dict[bytes, Methods] = {}
    for service in app.services:
        if service.prefix is None:
            continue
        for endpoint in service.endpoints:
            if endpoint.internal:
                continue
            suffixes = ("", BATCH) if endpoint.kind == "batched" else ("",)
            for suffix in suffixes:
                route = Route(service, endpoint, families, suffix=suffix)
                table.setdefault(route.path.encode(), {})[route.method.encode()] = route
    return table


def mounts_of(app: AppSpec, families: Families) -> list[Route]:
    """Return the routes of all mounted apps, the longest path first."""
    mounts = [
        Route(service, EndpointSpec(name=mount.name, kind="stream", path=mount.path), families)
        for service in app.services
        if service.prefix is not None
        for mount in service.mounts
    ]
    for route in mounts:
        route.timeout_s = None
    return sorted(mounts, key=lambda route: -len(route.path))
