"""A Ray cluster: started here or joined, and what it offers against what an app asks for."""

import logging
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import msgspec
import ray
from ray import serve

from servekit.engine.ray.build import actor_options
from servekit.errors import ConfigError, ResourceError
from servekit.spec.app import ServiceSpec

Number: TypeAlias = tuple[ServiceSpec, int]
"""A service, and how many replicas it is to have."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One machine, or what acts as one.

    Attributes:
        resources: What it has in all, by Ray's names: `CPU`, `GPU`, `memory`, …
    """

    id: str
    address: str
    resources: dict[str, float]
    labels: dict[str, str]


def join(address: str | None) -> None:
    """Start Ray on this machine, or join a cluster.

    Args:
        address: `auto`, `host:port` or `ray://host:port`; None starts one here, which ends with us.

    Raises:
        ConfigError: There is no cluster, or it does not know us.
    """
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        ray.init(
            address=address or "local",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except ConnectionError as error:
        raise ConfigError(
            f"there is no Ray cluster at {address}; `ray start --head` starts one, and without "
            "--ray-address one is started for this app"
        ) from error
    except (RuntimeError, ValueError) as error:
        if "token" in str(error).lower():
            raise ConfigError(
                f"the Ray cluster at {address} asks for a token: set RAY_AUTH_MODE=token, and "
                "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH to what it was started with"
            ) from error
        raise ConfigError(f"can't use the Ray cluster at {address}: {error}") from error
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled")


def inventory() -> tuple[Node, ...]:
    """Return the nodes that are there."""
    return tuple(
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            resources=node["Resources"],
            labels=node["Labels"],
        )
        for node in ray.nodes()
        if node["Alive"]
    )


def check(numbers: Iterable[Number], nodes: Iterable[Node]) -> None:
    """Refuse what the cluster could not hold if it were empty.

    Raises:
        ResourceError: A replica fits on no node, or all of them don't fit together.
    """
    nodes = tuple(nodes)
    total: dict[str, float] = {}
    for spec, number in numbers:
        asked = _asked(spec)
        if not any(_fits(asked, node.resources) for node in nodes):
            raise ResourceError(
                f"{spec.name} asks for {_words(asked)} on one node, and no node of the cluster has "
                f"that: {describe(nodes)}"
            )
        for name, amount in asked.items():
            total[name] = total.get(name, 0.0) + amount * number
    there = _sum(node.resources for node in nodes)
    if not _fits(total, there):
        raise ResourceError(
            f"the app asks for {_words(total)}, and the cluster has {_words(there, total)}: "
            f"{describe(nodes)}; lower what its services ask for, or their replicas"
        )


def has_room(numbers: Iterable[Number]) -> bool:
    """Return whether so many replicas would fit beside what runs now."""
    asked = _sum(
        {name: amount * number for name, amount in _asked(spec).items()} for spec, number in numbers
    )
    return _fits(asked, ray.available_resources())


def describe(nodes: Iterable[Node]) -> str:
    """Return the nodes and what they have."""
    names = ("CPU", "GPU", "memory")
    return "; ".join(
        f"{node.address} {node.id[:12]}: "
        + _words({n: v for n, v in node.resources.items() if n in names or not _is_own(n)})
        for node in nodes
    )


def _asked(spec: ServiceSpec) -> dict[str, float]:
    options = actor_options(spec)
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    return {names[name]: float(value) for name, value in options.items() if name in names} | {
        name: float(value) for name, value in options.get("resources", {}).items()
    }


def _fits(asked: Mapping[str, float], there: Mapping[str, float]) -> bool:
    return all(amount <= there.get(name, 0.0) + 1e-6 for name, amount in asked.items())


def _sum(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _is_own(name: str) -> bool:
    return name.startswith(("node:", "object_store"))


def _words(amounts: Mapping[str, Any], only: Iterable[str] | None = None) -> str:
    shown = amounts if only is None else {name: amounts.get(name, 0.0) for name in only}
    return ", ".join(
        f"{amount / 2**30:.3g} GiB of memory" if name == "memory" else f"{amount:g} {name}"
        for name, amount in sorted(shown.items())
    )


def leave() -> None:
    """Leave the cluster; one that was started here ends."""
    ray.shutdown()
