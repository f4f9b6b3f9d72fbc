"""Requests between the supervisor and its children, over our wire.

Each child shares one socket pair with the supervisor. A verb is an endpoint of the pseudo-service
`$control`; its body and its answer are msgspec structs as MessagePack. When that connection ends,
the other side is gone.
"""

import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from servekit.core.call import MSGPACK, Call, Payload, Reply, new_request_id, now
from servekit.engine.table import Table
from servekit.errors import CallError, NotFound
from servekit.gateway.credentials import Credentials
from servekit.gateway.edge import Edge
from servekit.observe.metrics import Snapshot
from servekit.spec.app import AppSpec, ServiceSpec
from servekit.wire.connection import Connection

SERVICE = "$control"

T = TypeVar("T")

Verb: TypeAlias = Callable[[bytes], Awaitable[Any]]


class StartReplica(msgspec.Struct, frozen=True):
    """Become a replica.

    Attributes:
        search_path: Folders that go to the front of `sys.path`.
        address: Where to listen.
        folder: The app's private folder.
        jobs: File that keeps the jobs of its tasks; "" if it has none.
        table: As it is when the process takes the order.
    """

    spec: ServiceSpec
    replica: str
    search_path: tuple[str, ...]
    address: str
    folder: str
    table: Table = Table()
    jobs: str = ""


class StartGateway(msgspec.Struct, frozen=True, kw_only=True):
    """Become a gateway.

    Attributes:
        name: Of this worker.
        listener: File descriptor of the listening socket, which all gateways of an app share.
        folder: The app's private folder.
        edge: What clients may do.
        drain_s: Longest wait for running requests at the end.
        leaving: The app is about to end; see the verb `leave`.
        workers: How many gateways share the load.
        dev: Show the playground, and the debug page to everybody.
        credentials: One of which a request must bring; None asks for none.
        settings: What the debug page shows of the settings.
    """

    name: str
    app: AppSpec
    listener: int
    folder: str
    table: Table
    edge: Edge
    drain_s: float
    leaving: bool = False
    workers: int = 1
    dev: bool = False
    credentials: Credentials | None = None
    settings: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class Started(msgspec.Struct, frozen=True):
    """What became of it.

    Attributes:
        address: Where the replica listens; "" when it failed.
        error: One line.
        traceback: The whole exception.
        load_s: Seconds that import and set-up took.
    """

    address: str = ""
    error: str = ""
    traceback: str = ""
    load_s: float = 0.0


class Configured(msgspec.Struct, frozen=True):
    """What became of other arguments: nothing to say, or one line and the whole exception."""

    error: str = ""
    traceback: str = ""


class Stats(msgspec.Struct, frozen=True):
    """A child's figures for the scaler and `servekit status`.

    Attributes:
        ongoing: Calls on board.
        finished: Calls answered since the start.
        capacity_per_s: What its batchers can serve in time.
        waiting: Calls that wait for a replica, by service.
        rss: Resident memory in bytes.
        pid: Of its process.
    """

    ongoing: int = 0
    finished: int = 0
    capacity_per_s: float | None = None
    waiting: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    rss: int = 0
    pid: int = msgspec.field(default_factory=os.getpid)


class Health(msgspec.Struct, frozen=True):
    """Whether the user's hooks are content; "" means well."""

    live: str = ""
    ready: str = ""


class ProcessStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One replica or gateway, for `servekit status`."""

    id: str
    pid: int
    state: str
    ongoing: int
    finished: int
    rss: int
    trouble: str = ""


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One service, for `servekit status`.

    Attributes:
        bounds: How many replicas it may have: `"2"`, or `"1..4"` where the load decides.
        desired: How many it should have now.
        restarts: Replicas started in place of one that died or could not start.
    """

    name: str
    version: str
    state: str
    bounds: str
    desired: int
    restarts: int
    replicas: list[ProcessStatus]


class AppStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A running app, for `servekit status`.

    Attributes:
        name: Of its root service; what it is deployed as, on a cluster.
        pid: Of the `servekit serve` that it is of; 0 if nothing here keeps it up.
    """

    name: str
    target: str
    url: str
    pid: int
    revision: str
    uptime_s: float
    gateways: list[ProcessStatus]
    services: list[ServiceStatus]


class Scale(msgspec.Struct, frozen=True):
    """Have other numbers of replicas: one, or a least and a most where the load decides."""

    services: dict[str, int | tuple[int, int]]


class Wake(msgspec.Struct, frozen=True):
    """Calls wait for this service, which may sleep."""

    service: str


class Nothing(msgspec.Struct, frozen=True):
    """An answer without content."""


class Figures(msgspec.Struct, frozen=True):
    """Metrics of one process."""

    snapshot: Snapshot = ()


def handler(verbs: Mapping[str, Verb]) -> Callable[[Call], Awaitable[Reply]]:
    """Return the `Handler` of a side that knows these verbs."""

    async def handle(call: Call) -> Reply:
        verb = verbs.get(call.endpoint) if call.service == SERVICE else None
        if verb is None:
            raise NotFound(f"unknown control verb {call.service}.{call.endpoint}", started=False)
        answer = await verb(bytes(call.payload.segments[0]))
        return Reply(Payload(MSGPACK, (msgspec.msgpack.encode(answer),)))

    return handle


async def ask(
    connection: Connection,
    verb: str,
    body: msgspec.Struct | None = None,
    *,
    answer: type[T],
    timeout_s: float | None,
) -> T:
    """Ask the other side and wait for its answer.

    Raises:
        CallError: It failed, is gone, or did not answer in time.
    """
    call = Call(SERVICE, verb, request_id=new_request_id(), internal=True)
    call.payload = Payload(MSGPACK, (msgspec.msgpack.encode(body),))
    call.deadline = None if timeout_s is None else now() + timeout_s
    reply = await connection.call(call)
    if reply.payload is None:
        raise CallError(f"control verb {verb} answered a stream")
    return msgspec.msgpack.decode(bytes(reply.payload.segments[0]), type=answer)
