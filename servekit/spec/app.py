"""`AppSpec`: a whole app as plain data, the contract between describing and running.

It serialises to JSON, has a revision made from its content, and holds no live objects: the
gateway, the supervisor and the packager work from it without importing user code.
"""

import hashlib
from functools import cached_property
from typing import Any, Literal

import msgspec

from servekit.errors import NotFound, suggest
from servekit.spec.container import Image
from servekit.spec.model import ModelSpec
from servekit.spec.policy import Autoscale, BatchPolicy, Limits, Placement, Resources, TaskPolicy
from servekit.spec.raw import Form

Kind = Literal["unary", "stream", "batched", "task"]


class InboundSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A parameter whose value comes in chunks.

    Attributes:
        name: Of the parameter.
        chunk: JSON schema of one chunk.
        raw: In which form a chunk may also be raw; see `spec/raw.py`.
    """

    name: str
    chunk: dict[str, Any]
    raw: Form = ""


class EndpointSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One endpoint.

    Attributes:
        name: Method name.
        kind: `"unary"` answers once, `"stream"` many times, `"batched"` once, run in batches;
            `"task"` queues a job, whose result is the answer.
        path: Route below the service's prefix, starting with `/`.
        method: HTTP method.
        input: JSON schema of the request body; of the query, if the body streams.
        inbound: What of the input streams, if any does.
        output: JSON schema of the answer, or of one chunk of it.
        raw_input: In which form the body may also be raw; see `spec/raw.py`.
        raw_output: The same for the answer.
        media_type: Media type of a `bytes` or `str` answer; "" means the default.
        doc: The method's docstring.
        is_async: Runs on the event loop.
        idempotent: May be run twice, so a lost call is sent again.
        internal: Has no HTTP route.
        timeout_s: Deadline of a call that came without one; None takes the service's.
        max_concurrency: Calls of this endpoint that run at once; None takes the service's.
        batch: Set for `"batched"`.
        task: Set for `"task"`.
        tags: For the OpenAPI document.
    """

    name: str
    kind: Kind
    path: str
    method: Literal["GET", "POST"] = "POST"
    input: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    inbound: InboundSpec | None = None
    output: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    raw_input: Form = ""
    raw_output: Form = ""
    media_type: str = ""
    doc: str = ""
    is_async: bool = False
    idempotent: bool = False
    internal: bool = False
    timeout_s: float | None = None
    max_concurrency: int | None = None
    batch: BatchPolicy | None = None
    task: TaskPolicy | None = None
    tags: tuple[str, ...] = ()


class MountSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An ASGI app below a path of a service."""

    name: str
    path: str


class DependencySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One edge of the graph: `attribute` of the owner is a handle to `service`.

    Attributes:
        colocate: The service runs in the owner's process, and is in its `ServiceSpec.beside`.
    """

    attribute: str
    service: str
    timeout_s: float | None = None
    retries: int = 1
    colocate: bool = False


class ServiceSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One service.

    Attributes:
        name: Unique in the app.
        target: Where its class is: `"module:Class"`.
        prefix: Route prefix, `""` for the root; None has no HTTP routes.
        replicas: A number, or a policy.
        resources: What it needs itself; `needs` is what its process needs.
        placement: Where on a cluster its processes may be.
        args: Keyword arguments of the constructor; JSON values.
        tunable: Names of those that a running replica takes other values of.
        models: Files of models, by attribute.
        version: Label of this version of the service.
        code: Digest of the source that it runs.
        beside: The services that live in its process, dependencies first; theirs are in it, too.
    """

    name: str
    target: str
    prefix: str | None = None
    replicas: int | Autoscale = 1
    resources: Resources = Resources()
    placement: Placement = Placement()
    limits: Limits = Limits()
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    args: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])
    tunable: tuple[str, ...] = ()
    models: dict[str, ModelSpec] = msgspec.field(default_factory=dict[str, ModelSpec])
    version: str = "1"
    code: str = ""
    doc: str = ""
    endpoints: tuple[EndpointSpec, ...] = ()
    mounts: tuple[MountSpec, ...] = ()
    dependencies: tuple[DependencySpec, ...] = ()
    beside: tuple["ServiceSpec", ...] = ()

    @property
    def together(self) -> tuple["ServiceSpec", ...]:
        """All services of one of its processes, dependencies first."""
        return (*self.beside, self)

    @property
    def needs(self) -> Resources:
        """What one of its processes needs."""
        return Resources.together(service.resources for service in self.together)

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Arguments of the constructors in one of its processes, by service."""
        return {service.name: service.args for service in self.together}

    @property
    def is_tunable(self) -> bool:
        """Whether some of them change at run time."""
        return any(service.tunable for service in self.together)

    @property
    def has_tasks(self) -> bool:
        """Whether its processes run jobs."""
        return any(e.task is not None for service in self.together for e in service.endpoints)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its processes."""
        return {name: value for service in self.together for name, value in service.env.items()}

    def endpoint(self, name: str) -> EndpointSpec:
        """Return the endpoint of that name.

        Raises:
            NotFound: There is none; the message suggests the closest name.
        """
        for endpoint in self.endpoints:
            if endpoint.name == name:
                return endpoint
        names = [e.name for e in self.endpoints]
        raise NotFound(f"{self.name} has no endpoint {name!r}.{suggest(name, names)}")

    @cached_property
    def revision(self) -> str:
        """Digest of the whole content, 12 hex digits."""
        return _digest(self)

    @cached_property
    def process_revision(self) -> str:
        """Digest of what a running process can't take over: when it differs, another one starts."""
        return _digest(self.fixed())

    def fixed(self) -> "ServiceSpec":
        """Return what can't change without a new process."""
        return msgspec.structs.replace(
            self,
            replicas=1,
            prefix=None,
            doc="",
            args={name: value for name, value in self.args.items() if name not in self.tunable},
            beside=tuple(service.fixed() for service in self.beside),
        )


class AppSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A root service and all services that it needs, dependencies first.

    Attributes:
        services: Those that have processes of their own. One that is only ever colocated is in the
            `beside` of each service that it lives with.
        image: What its container has besides.
    """

    root: str
    services: tuple[ServiceSpec, ...]
    image: Image = Image()

    def everything(self) -> dict[str, ServiceSpec]:
        """Return all services by name, also those without processes of their own."""
        found: dict[str, ServiceSpec] = {}
        for service in self.services:
            found |= {inner.name: inner for inner in service.beside if inner.name not in found}
            found[service.name] = service
        return found

    def service(self, name: str) -> ServiceSpec:
        """Return the service of that name.

        Raises:
            NotFound: There is none; the message suggests the closest name.
        """
        for service in self.services:
            if service.name == name:
                return service
        raise NotFound(f"no service {name!r}.{suggest(name, [s.name for s in self.services])}")

    @cached_property
    def revision(self) -> str:
        """Digest of the whole content, 12 hex digits."""
        return _digest(self)

    def to_json(self) -> bytes:
        """Serialise; what is described in the same order gives the same bytes."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> "AppSpec":
        """Read what `to_json` wrote."""
        return msgspec.json.decode(data, type=cls)


def _digest(value: msgspec.Struct) -> str:
    return hashlib.sha256(msgspec.json.encode(value, order="sorted")).hexdigest()[:12]
