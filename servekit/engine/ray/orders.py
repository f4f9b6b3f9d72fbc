"""What the processes of an app on Ray are told: plain data, as MessagePack in their Serve arguments.

Ray Serve keeps the arguments of every deployment and gives the latest to each replica that it
starts. So they are the app's whole memory: what ran before, what an operator said of its numbers,
and the secret, which nobody but the cluster's owner can read there.
"""

from typing import Any, Final

import msgspec

from servekit.gateway.credentials import Credentials
from servekit.gateway.edge import Edge
from servekit.settings import LogFormat
from servekit.spec.app import AppSpec, ServiceSpec
from servekit.spec.policy import Autoscale

CONTROLLER: Final = "servekit.controller"
"""The Serve deployment of an app's controller."""
GATEWAY: Final = "servekit.gateway."
"""What the names of its gateways' deployments begin with; a node's id follows."""


class Code(msgspec.Struct, frozen=True, kw_only=True):
    """The author's code, as it was when the app was described.

    Attributes:
        archive: A zip of the author's modules, and of models beside them that are small; b"" has none.
        links: Of the other models: where the modules look for them, and where the nodes have them.
        digest: Of both.
        search_path: Folders on `sys.path` behind it: what the archive lacks, where the nodes have it.
        classes: Pickled classes that no module has (notebooks), by service.
    """

    archive: bytes = b""
    links: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    digest: str = ""
    search_path: tuple[str, ...] = ()
    classes: dict[str, bytes] = msgspec.field(default_factory=dict[str, bytes])


class Revision(msgspec.Struct, frozen=True, kw_only=True):
    """An app and its code."""

    app: AppSpec
    code: Code = Code()


class Common(msgspec.Struct, frozen=True, kw_only=True):
    """What every process of an app is told.

    Attributes:
        app: Name of the Serve application.
        secret: What its processes prove to each other over TCP.
        runtime_dir: Where private folders for unix sockets are made.
        drain_s: Longest wait for running calls at the end.
        runtime_env: Ray runtime environment of all its processes: that of who deployed it first. Serve
            would take that of whoever gives it an order, and restart everything when it differs.
    """

    app: str
    secret: bytes
    log_level: str = "info"
    log_format: LogFormat = "console"
    runtime_dir: str = "/tmp"  # noqa: S108
    drain_s: float = 20.0
    runtime_env: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])


class ReplicaOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Become a replica.

    Attributes:
        services: All services of the app, and whether they may sleep.
        jobs: File that keeps the jobs of its tasks; "" if it has none.
    """

    common: Common
    spec: ServiceSpec
    code: Code
    services: dict[str, bool]
    jobs: str = ""


class Front(msgspec.Struct, frozen=True, kw_only=True):
    """How the gateways listen, and whom they let in.

    Attributes:
        labels: Labels of the nodes that have one; empty is every node.
        drain_delay_s: How long one that leaves says so before it takes no more connections.
        dev: Show the playground, and the debug page to everybody.
        settings: What the debug page shows.
    """

    host: str = "127.0.0.1"
    port: int = 3000
    labels: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    edge: Edge = Edge()
    credentials: Credentials | None = None
    drain_delay_s: float = 5.0
    dev: bool = False
    settings: dict[str, str] = msgspec.field(default_factory=dict[str, str])

    @property
    def url(self) -> str:
        """Where the gateways listen."""
        return self.edge.url(self.host, self.port)


class GatewayOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Become a gateway.

    Attributes:
        name: Of its deployment.
        services: All services of the app, and whether they may sleep.
        workers: How many gateways share the load.
    """

    common: Common
    name: str
    app: AppSpec
    front: Front
    services: dict[str, bool]
    workers: int = 1


class AppOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Be this app.

    Attributes:
        target: What the user asked to serve.
        serial: How many orders there were before.
        current: What is wanted.
        previous: What was there before, for a rollback.
        numbers: Replicas in place of what the code says, by service.
        crowded: Services for which there is no room beside their old replicas.
        jobs: Folder of the apps' jobs.
        started_at: Time of day of the first order.
    """

    common: Common
    target: str
    current: Revision
    front: Front
    serial: int = 0
    previous: Revision | None = None
    numbers: dict[str, int | Autoscale] = msgspec.field(
        default_factory=dict[str, "int | Autoscale"]
    )
    crowded: tuple[str, ...] = ()
    jobs: str = ""
    started_at: float = 0.0

    def replicas(self, spec: ServiceSpec) -> int | Autoscale:
        """Return how many replicas a service is to have."""
        return self.numbers.get(spec.name, spec.replicas)


class Outcome(msgspec.Struct, frozen=True):
    """What became of an order.

    Attributes:
        done: Everything runs as it says, or nothing will come of it.
        error: Why nothing will; the order before it holds again.
    """

    done: bool = False
    error: str = ""


class States(msgspec.Struct, frozen=True):
    """What only the controller sees, told to every process.

    Attributes:
        services: All services of the app, and whether they may sleep.
        down: Services that keep failing: their calls are refused.
        unready: Replicas whose `ready` hook is not content: they take no calls.
    """

    services: dict[str, bool]
    down: tuple[str, ...] = ()
    unready: tuple[str, ...] = ()


def pack(order: msgspec.Struct) -> bytes:
    """Serialise an order."""
    return msgspec.msgpack.encode(order)
