"""An order as a Compose file: the same containers, for those who start theirs by `docker compose up`."""

from collections.abc import Sequence
from typing import Any

from servekit.packaging.docker.order import Order, app_container, port_container
from servekit.packaging.yaml import to_yaml

_PORT = "port"
_DOORS = "doors"
_SAME = frozenset(
    {
        "cap_drop",
        "command",
        "entrypoint",
        "environment",
        "healthcheck",
        "image",
        "mem_limit",
        "pids_limit",
        "read_only",
        "security_opt",
        "shm_size",
    }
)
"""What Docker's SDK and Compose call the same."""


def compose(order: Order, *, secrets: Sequence[str] = ()) -> str:
    """Return the file.

    Args:
        order: How the app runs; its image by a name that the engine knows.
        secrets: Names of variables that are taken from the environment of who starts it.
    """
    services = {_PORT: _service(port_container(order))}
    if order.network in ("bridge", "host"):
        services[_PORT]["network_mode"] = order.network
    else:
        services[_PORT]["networks"] = [order.network]
    before = {_PORT: {"condition": "service_started"}}
    for number in range(1, order.replicas + 1):
        taken: dict[str, Any] = dict.fromkeys(secrets)  # without a value: the environment's
        services[f"app-{number}"] = {
            **_service(app_container(order, number, taken)),
            "network_mode": f"service:{_PORT}",
            "depends_on": dict(before),
            "stop_grace_period": f"{order.stop_s}s",
        }
        before[f"app-{number}"] = {"condition": "service_healthy"}  # the next shares its socket
    found: dict[str, Any] = {"services": services, "volumes": {_DOORS: {}}}
    if order.network not in ("bridge", "host"):
        found["networks"] = {order.network: {"external": True}}
    return to_yaml([found])


def _service(given: dict[str, Any]) -> dict[str, Any]:
    """Return what Compose calls a container that Docker's SDK would create."""
    found = {name: value for name, value in given.items() if name in _SAME}
    found["restart"] = given["restart_policy"]["Name"]
    if "ports" in given:
        found["ports"] = [
            f"{address}:{port}:{inside.removesuffix('/tcp')}"
            for inside, (address, port) in given["ports"].items()
        ]
    if "volumes" in given:
        found["volumes"] = [f"{_DOORS}:{one['bind']}" for one in given["volumes"].values()]
    if "tmpfs" in given:
        found["tmpfs"] = [f"{path}:{options}" for path, options in given["tmpfs"].items()]
    if "nano_cpus" in given:
        found["cpus"] = given["nano_cpus"] / 1e9
    if "device_requests" in given:
        [request] = given["device_requests"]
        count = "all" if request.count < 0 else request.count
        device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
        found["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return found
