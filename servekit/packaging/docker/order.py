"""What is to run on a Docker engine, as data; it is kept in a label of each container."""

import hashlib
import math
from typing import Any

import msgspec

from servekit.errors import ConfigError
from servekit.packaging.containerize import DOORS, PORT, PYTHON

APP = "io.servekit.deployed"
REVISION = "io.servekit.revision"
NUMBER = "io.servekit.number"
ORDER = "io.servekit.order"

_STOP_MORE_S = 10.0
"""Beyond what an app takes to drain, before the engine kills it."""


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How an app runs.

    Attributes:
        name: What it is deployed as.
        image: Its id in the engine.
        port: Published on the host.
        address: The host's address that it is published on.
        network: `bridge`, `host`, or a network of the engine's.
        replicas: Containers, each with the whole graph.
        gpus: Devices of each container; -1 is all.
        memory: Bytes of each container; 0 is no limit.
        cpus: Cores of each container; 0 is no limit.
        shm: Bytes of shared memory of each container.
        env: Variables, beside those of the image; no secrets.
        drain_delay_s: As `Settings`.
        drain_s: As `Settings`.
        before: Image that ran before this one, for `rollback`.
    """

    name: str
    image: str
    port: int
    address: str = "127.0.0.1"
    network: str = "bridge"
    replicas: int = 1
    gpus: int = 0
    memory: int = 0
    cpus: float = 0.0
    shm: int = 1 << 30
    env: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    drain_delay_s: float = 1.0
    drain_s: float = 20.0
    before: str = ""

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas}: must be 1 or more")
        if not 0 < self.port < 65536:
            raise ConfigError(f"port={self.port}: a published port is from 1 to 65535")

    @property
    def revision(self) -> str:
        """Digest of what makes a container another one, 8 hex digits."""
        same = msgspec.structs.replace(self, replicas=1, before="")
        return hashlib.sha256(msgspec.json.encode(same, order="sorted")).hexdigest()[:8]

    @property
    def inside(self) -> int:
        """The port that the app listens on; on the host's own network it is the host's."""
        return self.port if self.network == "host" else PORT

    @property
    def stop_s(self) -> int:
        """How long a container may take to end."""
        return math.ceil(self.drain_delay_s + self.drain_s + _STOP_MORE_S)

    def to_json(self) -> str:
        """Serialise."""
        return msgspec.json.encode(self, order="sorted").decode()


def port_container(order: Order) -> dict[str, Any]:
    """Return what the container that holds the network is created with."""
    wait = "import signal; signal.sigwait({signal.SIGTERM})"
    given: dict[str, Any] = {
        "name": f"{order.name}-port",
        "image": order.image,
        "entrypoint": [PYTHON, "-I", "-c", wait],
        "command": [],
        "network": order.network,
        "labels": {APP: order.name, ORDER: order.to_json()},
        "healthcheck": {"test": ["NONE"]},
        "mem_limit": 64 << 20,
        "pids_limit": 4,
        **_LOCKED_DOWN,
    }
    if order.network != "host":
        given["ports"] = {f"{PORT}/tcp": (order.address, order.port)}
    return given


def app_container(order: Order, number: int, secrets: dict[str, str]) -> dict[str, Any]:
    """Return what one of the app's containers is created with.

    Args:
        order: How it runs.
        number: Of the container, from 1.
        secrets: Variables that are not kept in the order.
    """
    from docker.types import DeviceRequest  # noqa: PLC0415

    given: dict[str, Any] = {
        "name": f"{order.name}-{order.revision}-{number}",
        "image": order.image,
        "network_mode": f"container:{order.name}-port",
        "volumes": {f"{order.name}-doors": {"bind": DOORS, "mode": "rw"}},
        "tmpfs": {"/tmp": "mode=1777"},  # noqa: S108
        "shm_size": order.shm,
        "environment": {**environment(order), **secrets},
        "labels": {
            APP: order.name,
            REVISION: order.revision,
            NUMBER: str(number),
            ORDER: order.to_json(),
        },
        "pids_limit": 4096,
        **_LOCKED_DOWN,
    }
    if order.gpus:
        given["device_requests"] = [DeviceRequest(count=order.gpus, capabilities=[["gpu"]])]
    if order.memory:
        given["mem_limit"] = order.memory
    if order.cpus:
        given["nano_cpus"] = round(order.cpus * 1e9)
    return given


def environment(order: Order) -> dict[str, str]:
    """Return the variables of the app's containers that are no secrets."""
    host = order.address if order.network == "host" else "0.0.0.0"  # noqa: S104
    return {
        **order.env,
        "SERVEKIT_HANDOVER_DIR": DOORS,
        "SERVEKIT_HOST": host,
        "SERVEKIT_PORT": str(order.inside),
        "SERVEKIT_DRAIN_DELAY_S": f"{order.drain_delay_s:g}",
        "SERVEKIT_DRAIN_S": f"{order.drain_s:g}",
    }


_LOCKED_DOWN: dict[str, Any] = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "restart_policy": {"Name": "unless-stopped"},
}
